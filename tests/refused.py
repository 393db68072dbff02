"""Calls that must be refused: one table for a package's wrong settings."""

import re
from collections.abc import Callable
from typing import Any


def refused(*rows: tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]) -> list[str]:
    """Assert that each call raises such an error with a text that matches a pattern; list all that do not.

    Returns:
        The texts.
    """
    texts, wrong = [], []
    for call, kind, pattern in rows:
        try:
            found = f"nothing, but {call()!r:.100}"
        except Exception as error:
            texts.append(str(error))
            if isinstance(error, kind) and re.search(pattern, str(error), re.S):
                continue
            found = f"{type(error).__name__}: {error}"
        wrong.append(f"{found}\n  instead of {kind}: {pattern}")
    assert not wrong, "\n".join(wrong)
    return texts
