"""Commands and pages that another package of this distribution adds to the command line.

They are found by entry points, so that the library works without that package and imports none of it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

GROUP = "lowbit.cli"


def extension(name: str) -> Any | None:
    """Return what the entry point of this name refers to; None where nothing is installed under it.

    Args:
        name: "commands" (a function that returns commands by name) or "results" (a module that makes pictures and
            pages of results).
    """
    try:
        points = distribution("lowbit").entry_points.select(group=GROUP, name=name)
    except PackageNotFoundError:  # a plain checkout on PYTHONPATH
        return None
    return next((point.load() for point in points), None)
