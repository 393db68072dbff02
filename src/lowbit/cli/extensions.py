"""Find commands and pages that another package of this distribution adds to the command line.

Entry points name them, so that the library works without that package and never imports it directly.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

GROUP = "lowbit.cli"


def extension(name: str) -> Any | None:
    """Load the object that the entry point of this name refers to; None if it is not installed.

    Args:
        name: "commands" (a function that returns commands by name) or "results" (a module that makes pictures and
            pages of results).
    """
    try:
        points = distribution("lowbit").entry_points.select(group=GROUP, name=name)
    except PackageNotFoundError:  # a plain checkout on PYTHONPATH
        return None
    return next((point.load() for point in points), None)
