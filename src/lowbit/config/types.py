"""Describe the values that annotations of settings allow, and convert text of a command line into values."""

from __future__ import annotations

import tomllib
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


class Text(str):
    """A word of a command line; the annotation of its setting determines its value."""


def element_of(hint: Any) -> Any:
    """Return the type of a tuple's elements; None for other annotations."""
    hint = _bare(hint)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def union_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; another annotation is its only member."""
    hint = _bare(hint)
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return tuple(map(_bare, members))


def choices_of(hint: Any) -> list[str]:
    """Return the values of a `Literal[...]`, or of a tuple of them; empty for other annotations."""
    bare = _bare(hint if (element := element_of(hint)) is None else element)
    return [str(value) for value in typing.get_args(bare)] if typing.get_origin(bare) is Literal else []


def kind_of(hint: Any) -> str:
    """Describe what an annotation takes, without its range: "an integer or nothing"."""
    if (element := element_of(hint)) is not None:
        return f"{kind_of(element)} or a list of {_PLURALS.get(_bare(element), 'them')}"
    if choices := choices_of(hint):
        return ", ".join(choices)
    kinds = [word for kind in union_of(hint) for word in choices_of(kind) or _KINDS.get(kind) or [f"a {kind.__name__}"]]
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def range_of(hint: Any) -> str:
    """Describe the range of an annotation: "at least 0 and at most 1"; empty if it has none."""
    return " and ".join(f"{_BOUNDS[name]} {limit}" for name, limit in _limits(hint))


def as_type(value: Any, hint: Any) -> Any:
    """Convert a value for a field: make a tuple of a list or a single element, and call `parse`."""
    if (element := element_of(hint)) is None:
        return _parsed(value, hint)
    items = tuple(value) if isinstance(value, list | tuple) else (value,)
    return () if items == ("",) else tuple(_parsed(item, element) for item in items)


def read(text: str, hint: Any) -> Any:
    """Parse text as TOML; return the text itself if it is not TOML, or if the annotation takes text.

    A list is TOML's or separated by commas; commas within parentheses belong to an element, as in
    "int4,GroupInt(bits=6, group=32)".
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = str(text)
    if (element := element_of(hint)) is not None:
        return value if isinstance(value, list) else [read(part, element) for part in _split(text)]
    kinds = union_of(hint)
    if isinstance(value, str) or (type(value) in kinds and type(value) is not float):
        return value
    return str(text) if any(map(_takes_text, kinds)) else value


def _takes_text(kind: Any) -> bool:
    """Whether a member of a union is text, is parsed from text, or is a choice with a text value."""
    if typing.get_origin(kind) is Literal:
        return any(isinstance(choice, str) for choice in typing.get_args(kind))
    return kind is str or hasattr(kind, "parse")


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _parsed(value: Any, hint: Any) -> Any:
    parse = next((kind.parse for kind in union_of(hint) if hasattr(kind, "parse")), None)
    return parse(value) if parse and isinstance(value, str) else value


def _limits(hint: Any) -> Iterator[tuple[str, float]]:
    if typing.get_origin(hint) is Annotated:
        for note in hint.__metadata__:
            for limit in getattr(note, "metadata", [note]):  # pydantic's `Field` keeps its limits there
                yield from ((name, getattr(limit, name)) for name in _BOUNDS if hasattr(limit, name))
    for part in typing.get_args(hint):  # of an annotated type, a tuple or a union
        yield from _limits(part)


def _bare(hint: Any) -> Any:
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint
