"""Pages with marks: what lies between `<!-- NAME -->` and `<!-- end -->` is written by a program."""

BEGIN, END = "<!-- {} -->", "<!-- end -->"


def replaced(page: str, name: str, text: str) -> str:
    """Return a page with this text between the mark of this name and the next end."""
    before, mark, rest = page.partition(BEGIN.format(name))
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no {BEGIN.format(name)} with its {END}; allowed: one for each table")
    return f"{before}{mark}\n\n{text}\n\n{end}{after}"
