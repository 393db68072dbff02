"""A configuration from TOML, from overrides on a command line, or from nested mappings."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lowbit.train.config import TrainConfig
from lowbit.train.section import ConfigError, hints


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """A configuration from nested mappings, as TOML and JSON give them.

    Raises:
        ConfigError: an unknown section or key (the closest known one is named), a wrong type or value.
    """
    _check_shape(values)
    sections = hints(TrainConfig)
    return TrainConfig(**{name: sections[name](**value) for name, value in values.items()})


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """A configuration from a TOML file (or the defaults) with overrides such as "pipeline.forward=int4".

    Raises:
        ConfigError: a file that is missing or no TOML, an override without "section.key=value", or what `from_mapping`
            refuses.
    """
    values = _read_toml(Path(path)) if path is not None else {}
    _check_shape(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and name):
            raise ConfigError(f"override is {override!r}; allowed: section.key=value")
        sections = hints(TrainConfig)
        _refuse_unknown([section], sections, "")
        _refuse_unknown([name], hints(sections[section]), f"{section}.")
        values.setdefault(section, {})[name] = _parse_value(text.strip(), hints(sections[section])[name])
    return from_mapping(values)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def _check_shape(values: Any) -> None:
    """Known sections, each with known keys; their values are not looked at."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"a configuration is {values!r}; allowed: a mapping of sections")
    sections = hints(TrainConfig)
    _refuse_unknown(values, sections, "")
    for name, value in values.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r}; allowed: a section, [{name}]")
        _refuse_unknown(value, hints(sections[name]), f"{name}.")


def _parse_value(text: str, hint: Any) -> Any:
    """A value in TOML's notation; where it is none, or where a string is wanted, the text itself."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    wants_text = hint is str or hint == tuple[str, ...]
    return text if wants_text and not isinstance(value, str | list) else value


def _refuse_unknown(keys: Iterable[str], known: Mapping[str, Any], prefix: str) -> None:
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.4)
            advice = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown {'key' if prefix else 'section'} {prefix}{key}; {advice}")
