"""Annotations in words: what a field takes, as errors and help say it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

_KINDS = {
    int: ["an integer"],
    float: ["a finite number"],
    bool: ["true", "false"],
    str: ["a string"],
    type(None): ["nothing"],
}
_PLURALS = {int: "integers", float: "finite numbers", str: "strings"}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def element_of(hint: Any) -> Any:
    """The type of a tuple's elements; None for anything else."""
    hint = _bare(hint)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def union_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself alone."""
    hint = _bare(hint)
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def kind_of(hint: Any) -> str:
    """What an annotation takes, without its range: "an integer or nothing"."""
    if (element := element_of(hint)) is not None:
        bare = _bare(element)
        return f"{kind_of(bare)} or a list of {_PLURALS.get(bare, 'them')}"
    if choices := choices_of(hint):
        return ", ".join(choices)
    kinds = [word for kind in union_of(hint) for word in _words(_bare(kind))]
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def choices_of(hint: Any) -> list[str]:
    """The values of a `Literal[...]`; none of anything else."""
    bare = _bare(hint)
    return [str(value) for value in typing.get_args(bare)] if typing.get_origin(bare) is Literal else []


def _words(kind: Any) -> list[str]:
    return choices_of(kind) or _KINDS.get(kind) or [f"a {kind.__name__.lower()}"]


def range_of(hint: Any) -> str:
    """The range of an annotation: "at least 0 and at most 1"; empty if it has none."""
    return " and ".join(f"{_BOUNDS[name]} {limit:g}" for name, limit in _limits(hint))


def _limits(hint: Any) -> Iterator[tuple[str, float]]:
    if typing.get_origin(hint) is Annotated:
        for note in hint.__metadata__:
            for limit in getattr(note, "metadata", [note]):  # what pydantic's `Field` holds
                yield from ((name, getattr(limit, name)) for name in _BOUNDS if hasattr(limit, name))
        yield from _limits(hint.__origin__)
    elif (element := element_of(hint)) is not None:
        yield from _limits(element)
    elif len(kinds := union_of(hint)) > 1:
        for kind in kinds:
            yield from _limits(kind)


def _bare(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint
