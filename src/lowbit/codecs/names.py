"""Codecs by name, for command lines and configuration files."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect

import torch

from lowbit.codecs import registry
from lowbit.codecs.base import Codec
from lowbit.codecs.defaults import backward_codec

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
    may add formats (see `lowbit.codecs.registry`).

    Raises:
        ValueError: an unknown name, or a form that cannot be read; arguments raise what the codec raises.
    """
    if successor := REMOVED.get(text.partition("(")[0].strip()):
        raise ValueError(f"codec is {text!r}, which was removed; allowed: {successor}")
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        node = None
    if isinstance(node, ast.Call):
        return _build(node, text)
    factory = registry.named(text)
    if factory is None and text.startswith("feature-int"):
        raise ValueError(
            f"codec is {text!r}, which needs calibrated ranges; allowed: a codec that does not, or for the sums of "
            "tensor-parallel ranks a calibration (lowbit calibrate)"
        )
    if factory is None:
        if close := difflib.get_close_matches(text.lower(), [*_short_names(), *_class_names()], n=2, cutoff=0.8):
            raise ValueError(f"codec is {text!r}; did you mean {' or '.join(close)}?")
        raise ValueError(
            f"codec is {text!r}; allowed: {', '.join(_short_names())}, "
            f"or one of {', '.join(_class_names())} with its arguments, such as GroupInt(bits=6, group=32)"
        )
    codec = factory()
    if not isinstance(codec, Codec):
        raise ValueError(f"codec is {text!r}, which gives {codec!r}; allowed: names of codecs")
    return codec


def _short_names() -> list[str]:
    return [*registry.short_names(), *(point.name for point in registry.outside())]


def _class_names() -> list[str]:
    return [*registry.classes(), *(point.attr for point in registry.outside() if point.attr[:1].isupper())]


def _build(node: ast.Call, text: str) -> Codec:
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    factory = registry.named(name) if name.isidentifier() else None
    if not isinstance(factory, type) or not issubclass(factory, Codec) or node.args:
        raise ValueError(f"codec is {text!r}; allowed: {', '.join(_class_names())} with keyword arguments")
    parameters = inspect.signature(factory).parameters
    known, any_name = list(parameters), any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for argument in (keyword.arg or "**" for keyword in node.keywords):
        if argument not in known and not any_name:
            close = difflib.get_close_matches(argument, known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known)}"
            raise ValueError(f"codec is {text!r}: {name} has no argument {argument!r}; {advice}")
    try:
        return factory(**{str(keyword.arg): _value(keyword.value, text) for keyword in node.keywords})
    except TypeError as error:
        raise ValueError(f"codec is {text!r}: {error}") from error


def _value(node: ast.expr, text: str) -> object:
    if isinstance(node, ast.Call):
        return _build(node, text)
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return getattr(torch, node.attr, None)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"codec is {text!r}: cannot read {ast.unparse(node)!r}") from error
