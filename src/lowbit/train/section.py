"""What every section of a configuration has in common: frozen values, checked against their annotations."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar


class ConfigError(ValueError):
    """What the user asked for cannot be done; one line that says what and what is allowed instead."""


class Section:
    """Base of the sections: values are checked against the annotations, then against `ranges` and `choices`."""

    name: ClassVar[str]
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for key, hint in hints(type(self)).items():
            value = _conform(getattr(self, key), hint, f"{self.name}.{key}")
            object.__setattr__(self, key, value)
        for key, (low, high) in self.ranges.items():
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                top = "" if high == math.inf else f" and at most {high:g}"
                raise ConfigError(f"{self.name}.{key} is {value}; allowed: at least {low:g}{top}")
        for key, allowed in self.choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"{self.name}.{key} is {getattr(self, key)!r}; allowed: {', '.join(allowed)}")


def hints(cls: type) -> dict[str, Any]:
    """Annotations of a dataclass, by field, in order."""
    found = typing.get_type_hints(cls)
    return {f.name: found[f.name] for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]


def _conform(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotation wants it: int for float, a string or list for a tuple of strings."""
    _check_items(value, where)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in allowed:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif kind == tuple[str, ...]:
            items = (value,) if isinstance(value, str) else value
            if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
                return tuple(items)
        elif kind == tuple[int, ...]:
            items = value if isinstance(value, list | tuple) else (value,)
            if all(type(item) is int for item in items):
                return tuple(items)
        elif type(value) is kind:
            return value
    names = " or ".join(_NAMES.get(kind, "nothing") for kind in allowed)
    raise ConfigError(f"{where} is {value!r}; allowed: {names}")


def _check_items(value: Any, where: str) -> None:
    """Refuse what no part of the system takes: numbers that have no room, names of files that end before their end."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, str) and "\0" in item:
            raise ConfigError(f"{where} is {value!r}; allowed: text without null bytes")
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ConfigError(f"{where} takes {item.bit_length() + 1} bits; allowed: integers of 64 bits")


_NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    tuple[str, ...]: "a string or a list of strings",
    tuple[int, ...]: "an integer or a list of integers",
}
