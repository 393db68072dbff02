"""Codecs by name, for command lines and configuration files."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable

import torch

from lowbit.codecs.aq_sgd import AQSGD
from lowbit.codecs.base import Codec
from lowbit.codecs.block_float8 import BlockFloat8
from lowbit.codecs.cast import Cast
from lowbit.codecs.group_int import GroupInt
from lowbit.codecs.subspace_quant import SubspaceQuant
from lowbit.codecs.tah_quant import TAHQuant

NAMES: dict[str, Callable[[], Codec]] = {
    "fp32": lambda: Cast(dtype=torch.float32),
    "bf16": lambda: Cast(dtype=torch.bfloat16),
    "fp16": lambda: Cast(dtype=torch.float16),
    **{f"int{bits}": lambda bits=bits: GroupInt(bits=bits, group=64) for bits in range(2, 9)},
    "fp8": BlockFloat8,
    "fp8-e5m2": lambda: BlockFloat8(format="e5m2"),
    "tah-quant": TAHQuant,
    "tah-quant-published": TAHQuant.published,
    "aq-sgd": AQSGD,
    "subspace": SubspaceQuant,
    "subspace-backward": lambda: SubspaceQuant(bits=4),
}
CLASSES: dict[str, type[Codec]] = {c.__name__: c for c in (Cast, GroupInt, BlockFloat8, TAHQuant, AQSGD, SubspaceQuant)}
PAIR = " / "
"""Between the formats of activations and of gradients, where the name of a boundary tells both."""


def gradients_beside(forward: Codec) -> Codec:
    """The format of gradients that belongs to a format of activations, where nobody names another.

    Plain numbers travel alike both ways. `SubspaceQuant` comes back with the same settings and at least 4 bits, because
    gradients have less of their energy in few directions. Every other format gets 6 bits in groups of 32.
    """
    if isinstance(forward, Cast):
        return forward
    if isinstance(forward, SubspaceQuant):
        return dataclasses.replace(forward, bits=max(forward.bits, 4))
    return GroupInt(bits=6, group=32, symmetric=True)


def parse_pair(text: str, backward: str = "") -> tuple[Codec, Codec]:
    """A boundary's formats of activations and gradients: "FORWARD / BACKWARD", or "FORWARD" alone.

    Args:
        text: names or full forms, as `parse` takes them.
        backward: the gradients' format where `text` has none and activations are not plain numbers, which travel alike
            both ways; empty: `gradients_beside`.

    Raises:
        ValueError: as `parse` raises it.
    """
    there, both, back = text.partition(PAIR)
    forward = parse(there)
    if both:
        return forward, parse(back)
    if backward and not isinstance(forward, Cast):
        return forward, parse(backward)
    return forward, gradients_beside(forward)


def pair_name(text: str) -> str:
    """A boundary's name for tables: of two formats of one class in full, what they share is said once.

    "GroupInt(bits=4, group=32) / GroupInt(bits=6, group=32)" becomes "GroupInt(bits=4/6, group=32)". Two equal formats
    stay as they are: one name alone means that gradients use its default (`gradients_beside`).
    """
    if PAIR not in text or "(" not in text:
        return text
    forward, back = parse_pair(text)
    if type(forward) is not type(back) or forward == back:
        return text
    parts = []
    for field in dataclasses.fields(forward):
        there, here = getattr(forward, field.name), getattr(back, field.name)
        if there != here or f"{field.name}=" in text:
            parts.append(f"{field.name}={there!r}" + ("" if there == here else f"/{here!r}"))
    return f"{type(forward).__name__}({', '.join(parts)})"


def parse(text: str) -> Codec:
    """A codec from a short name ("tah-quant", "int4", "bf16") or in full ("GroupInt(bits=6, group=32)").

    The full form is what `repr` prints: keyword arguments that are literals, dtypes or other codecs.

    Raises:
        ValueError: an unknown name, or a form that cannot be read; arguments raise what the codec raises.
    """
    if text in NAMES:
        return NAMES[text]()
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        node = None
    if isinstance(node, ast.Call):
        return _build(node, text)
    raise ValueError(
        f"codec is {text!r}; allowed: {', '.join(NAMES)}, "
        f"or one of {', '.join(CLASSES)} with its arguments, such as GroupInt(bits=6, group=32)"
    )


def _build(node: ast.Call, text: str) -> Codec:
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in CLASSES or node.args:
        raise ValueError(f"codec is {text!r}; allowed: {', '.join(CLASSES)} with keyword arguments")
    try:
        return CLASSES[name](**{k.arg or "**": _value(k.value, text) for k in node.keywords})
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
