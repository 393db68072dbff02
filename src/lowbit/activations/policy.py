"""Bits of saved activations by layer type and by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lowbit.codecs import GroupInt
from lowbit.codecs.checks import check_int

KINDS = ("norm", "mlp", "linear", "attention")
WHOLE = 16
LEAST_BITS = {"norm": 8, "attention": 8}
"""The fewest bits unless a policy sets them: gradients of all layers after a norm or attention depend on these."""


@dataclass(frozen=True, kw_only=True)
class LayerAware:
    """Bits of saved activations (AGoQ's layer-aware quantization, arXiv 2605.00539).

    n elements in b bits take n b / 8 + 4 n / group bytes (`GroupInt`, asymmetric): by default 6.5 bits an element, 8.5
    for norms and attention. With 16 bits tensors are saved as they are; others that follow from them are still
    recomputed.

    Args:
        bits: 2 to 8, or 16; for all layer types that have no bits of their own. The paper has 4, which gave
            gradients four times the error of 6, in models that were trained for 60 steps.
        norm: bits for the inputs of norms, from which the inputs of the linear layers that follow are recomputed. None:
            8, or `bits` if that is more. With 4 bits, as in the paper, one short training from scratch lost 0.1 nats.
        mlp: bits for the inputs of activation functions and gates. ReLU takes one bit more an element.
        linear: bits for inputs of linear layers that come neither from a norm nor from an activation nor from
            attention.
        attention: bits for q, k, v and attention's output. None: 8, or `bits` if that is more. The paper does not round
            them, because the error of the gradients grew with sequence length and width. With 8 bits it did not change
            beside that of all others here; 4 bits for attention alone gave three to five times the error of 4 bits for
            all others, at 256 and 1024 tokens.
        group: elements for each scale, a multiple of 8.
        rounding: "nearest" or "stochastic", whose error is zero on average.
        layers: bits by module name, for all types but attention: {"model.layers.3": 8} or {"*.mlp": 3}. A name or
            pattern (`fnmatch`) applies to all modules inside, too; the last that matches counts. Norms get at least 8
            bits even so, unless `norm` is set or the last part of the entry matches the norm itself: "*.norm" does, "*"
            and the name of a layer around it do not.

    Raises:
        TypeError, ValueError: other values.
    """

    bits: int = 6
    norm: int | None = None
    mlp: int | None = None
    linear: int | None = None
    attention: int | None = None
    group: int = 64
    rounding: str = "nearest"
    layers: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        GroupInt(group=self.group, rounding=self.rounding)  # checks both
        check_bits("bits", self.bits)
        for kind in KINDS:
            if getattr(self, kind) is not None:
                check_bits(kind, getattr(self, kind))
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"layers is {self.layers!r}; allowed: a mapping from names to bits")
        for pattern, bits in self.layers.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"layers has {pattern!r}; allowed: names of modules, or patterns")
            check_bits(f"layers[{pattern!r}]", bits)
        object.__setattr__(self, "layers", dict(self.layers))

    def bits_of(self, kind: str, name: str = "") -> int:
        """Bits of a layer type ("norm", "mlp", "linear", "attention") in the module of this name."""
        own = getattr(self, kind)
        least = LEAST_BITS.get(kind, 0) if own is None else 0
        chosen = max(self.bits, least) if own is None else own
        if kind != "attention":
            for pattern, bits in self.layers.items():
                if _matches(name, pattern):
                    chosen = bits if _matches_itself(name, pattern) else max(bits, least)
        return chosen

    def codec(self, bits: int) -> GroupInt | None:
        """The format of so many bits; None for 16."""
        if bits == WHOLE:
            return None
        return GroupInt(bits=bits, group=self.group, rounding=self.rounding)

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError unless each entry of `layers` matches one of these modules."""
        for pattern in self.layers:
            if not any(_matches(name, pattern) for name in names):
                some = ", ".join(list(names)[:6])
                raise ValueError(
                    f"layers has {pattern!r}, which matches none of the modules that can be compressed: {some}, ..."
                )


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a module or of one around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def _matches_itself(name: str, pattern: str) -> bool:
    """Whether the last part of a pattern matches that of a module's name, and is no mere "*"."""
    last = pattern.rpartition(".")[2]
    return fnmatchcase(name, pattern) and last.strip("*") != "" and fnmatchcase(name.rpartition(".")[2], last)


def check_bits(name: str, value: object) -> None:
    """Raise unless `value` is 2 to 8, or 16."""
    if value == WHOLE and type(value) is int:
        return
    try:
        check_int(name, value, 2, 8)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {value!r}; allowed: 2 to 8, or {WHOLE} (uncompressed)") from None
