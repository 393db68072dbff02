"""`lowbit report` writes pages about runs and results, or compares several."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.extensions import extension

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser

_COMPARISON = Path("comparison.html")

log = logging.getLogger(__name__)


class MakeReport:
    """`lowbit report`."""

    summary = "Write a page about a run or results, or compare several."
    examples: tuple[str, ...] = (
        "lowbit report runs/train",
        "lowbit report runs/fp32 runs/transform --output comparison.html",
        "lowbit report speed.json",
    )

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit.cli.parser import Parser
        from lowbit.config import section

        @section()
        class ReportConfig:
            """Output of the command."""

            output: str = ""
            """File for the page. If omitted, `report.html` in the folder of the run, the file of results with .html, or
            `comparison.html` for several."""

        parser = Parser(program, self.summary, ReportConfig, examples=self.examples)
        parser.add_argument(
            "run", metavar="RUN", nargs="+", help="Folder of `lowbit train`, or file that `--json` wrote."
        )
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Write the page and print its path."""
        settings, options = self.parser(program).resolve(words)
        print(write([Path(run) for run in options["run"]], Path(settings.output) if settings.output else None))


def write(paths: Sequence[Path], output: Path | None = None) -> Path:
    """Write a page about runs or files of results, leaving out unreadable ones of several, and return its path.

    Raises:
        ValueError: nothing can be read, runs and results are mixed, or the page cannot be written.
    """
    from lowbit.report import training
    from lowbit.report.page import write_page
    from lowbit.report.page.run import RunFiles, read_run

    measured = extension("results")
    read, problems = dict[Path, object](), list[str]()
    for path in dict.fromkeys(paths):
        try:
            if path.is_file() and measured is None:
                raise ValueError(f"{path} is a file of results, and lowbit's benchmarks are not installed")
            read[path] = measured.read_results(path) if path.is_file() and measured else read_run(path)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if not read:
        raise ValueError(problems[0])
    for problem in problems:
        log.warning("%s", problem)
    runs = [value for value in read.values() if isinstance(value, RunFiles)]
    results = {path: value for path, value in read.items() if isinstance(value, tuple)}
    if runs and results:
        raise ValueError("runs and files of results are given; allowed: all of one kind, which can be compared")
    if len(runs) == 1 and not problems:
        page, place = training.run_page(runs[0]), runs[0].folder / training.PAGE
    elif runs:
        page, place = training.comparison_page(runs, problems), _COMPARISON
    else:
        assert measured is not None  # files of results were refused above without it
        page = measured.results_page(measured.paired(list(results), list(results.values())), problems)
        place = next(iter(results)).with_suffix(".html") if len(paths) == 1 else _COMPARISON
    write_page(page, output or place)
    if output is None and place.name == training.PAGE:
        from lowbit.train.folder import RunFolder

        RunFolder(place.parent).note(training.PAGE)
    return output or place
