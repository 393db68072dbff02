"""How many bits backward gets, by layer type and by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lowbit.codecs import GroupInt
from lowbit.codecs.checks import check_int

KINDS = ("norm", "mlp", "linear", "attention")
WHOLE = 16
NORM_BITS = 8
"""Of norms, at least, unless a policy says otherwise: all that follows a norm gets its gradient from what it keeps."""


@dataclass(frozen=True, kw_only=True)
class LayerAware:
    """Bits in which saved activations wait for backward (AGoQ's layer-aware quantization, arXiv 2605.00539).

    n elements in b bits take n b / 8 + 4 n / group bytes (`GroupInt`, asymmetric): by default 4.5 bits an element, 8.5
    for norms. 16 stands for as it is: nothing is rounded, but what can be computed from it in backward is not kept
    either.

    Args:
        bits: 2 to 8, or 16; for all layer types that have no bits of their own.
        norm: of the inputs of norms, from which the linear layers that follow get theirs, too. None: 8, or `bits` where
            those are more. With 4 bits there, which the paper has everywhere, the one short training from scratch that
            was measured lost 0.1 nats.
        mlp: of what activation functions and gates work on.
        linear: of inputs of linear layers that come neither from a norm nor from an activation, nor from attention.
        attention: of q, k, v, attention's output and what its kernel saves. The paper leaves them alone, because the
            error of the gradients grew with sequence length and width there. Here 4 bits of attention alone erred
            three to five times as much as all that the default rounds, at 256 and 1024 tokens.
        group: elements for each scale, a multiple of 8.
        rounding: "nearest" or "stochastic", whose error is zero on average.
        layers: bits by module name, for all types but attention: {"model.layers.3": 8} or {"*.mlp": 3}. A name or
            pattern (`fnmatch`) also means what is inside; of several that match the last one counts. Norms get at least
            8 of these bits, too, unless `norm` is set or the entry's last part means the norm itself: "*.norm" does,
            "*" and the name of a layer around it do not.

    Raises:
        TypeError, ValueError: anything else.
    """

    bits: int = 4
    norm: int | None = None
    mlp: int | None = None
    linear: int | None = None
    attention: int = WHOLE
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
        least = NORM_BITS if kind == "norm" and own is None else 0
        found = max(self.bits, least) if own is None else own
        if kind != "attention":
            for pattern, bits in self.layers.items():
                if matches(name, pattern):
                    found = bits if means_itself(name, pattern) else max(bits, least)
        return found

    def codec(self, bits: int) -> GroupInt | None:
        """The format of so many bits; None: as it is."""
        if bits == WHOLE:
            return None
        return GroupInt(bits=bits, group=self.group, rounding=self.rounding)

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError unless each entry of `layers` matches one of these modules."""
        for pattern in self.layers:
            if not any(matches(name, pattern) for name in names):
                some = ", ".join(list(names)[:6])
                raise ValueError(
                    f"layers has {pattern!r}, which matches none of the modules that can be compressed: {some}, ..."
                )


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a module, by its own name or by that of one around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def means_itself(name: str, pattern: str) -> bool:
    """Whether a pattern that matches a module means this very module, not all that is somewhere: by its last part."""
    last = pattern.rpartition(".")[2]
    return fnmatchcase(name, pattern) and last.strip("*") != "" and fnmatchcase(name.rpartition(".")[2], last)


def check_bits(name: str, value: object) -> None:
    """Raise unless `value` is 2 to 8, or 16."""
    if value == WHOLE and type(value) is int:
        return
    try:
        check_int(name, value, 2, 8)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {value!r}; allowed: 2 to 8, or {WHOLE} (as it is)") from None
