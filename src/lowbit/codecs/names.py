"""Codecs by name, for command lines and configuration files: lowbit's own, and those of installed packages.

Each folder next to this file with a `codec.py` is a format: it has the codec class and, in `SHORT_NAMES`, factories by
short name. Another package adds formats in its pyproject.toml, each by a short name or the name of a class:

    [project.entry-points."lowbit.codecs"]
    sign = "their_package:Sign"                 # a codec class, or a function without arguments that returns a codec

Entry points name code that the user has installed, and are loaded when the user names a format. Peers cannot make this
process load code: they only compare fingerprints.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

from lowbit.codecs.base import Codec
from lowbit.codecs.defaults import backward_codec
from lowbit.codecs.transform_quant.codec import TransformQuant
from lowbit.codecs.transform_quant.rates import RateGoal
from lowbit.escape import shown

PAIR = " / "
"""Separates the formats of activations and gradients in a name for both."""
_FEWEST = "'transform' for the fewest bits, or 'tah-quant' for less computation and no state between messages"
REMOVED = {
    **dict.fromkeys(("subspace", "subspace-backward", "SubspaceQuant"), _FEWEST),
    "aq-sgd-8bit": "'aq-sgd', which keeps samples in float32",
}
"""What to use in place of formats that there were."""


def parse_pair(text: str, backward: str = "") -> tuple[Codec, Codec]:
    """Return the formats of activations and gradients in "FORWARD / BACKWARD", or in "FORWARD" alone.

    Args:
        text: names or full forms, as for `parse`.
        backward: the gradients' format if `text` has none, unless activations are plain numbers, which are used both
            ways; empty: `backward_codec`.

    Raises:
        ValueError: as `parse` raises it.
    """
    first, both, second = text.partition(PAIR)
    forward = parse(first)
    if both:
        return forward, parse(second)
    if backward and not forward.is_plain:
        return forward, parse(backward)
    return forward, backward_codec(forward)


def pair_name(text: str) -> str:
    """Shorten a pair of formats for tables: parameters that two formats of one class share are written once.

    "GroupInt(bits=4, group=32) / GroupInt(bits=6, group=32)" becomes "GroupInt(bits=4/6, group=32)". Two equal formats
    stay as they are: one name alone means that gradients use its default (`backward_codec`).
    """
    if PAIR not in text or "(" not in text:
        return text
    forward, backward = parse_pair(text)
    if type(forward) is not type(backward) or forward == backward:
        return text
    parts = []
    for field in dataclasses.fields(forward):
        first, second = getattr(forward, field.name), getattr(backward, field.name)
        if first != second or f"{field.name}=" in text:
            parts.append(f"{field.name}={first!r}" + ("" if first == second else f"/{second!r}"))
    return f"{type(forward).__name__}({', '.join(parts)})"


def parse(text: str) -> Codec:
    """Return the codec of a short name ("transform", "int4", "bf16") or a full form ("GroupInt(bits=6, group=32)").

    The full form is what `repr` prints: keyword arguments that are literals, dtypes or other codecs. Installed packages
    may add formats (see `lowbit.codecs.names`).

    Raises:
        TypeError: not a text.
        ValueError: an unknown name, or a form that cannot be read; arguments raise what the codec raises.
    """
    if not isinstance(text, str):
        raise TypeError(f"codec is {shown(text)}; allowed: a text such as 'int4' or 'GroupInt(bits=6, group=32)'")
    if successor := REMOVED.get(text.partition("(")[0].strip()):
        raise ValueError(f"codec is {shown(text)}, which was removed; allowed: {successor}")
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        node = None
    if isinstance(node, ast.Call):
        return _build(node, text)
    factory = named(text)
    if factory is None and text.startswith("feature-int"):
        raise ValueError(
            f"codec is {shown(text)}, which needs calibrated ranges; allowed: a codec that does not, or for the sums "
            "of tensor-parallel ranks a calibration (lowbit calibrate)"
        )
    if factory is None:
        if close := difflib.get_close_matches(text.lower(), [*_short_names(), *_class_names()], n=2, cutoff=0.8):
            raise ValueError(f"codec is {shown(text)}; did you mean {' or '.join(close)}?")
        raise ValueError(
            f"codec is {shown(text)}; allowed: {', '.join(_short_names())}, "
            f"or one of {', '.join(_class_names())} with its arguments, such as GroupInt(bits=6, group=32)"
        )
    codec = factory()
    if not isinstance(codec, Codec):
        raise ValueError(f"codec is {shown(text)}, which gives {codec!r}; allowed: names of codecs")
    return codec


def parse_goal(text: str) -> RateGoal | None:
    """Return the goal of "TransformQuant(bits='auto', nats=0.005)"; None if the text does not leave a rate open.

    Raises:
        ValueError: invalid arguments.
    """
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != TransformQuant.__name__:
        return None
    others = [keyword for keyword in node.keywords if ast.unparse(keyword) != "bits='auto'"]
    if len(others) == len(node.keywords):
        return None
    return _build(ast.Call(node.func, node.args, others), text, RateGoal)


def _short_names() -> list[str]:
    return [*short_names(), *(point.name for point in outside())]


def _class_names() -> list[str]:
    return [*classes(), *(point.attr for point in outside() if point.attr[:1].isupper())]


def _build(node: ast.Call, text: str, kind: type | None = None) -> Any:
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    factory = kind or (named(name) if name.isidentifier() else None)
    if not isinstance(factory, type) or not issubclass(factory, kind or Codec) or node.args:
        raise ValueError(f"codec is {shown(text)}; allowed: {', '.join(_class_names())} with keyword arguments")
    parameters = inspect.signature(factory).parameters
    known, any_name = list(parameters), any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = [keyword.arg or "**" for keyword in node.keywords]
    if twice := [argument for argument in given if given.count(argument) > 1]:
        raise ValueError(f"codec is {shown(text)}: {name} has {twice[0]} twice; allowed: each argument once")
    for argument in given:
        if argument not in known and not any_name:
            close = difflib.get_close_matches(argument, known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known)}"
            raise ValueError(f"codec is {shown(text)}: {name} has no argument {argument!r}; {advice}")
    try:
        return factory(**{str(keyword.arg): _value(keyword.value, text) for keyword in node.keywords})
    except TypeError as error:
        raise ValueError(f"codec is {shown(text)}: {error}") from error


def _value(node: ast.expr, text: str) -> object:
    if isinstance(node, ast.Call):
        return _build(node, text)
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        if isinstance(found := getattr(torch, node.attr, None), torch.dtype):
            return found
        raise ValueError(f"codec is {shown(text)}: torch has no dtype {node.attr!r}; allowed: such as torch.float16")
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"codec is {shown(text)}: cannot read {ast.unparse(node)!r}") from error


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
    return tuple(entry_points(group="lowbit.codecs"))


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
            f"{_described(point)} is {shown(loaded)}; allowed: a codec class, or a function that returns a codec"
        )
    if inspect.isclass(loaded) and loaded.__name__ in classes():
        raise ValueError(f"{_described(point)} has the name of one of lowbit's own codecs; allowed: another name")
    return loaded


def _described(point: EntryPoint) -> str:
    package = point.dist.name if point.dist else "an unknown package"
    return f"the entry point {point.name} = {point.value} of {package}"
