"""Command-line options from a `Settings` dataclass, so that a setting is named, explained and checked in one place."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape


def parameters(settings: type) -> list[inspect.Parameter]:
    """One keyword parameter for each field, as typer reads them; a list that is not given is None.

    Several values are one option with commas, named in the singular: `seeds: tuple[int, ...]` is `--seed 0,1,2`. A
    field without a default is an argument. What would be a word of Python ends in an underscore: `continue_`.
    Explanations come from the "Args:" of the docstring.
    """
    explained = {name: escape(text) for name, text in explanations(settings).items()}
    hints = typing.get_type_hints(settings)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[
                hints[field.name],
                typer.Argument(metavar=field.name.upper(), help=explained.get(field.name)),
            ],
        )
        if field.default is dataclasses.MISSING
        else inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if _element(hints[field.name]) else field.default,
            annotation=Annotated[
                _single(hints[field.name]) | None,
                typer.Option(
                    _option(field.name, hints[field.name]),
                    help=explained.get(field.name),
                    show_default=_shown(field.default),
                ),
            ],
        )
        for field in dataclasses.fields(settings)
    ]


def build(settings: type, given: Mapping[str, Any]) -> Any:
    """Settings from what was given on the command line, by field; None keeps the default.

    Raises:
        ValueError: as `settings` raises it, or an element of a list that is not of its type.
    """
    hints = typing.get_type_hints(settings)
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if element := _element(hints[name]):
            values[name] = tuple(_convert(text, element, name) for text in split(value))
    return settings(**values)


def split(text: str) -> list[str]:
    """Parts between commas; commas within parentheses belong to a part, as in "int4,GroupInt(bits=6, group=32)"."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def explanations(settings: type) -> dict[str, str]:
    """What the docstring's "Args:" says of each field; several may share it, as in "dim, layers: of the model"."""
    _, _, text = inspect.cleandoc(settings.__doc__ or "").partition("Args:\n")
    text = " ".join(re.split(r"\n(?=\S)", text)[0].split())
    names = "|".join(field.name for field in dataclasses.fields(settings))
    pieces = re.split(rf"(?:^|(?<=\s))((?:{names})(?:, (?:{names}))*): ", text)
    return {
        name: explanation.strip(" ;.") + "."
        for entry, explanation in zip(pieces[1::2], pieces[2::2], strict=True)
        for name in entry.split(", ")
    }


def _option(name: str, hint: Any) -> str:
    """`--link` for links, `--boundary` for boundaries, `--warmup-steps`, `--demo/--no-demo`."""
    if _element(hint):
        name = re.sub(r"(?<=[^s])s$", "", re.sub(r"ies$", "y", name))
    flag = f"--{name.rstrip('_').replace('_', '-')}"
    return f"{flag}/--no-{flag[2:]}" if _single(hint) is bool else flag


def _element(hint: Any) -> type | None:
    """The element's type of a tuple; None for anything else."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def _single(hint: Any) -> Any:
    """The type as one word on the command line: text for a list, the value's for an optional one."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return str if _element(hint) else hint


def _shown(default: Any) -> str | bool:
    """The text of a list that is the default; of other values whether to show them."""
    if isinstance(default, tuple) and default:
        return ",".join(map(str, default))
    return default not in (None, "", ())


def _convert(text: str, kind: Any, name: str) -> Any:
    if hasattr(kind, "parse"):  # which says itself what is allowed
        return kind.parse(text)
    try:
        return kind(text)
    except ValueError:
        allowed = {int: "integers", float: "numbers"}.get(kind, kind.__name__)
        raise ValueError(f"{name} has {text!r}; allowed: {allowed}, between commas") from None
