"""Read configurations from TOML, and write them with an explanation of each key."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lowbit.config.section import ConfigError, Setting, Text, build, settings_of
from lowbit.terminal import printable

_Class = TypeVar("_Class")
_WIDTH = 80


def resolve(cls: type[_Class], path: str | Path | None = None, overrides: Iterable[tuple[str, str]] = ()) -> _Class:
    """Read a section from a TOML file, if there is one, and apply overrides such as ("pipeline.forward", "int4").

    Raises:
        ConfigError: a missing or invalid TOML file, an unknown key (the closest valid one is named), or a wrong value.
    """
    values = read_toml(Path(path)) if path is not None else {}
    return build(cls, {**values, **{key: Text(text) for key, text in overrides}})


def to_toml(config: Any, *, meanings: bool = True) -> str:
    """Write a section as TOML that `resolve` reads back; fields that are None are left out.

    Args:
        meanings: write above each key its meaning, allowed values, and the default if it differs.
    """
    return "\n".join(_lines(config, settings_of(type(config)), "", meanings)).strip() + "\n"


def in_toml(value: Any) -> str:
    """Format a value as TOML, which equals JSON for all values of fields.

    Characters that a terminal would act upon are escaped.
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    text = json.dumps(value if isinstance(value, str | int | float) else str(value), ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(c if printable(c) == c else f"\\U{ord(c):08x}" for c in text)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the values of a TOML file. Raises ConfigError: the file is missing or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def _lines(config: Any, settings: Mapping[str, Setting], prefix: str, meanings: bool) -> Iterator[str]:
    for setting in settings.values():
        if setting.is_section:
            continue
        value = getattr(config, setting.name)
        if meanings:
            changed = setting.default not in (value, None, dataclasses.MISSING)
            yield from _comment(setting.explained(f"default: {in_toml(setting.default)}" if changed else ""))
        if value is not None:
            yield f"{setting.name} = {in_toml(value)}"
        elif meanings:
            yield f"# {setting.name} = ..."
    for setting in settings.values():
        if setting.is_section:
            yield from ["", *(_comment(setting.meaning) if meanings else ())]
            yield f"[{prefix}{setting.name}]"
            within = settings_of(setting.hint, setting.default)
            yield from _lines(getattr(config, setting.name), within, f"{prefix}{setting.name}.", meanings)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
