"""Registry of formats: lowbit's own, found by their folders, and those of installed packages, by entry points.

Each folder next to this file with a `codec.py` is a format: it has the codec class and, in `SHORT_NAMES`, factories by
short name. Another package adds formats in its pyproject.toml, each by a short name or the name of a class:

    [project.entry-points."lowbit.codecs"]
    sign = "their_package:Sign"                 # a codec class, or a function without arguments that returns a codec

Entry points name code that the user has installed, and are loaded when the user names a format. Peers cannot make this
process load code: they only compare fingerprints.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lowbit.codecs.base import Codec

GROUP = "lowbit.codecs"
Factory = Callable[..., Any]


@functools.cache
def formats() -> Mapping[str, type[Codec]]:
    """The codec class of each of lowbit's own formats, by the name of its folder."""
    codecs = {}
    for folder in sorted(path.parent.name for path in Path(__file__).parent.glob("*/codec.py")):
        module = importlib.import_module(f"{__package__}.{folder}.codec")
        own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
        (codecs[folder],) = (c for c in own if issubclass(c, Codec))
    return codecs


@functools.cache
def short_names() -> dict[str, Factory]:
    """The factory of each of lowbit's own short names."""
    modules = (inspect.getmodule(codec) for codec in formats().values())
    return {name: factory for module in modules for name, factory in getattr(module, "SHORT_NAMES", {}).items()}


@functools.cache
def classes() -> dict[str, type[Codec]]:
    """lowbit's own codec classes that can be named in full, by their names: those with a short name."""
    named = {type(factory()) for factory in short_names().values()}
    return {codec.__name__: codec for codec in formats().values() if codec in named}


@functools.cache
def outside() -> tuple[EntryPoint, ...]:
    """Entry points of formats in installed packages, not loaded."""
    return tuple(entry_points(group=GROUP))


def named(name: str) -> Factory | None:
    """Return the factory with a short name, or the class with a name; None if there is neither.

    Raises:
        ValueError: the name is ambiguous, or its entry point cannot be loaded or is not a codec.
    """
    own = short_names().get(name) or classes().get(name)
    theirs = [point for point in outside() if name in (point.name, point.attr)]
    if not theirs:
        return own
    if own or len({point.value for point in theirs}) > 1:
        rivals = ["lowbit"] * bool(own) + [_described(point) for point in theirs]
        raise ValueError(
            f"codec {name!r} is ambiguous: it is a name of {' and of '.join(rivals)}; allowed: one of them"
        )
    return _loaded(theirs[0])


def _loaded(point: EntryPoint) -> Factory:
    try:
        loaded = point.load()
    except Exception as error:  # foreign code: its errors must not affect lowbit's formats
        raise ValueError(f"{_described(point)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise ValueError(
            f"{_described(point)} is {loaded!r}; allowed: a codec class, or a function that returns a codec"
        )
    if inspect.isclass(loaded) and loaded.__name__ in classes():
        raise ValueError(f"{_described(point)} has the name of one of lowbit's own codecs; allowed: another name")
    return loaded


def _described(point: EntryPoint) -> str:
    package = point.dist.name if point.dist else "an unknown package"
    return f"the entry point {point.name} = {point.value} of {package}"
