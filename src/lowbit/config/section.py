"""Sections of a configuration: frozen values that pydantic checks when they are made, with errors of one line."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from lowbit.config.types import element_of, kind_of, range_of, union_of

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

_RULES = ConfigDict(
    strict=True,  # no boolean for an integer, no text for a number; an integer does for a float
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)
_RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_Class = TypeVar("_Class")


class ConfigError(ValueError):
    """What the user asked for cannot be done; one line that says what and what is allowed instead."""


@dataclass(frozen=True)
class Setting:
    """A field of a section.

    Attributes:
        name: of the field.
        hint: its annotation.
        default: its value where none is given; `dataclasses.MISSING` if one must be.
        meaning: the docstring below it.
    """

    name: str
    hint: Any
    default: Any
    meaning: str

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        return ", ".join(filter(None, (kind_of(self.hint), range_of(self.hint))))


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def section(name: str = "") -> Callable[[type[_Class]], type[_Class]]:
    """Make a class a section: a frozen, keyword-only pydantic dataclass.

    Fields are checked strictly against their annotations, among them `Literal[...]` and `Annotated[int, Field(ge=1)]`.
    A field that is a tuple also takes a list or a single element; one whose type has a `parse` also takes text. What
    concerns several fields is checked in `__post_init__`. The docstring below a field is its meaning in help.

    Args:
        name: stands before a key in errors: "model" for "model.dim is 0; allowed: at least 1".
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        made: Any = pydantic_dataclass(cls, frozen=True, kw_only=True, config=_RULES)
        made.section_name = name
        validate, prefix = made.__init__, f"{name}." if name else ""

        def __init__(self: Any, **values: Any) -> None:
            hints = hints_of(made)
            refuse_unknown(values, hints, prefix)
            prepared = {key: _prepared(value, hints[key], prefix + key) for key, value in values.items()}
            try:
                validate(self, **prepared)
            except ValidationError as error:
                raise _in_one_line(error, made, values, prefix) from None

        made.__init__ = __init__
        return made

    return decorate


def is_section(hint: Any) -> bool:
    """Whether an annotation is a section."""
    return isinstance(hint, type) and hasattr(hint, "section_name")


def hints_of(cls: type) -> dict[str, Any]:
    """Annotations of a section's fields, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]


def settings_of(cls: Any) -> list[Setting]:
    """The fields of a section, those that are sections themselves included."""
    hints = hints_of(cls)
    return [
        Setting(
            name=field.name,
            hint=hints[field.name],
            default=field.default,
            meaning=_meaning(cls, field.name),
        )
        for field in dataclasses.fields(cls)
    ]


def _meaning(cls: Any, name: str) -> str:
    """The docstring below a field, in the class or in a base that it is inherited from."""
    sections = [base.__pydantic_fields__ for base in cls.__mro__ if "__pydantic_fields__" in vars(base)]
    meanings = (fields[name].description for fields in sections if name in fields)
    return " ".join((next(filter(None, meanings), "")).split())


def build(cls: type[_Class], values: Any, where: str = "") -> _Class:
    """A section from nested mappings, as TOML and JSON give them; what they leave out keeps its default.

    Args:
        values: by key; those of a section within this one change its default's fields.
        where: the section's place in the whole, for errors: "" at the top.

    Raises:
        ConfigError: an unknown key (the closest known one is named), a wrong type or value.
    """
    check_shape(cls, values, where)
    defaults = {setting.name: setting.default for setting in settings_of(cls)}
    hints, given = hints_of(cls), dict(values)
    for key, value in given.items():
        if isinstance(value, Mapping) and is_section(hints[key]):
            default = defaults[key]
            unchanged = {} if default is dataclasses.MISSING else vars_of(default)
            given[key] = build(hints[key], {**unchanged, **value}, key)
    return cls(**given)


def check_shape(cls: Any, values: Any, where: str = "") -> None:
    """Check that sections are mappings with known keys; other values are not looked at.

    Raises:
        ConfigError: they are not.
    """
    if not isinstance(values, Mapping):
        allowed = f"a section, [{where}]" if where else "a mapping of sections"
        raise ConfigError(f"{where or 'a configuration'} is {values!r}; allowed: {allowed}")
    hints = hints_of(cls)
    refuse_unknown(values, hints, f"{where}." if where else "")
    for key, value in values.items():
        if is_section(hints[key]) and not isinstance(value, hints[key]):
            check_shape(hints[key], value, key)


def vars_of(instance: Any) -> dict[str, Any]:
    """The values of a section, by field."""
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def refuse_unknown(keys: Iterable[Any], hints: Mapping[str, Any], prefix: str) -> None:
    """Raise for a key that is none of a section's.

    Raises:
        ConfigError: with the closest known key, or all of them.
    """
    for key in keys:
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.4)
            advice = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(hints)}"
            kind = "section" if all(map(is_section, hints.values())) else "key"
            raise ConfigError(f"unknown {kind} {prefix}{key}; {advice}")


def _prepared(value: Any, hint: Any, where: str) -> Any:
    """`value` with a tuple where one is wanted, and with what a type parses from text; numbers and text are bounded."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, str) and "\0" in item:
            raise ConfigError(f"{where} is {value!r}; allowed: text without null bytes")
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ConfigError(f"{where} takes {item.bit_length() + 1} bits; allowed: integers of 64 bits")
    if (element := element_of(hint)) is None:
        return _parsed(value, hint)
    items = value if isinstance(value, list | tuple) else () if value == "" else (value,)
    return tuple(_parsed(item, element) for item in items)


def _parsed(value: Any, hint: Any) -> Any:
    if isinstance(value, str):
        for kind in union_of(hint):
            if hasattr(kind, "parse"):
                return kind.parse(value)
    return value


def _in_one_line(error: ValidationError, cls: Any, values: Mapping[str, Any], prefix: str) -> Exception:
    """The first of pydantic's errors, named after its key; what `__post_init__` or a validator raised, as it is."""
    errors: list[Any] = error.errors(include_url=False)
    first, key = errors[0], str(next(iter(errors[0]["loc"]), ""))
    if first["type"] == "value_error":
        return first["ctx"]["error"]
    hint = hints_of(cls)[key]
    if first["type"] == "missing":
        return ConfigError(f"{prefix}{key} is missing; allowed: {kind_of(hint)}")
    of_key = [other for other in errors if str(other["loc"][0]) == key]
    out_of_range = all(other["type"] in _RANGE_ERRORS for other in of_key)
    allowed = range_of(hint) if out_of_range else kind_of(hint)
    return ConfigError(f"{prefix}{key} is {values[key]!r}; allowed: {allowed}")
