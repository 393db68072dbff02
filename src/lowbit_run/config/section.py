"""Sections of a configuration: frozen values that pydantic checks on construction, read from TOML and written as it."""

import dataclasses
import functools
import inspect
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from lowbit.escape import Printable, printable, shown, suggestion

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


def read(text: str, hint: Any, *, quotes: bool = False) -> Any:
    """Parse text as TOML; return the text itself if it is not TOML, or if the annotation takes text.

    A list is TOML's or separated by commas; commas within parentheses belong to an element, as in
    "int4,GroupInt(bits=6, group=32)". `quotes`: text may be in TOML's quotes, as elements of a list may.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = str(text)
    if (element := element_of(hint)) is not None:
        return value if isinstance(value, list) else [read(part, element, quotes=True) for part in _split(text)]
    kinds = union_of(hint)
    texts = any(kind is str or hasattr(kind, "parse") for kind in kinds)
    number = type(value) in (int, float) and float in kinds and not texts
    if isinstance(value, str):
        return str(text) if str in kinds and not quotes else value
    if number or (type(value) in kinds and type(value) is not float):
        return value
    choices = {choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)}
    return str(text) if texts or any(isinstance(choice, str) for choice in choices) else value


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


Positive = Annotated[int, Field(ge=1)]
"""An integer of at least 1."""
NonNegative = Annotated[int, Field(ge=0)]
"""An integer of at least 0."""

_RULES = ConfigDict(
    strict=True,  # refuses a boolean as an integer and text as a number, but takes an integer as a float
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)
_RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_Class = TypeVar("_Class")


class ConfigError(Printable, ValueError):
    """A configuration cannot be used; one line says why, and what is allowed."""


@dataclass(frozen=True)
class Setting:
    """A field of a section.

    Attributes:
        hint: its annotation. default: `dataclasses.MISSING` if it is required.
        meaning: the docstring below the field; for a nested section without one, that of its class.
    """

    name: str
    hint: Any
    default: Any
    meaning: str

    @property
    def is_section(self) -> bool:
        """Whether its value is a section."""
        return hasattr(self.hint, "section_name")

    @property
    def limits(self) -> str:
        """Choices or range of the setting; empty if it has neither."""
        return ", ".join(choices_of(self.hint)) or range_of(self.hint)

    def explained(self, *notes: str) -> str:
        """Return the meaning, followed by limits and notes in brackets, if any."""
        shown = "; ".join(filter(None, (self.limits, *notes)))
        return f"{self.meaning} [{shown}]" if shown else self.meaning


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def section(name: str = "") -> Callable[[type[_Class]], type[_Class]]:
    """Make a class a section: a frozen, keyword-only pydantic dataclass.

    Fields are checked strictly against their annotations, such as `Literal[...]` and `Annotated[int, Field(ge=1)]`. A
    tuple field also takes a list or a single element; a field whose type has a `parse` method also takes text. Checks
    of several fields together belong in `__post_init__`. The docstring below a field is its meaning in help.

    Args:
        name: prefix of keys in errors: "model" for "model.dim is 0; allowed: at least 1".
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        decorated: Any = pydantic_dataclass(cls, frozen=True, kw_only=True, config=_RULES)
        decorated.section_name = name
        validate, prefix = decorated.__init__, f"{name}." if name else ""

        def __init__(self: Any, **values: Any) -> None:
            settings = settings_of(decorated)
            _refuse_unknown(values, settings, prefix)
            checked = {key: _prepared(value, settings[key].hint, prefix + key) for key, value in values.items()}
            try:
                validate(self, **checked)
            except ValidationError as error:
                raise _in_one_line(error, settings, values, prefix) from None

        decorated.__init__ = __init__
        return decorated

    return decorate


@functools.cache
def settings_of(cls: Any, base: Any = dataclasses.MISSING) -> dict[str, Setting]:
    """Return the fields of a section by name, in order, nested sections included.

    Args:
        base: a section whose values are the defaults; if omitted, those of the class.
    """
    settings = {}
    for field in dataclasses.fields(cls):
        hint = cls.__pydantic_fields__[field.name].rebuild_annotation()
        default = getattr(base, field.name, field.default)
        # The docstring below the field, in the class or in the one that it is inherited from.
        sections = [each.__pydantic_fields__ for each in cls.__mro__ if "__pydantic_fields__" in vars(each)]
        texts = [fields[field.name].description for fields in sections if field.name in fields]
        texts.append(inspect.getdoc(hint) if hasattr(hint, "section_name") else "")
        meaning = " ".join(next(filter(None, texts), "").split())
        settings[field.name] = Setting(field.name, hint, default, meaning)
    return settings


