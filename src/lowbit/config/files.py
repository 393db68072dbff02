"""Configurations as text: TOML files, overrides on a command line, and TOML that says what each key means."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from lowbit.config.section import ConfigError, build, check_shape, hints_of, is_section, refuse_unknown, settings_of
from lowbit.config.types import element_of, union_of

_Class = TypeVar("_Class")
_WIDTH = 100


def resolve(cls: type[_Class], path: str | Path | None = None, overrides: Iterable[tuple[str, str]] = ()) -> _Class:
    """A section from a TOML file, if there is one, with overrides such as ("pipeline.forward", "int4").

    Raises:
        ConfigError: a file that is missing or no TOML, an unknown key (the closest known one is named), a wrong value.
    """
    values = read_toml(Path(path)) if path is not None else {}
    check_shape(cls, values)
    for key, text in overrides:
        override(cls, values, key, text)
    return build(cls, values)


def read_toml(path: Path) -> dict[str, Any]:
    """The nested values of a TOML file.

    Raises:
        ConfigError: it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def override(cls: Any, values: dict[str, Any], key: str, text: str, prefix: str = "") -> None:
    """Set a key such as "pipeline.forward" in nested values.

    Raises:
        ConfigError: an unknown key.
    """
    name, dot, rest = key.partition(".")
    hints = hints_of(cls)
    if dot and is_section(hints.get(name)):
        override(hints[name], values.setdefault(name, {}), rest, text, f"{prefix}{name}.")
        return
    refuse_unknown([name if dot and not prefix else key], hints, prefix)
    values[key] = value_of(text, hints[key])


def value_of(text: str, hint: Any) -> Any:
    """What a word of a command line means to a field.

    That is its value in TOML's notation, or the text itself where it is none or where text is wanted. Lists are TOML's
    or have commas between their elements: those within parentheses belong to an element, as in
    "int4,GroupInt(bits=6, group=32)".
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    if (element := element_of(hint)) is not None:
        return value if isinstance(value, list) else [value_of(part, element) for part in _split(text)]
    kinds = union_of(hint)
    if isinstance(value, str) or (isinstance(value, bool) and bool in kinds):
        return value
    wants_text = any(kind is str or hasattr(kind, "parse") or get_origin(kind) is Literal for kind in kinds)
    return text if wants_text else value


def to_toml(config: Any) -> str:
    """A configuration as TOML that says what each key means, what is allowed and what is the default."""
    return "\n".join(_lines(config, "")).strip() + "\n"


def _lines(config: Any, name: str) -> Iterator[str]:
    settings = settings_of(type(config))
    for setting in settings:
        if is_section(setting.hint):
            continue
        value = getattr(config, setting.name)
        default = "" if setting.default in (None, dataclasses.MISSING) else f"; default: {in_toml(setting.default)}"
        yield from textwrap.wrap(
            f"{setting.meaning} ({setting.allowed}{default})", _WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        yield f"# {setting.name} = ..." if value is None else f"{setting.name} = {in_toml(value)}"
    for setting in settings:
        if is_section(setting.hint):
            yield from ["", *textwrap.wrap(setting.meaning, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            yield f"[{name}{setting.name}]"
            yield from _lines(getattr(config, setting.name), f"{name}{setting.name}.")


def in_toml(value: Any) -> str:
    """A value in TOML's notation, which is JSON's for all that a field can hold."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    text = json.dumps(value if isinstance(value, str | int | float) else str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