def build(cls: type[_Class], values: Any, where: str = "", base: Any = None) -> _Class:
    """Build a section from nested mappings, as TOML and JSON yield; missing keys keep their defaults.

    Args:
        values: by key; "model.dim" stands for the key "dim" of the section "model", whose other keys stay as they are.
        where: the section's path in the configuration, for errors: "" at the top.
        base: a section whose values replace the defaults.

    Raises:
        ConfigError: an unknown key (the closest valid one is named), a wrong type or value.
    """
    if not isinstance(values, Mapping):
        allowed = f"a section, [{where}]" if where else "a mapping of sections"
        raise ConfigError(f"{where or 'a configuration'} is {shown(values)}; allowed: {allowed}")
    settings = settings_of(cls)
    given: dict[str, Any] = {}
    for key, value in values.items():
        name, dot, rest = str(key).partition(".")
        if dot and (name not in settings or settings[name].is_section):
            within = given.get(name, {})
            given[name] = {**within, rest: value} if isinstance(within, Mapping) else within
        else:
            given[key] = value
    _refuse_unknown(given, settings, f"{where}." if where else "")
    for key, value in given.items():
        if settings[key].is_section:
            default = settings[key].default
            place = f"{where}.{key}" if where else key
            given[key] = build(settings[key].hint, value, place, None if default is dataclasses.MISSING else default)
        elif isinstance(value, Text):
            given[key] = read(value, settings[key].hint)
    return cls(**given) if base is None else dataclasses.replace(base, **given)


def _refuse_unknown(keys: Mapping[Any, Any], settings: Mapping[str, Setting], prefix: str) -> None:
    for key in keys:
        if key not in settings:
            kind = "section" if all(setting.is_section for setting in settings.values()) else "key"
            raise ConfigError(f"unknown {kind} {prefix}{key}; {suggestion(str(key), settings, prefix)}")


def _prepared(value: Any, hint: Any, where: str) -> Any:
    """Prepare a value for pydantic: make a tuple of a list or a single element, and call `parse`.

    Integers over 64 bits and text with null bytes are refused.
    """
    items = tuple(value) if isinstance(value, list | tuple) else (value,)
    for item in items:
        if isinstance(item, str) and "\0" in item:
            raise ConfigError(f"{where} is {shown(value)}; allowed: text without null bytes")
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ConfigError(f"{where} takes {item.bit_length() + 1} bits; allowed: integers of 64 bits")
    if (element := element_of(hint)) is None:
        return _parsed(value, hint)
    return () if items == ("",) else tuple(_parsed(item, element) for item in items)


def _in_one_line(
    error: ValidationError, settings: Mapping[str, Setting], values: Mapping[str, Any], prefix: str
) -> Exception:
    """Turn the first of pydantic's errors into one line; errors of `__post_init__` and validators stay unchanged."""
    errors: list[Any] = error.errors(include_url=False)
    if errors[0]["type"] == "value_error":
        return errors[0]["ctx"]["error"]
    key = str(errors[0]["loc"][0])
    hint = settings[key].hint
    if errors[0]["type"] == "missing":
        return ConfigError(f"{prefix}{key} is missing; allowed: {kind_of(hint)}")
    of_key = [other for other in errors if str(other["loc"][0]) == key]
    out_of_range = [other["type"] in _RANGE_ERRORS for other in of_key]
    allowed = range_of(hint) if all(out_of_range) else kind_of(hint)
    if any(out_of_range) and not all(out_of_range):  # a number, of a union with other types
        allowed += f", {range_of(hint)}"
    return ConfigError(f"{prefix}{key} is {shown(values[key])}; allowed: {allowed}")


_WIDTH = 80


def resolve(cls: type[_Class], path: str | Path | None = None, overrides: Iterable[tuple[str, str]] = ()) -> _Class:
    """Read a section from a TOML file, if there is one, and apply overrides such as ("pipeline.forward", "int4").

    A section with a method `check_given` is asked at last to check the keys of the overrides, which somebody typed.

    Raises:
        ConfigError: a missing or invalid TOML file, an unknown key (the closest valid one is named), or a wrong value.
    """
    values, typed = read_toml(Path(path)) if path is not None else {}, dict(overrides)
    made: Any = build(cls, {**values, **{key: Text(text) for key, text in typed.items()}})
    if hasattr(made, "check_given"):
        made.check_given(typed)
    return made


def to_toml(config: Any, *, meanings: bool = True, changed: bool = False) -> str:
    """Write a section as TOML that `resolve` reads back; fields that are None are left out.

    Args:
        meanings: write above each key its meaning, allowed values, and the default if it differs.
        changed: write only what differs from the defaults.
    """
    settings = settings_of(type(config))
    if changed:
        settings = _changed(config, settings)
    return "\n".join(_lines(config, settings, "", meanings, changed)).strip() + "\n"


def _changed(config: Any, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {key: setting for key, setting in settings.items() if getattr(config, setting.name) != setting.default}


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


def _lines(config: Any, settings: Mapping[str, Setting], prefix: str, meanings: bool, changed: bool) -> Iterator[str]:
    for setting in settings.values():
        if setting.is_section:
            continue
        value = getattr(config, setting.name)
        if meanings:
            differs = setting.default not in (value, None, dataclasses.MISSING)
            yield from _comment(setting.explained(f"default: {in_toml(setting.default)}" if differs else ""))
        if value is not None:
            yield f"{setting.name} = {in_toml(value)}"
        elif meanings:
            yield f"# {setting.name} = ..."
    for setting in settings.values():
        if setting.is_section:
            yield from ["", *(_comment(setting.meaning) if meanings else ())]
            yield f"[{prefix}{setting.name}]"
            within = settings_of(setting.hint, setting.default)
            own = getattr(config, setting.name)
            within = _changed(own, within) if changed else within
            yield from _lines(own, within, f"{prefix}{setting.name}.", meanings, changed)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
