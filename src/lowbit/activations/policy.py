"""Formats of saved activations by layer type and by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.activations.formats import WithRemainder, WithRows, is_aligned, outliers_and_rest
from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_int

KINDS = ("norm", "mlp", "linear", "attention")
WHOLE = 16
LEAST_BITS = {"norm": 8, "attention": 8}
"""The fewest bits for norms and attention unless a policy sets them: many layers' gradients depend on these."""
GATED = 6
"""The default bits; with these, gates take one more in groups of twice the length: 7.25 bits instead of 6.5."""
SPOILED = 0.1
"""Error of 8 bits in groups, as the root mean square over channels, above which a norm gets `finer` groups."""

Format = int | Codec


@dataclass(frozen=True, kw_only=True)
class LayerAware:
    """Bits of saved activations by layer type, an idea of AGoQ (arXiv 2605.00539).

    `LayerAware()` is our setting: norms and attention in 8 bits and more, gates in 7, the rest in 6.
    `LayerAware.published()` is the paper's: 4 bits, and attention uncompressed.

    n elements in b bits take n b / 8 + 4 n / group bytes (`GroupInt`, asymmetric): by default 6.5 bits an element, 7.25
    for SiLU's gates, 8.5 for norms and v, 10.75 for q and k, 12.75 for a k that is smaller than q. With 16 bits tensors
    are saved unchanged, and others that follow from them are still recomputed. Instead of bits you can give a codec
    without state, such as `BlockFloat8()` or `GroupInt(bits=8, group=16)`: then norms and gates are computed by
    PyTorch's own functions, unless it is an asymmetric `GroupInt`, which has fused kernels.

    Args:
        bits: 2 to 8, or 16, or a codec; for all layer types that have no bits of their own. The paper uses 4, with
            which gradients had four times the error of 6, in models that were trained for 60 steps.
        norm: bits for the inputs of norms, from which the inputs of the linear layers that follow are recomputed. None:
            8, or `bits` if that is more. With 4 bits, as in the paper, three short trainings from scratch lost 0.103,
            0.055 and 0.003 nats.
        mlp: bits for the inputs of activation functions and gates. ReLU takes one more bit per element. None: `bits`,
            but if that is 6, SiLU's gate and the factor take 7 in groups of twice the length, because they caused most
            of the error in a pretrained model.
        linear: bits for inputs of linear layers that come neither from a norm nor from an activation nor from
            attention.
        attention: bits for v; q and k, whose errors softmax amplifies, take 2.25 bits more. Attention runs again from
            them in backward, so its output and probabilities are not saved. None: 8, or `bits` if that is more. Any
            codec other than an asymmetric `GroupInt` is used for all three. The paper does not round them.
        group: elements that share a scale, a multiple of 8; codecs have their own.
        rounding: "nearest" or "stochastic", whose error is zero on average; codecs have their own.
        outliers: examine each norm's input in the first training pass. If the norm of a token is at least 8 times the
            median, as that of a sink, one token of every 128 is kept exactly from then on, those of largest norm. If
            the channels of the other tokens have a mean error above 10 % with 8 bits in groups, as when a few channels
            are hundreds of times larger, they take 12.75 bits. Norms with other bits or a codec keep their format.
        smallest: inputs of linear layers with fewer elements are saved unchanged, unless they are recomputed: they take
            few bytes, and errors of a classifier's input are not averaged over tokens.
        layers: bits by module name, for all types but attention: {"model.layers.3": 8} or {"*.mlp": 3}. A name or
            pattern (`fnmatch`) also applies to all modules inside; the last that matches counts. Norms still get at
            least 8 bits, unless `norm` is set or the last part of the entry matches the norm itself: "*.norm" does, "*"
            and the name of a layer around it do not.

    Raises:
        TypeError, ValueError: invalid values.
    """

    bits: Format = GATED
    norm: Format | None = None
    mlp: Format | None = None
    linear: Format | None = None
    attention: Format | None = None
    group: int = 64
    rounding: str = "nearest"
    layers: Mapping[str, Format] = field(default_factory=dict)
    outliers: bool = True
    smallest: int = 1024

    def __post_init__(self) -> None:
        GroupInt(group=self.group, rounding=self.rounding)  # checks both
        check_format("bits", self.bits)
        for kind in KINDS:
            if getattr(self, kind) is not None:
                check_format(kind, getattr(self, kind))
        if not isinstance(self.outliers, bool):
            raise TypeError(f"outliers is {self.outliers!r}; allowed: True or False")
        check_int("smallest", self.smallest, 0, 1 << 60)
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"layers is {self.layers!r}; allowed: a mapping from names to bits")
        for pattern, bits in self.layers.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"layers has {pattern!r}; allowed: names of modules, or patterns")
            check_format(f"layers[{pattern!r}]", bits)
        object.__setattr__(self, "layers", dict(self.layers))

    @classmethod
    def published(cls) -> LayerAware:
        """Return AGoQ's bits: 4 for norms, activation functions, gates and linear layers; attention is not coded.

        These are from the abstract and published summaries of arXiv 2605.00539. They do not state the rest, which is
        ours: asymmetric groups of 64 with 4 bytes of scale and middle (4.5 bits an element in all), nearest rounding,
        and uncompressed inputs of linear layers with fewer than `smallest` elements. For the paper's bits by pipeline
        stage, `lowbit plan memory` writes a `LayerPlan` whose `policy` does not code attention either.
        """
        return cls(bits=4, norm=4, attention=WHOLE)

    def bits_of(self, kind: str, name: str = "") -> Format:
        """Bits or codec of a layer type ("norm", "mlp", "linear", "attention") in the module of this name.

        "gate": SiLU among "mlp".
        """
        own = getattr(self, "mlp" if kind == "gate" else kind)
        if kind == "gate" and own is None and self.bits == GATED:
            own = GroupInt(bits=GATED + 1, group=2 * self.group, rounding=self.rounding)
        least = LEAST_BITS.get(kind, 0) if own is None else 0
        chosen = _at_least(self.bits, least) if own is None else own
        if kind != "attention":
            for pattern, bits in self.layers.items():
                if _matches(name, pattern):
                    chosen = bits if _matches_itself(name, pattern) else _at_least(bits, least)
        return chosen

    def codec(self, bits: Format) -> Codec | None:
        """The format with this many bits, or the codec itself; None for 16."""
        if isinstance(bits, Codec):
            return bits
        if bits == WHOLE:
            return None
        return GroupInt(bits=bits, group=self.group, rounding=self.rounding)

    def for_outliers(self, kind: str, codec: Codec | None, x: Tensor) -> Codec | None:
        """Choose the format for the inputs of a layer from its first one: `codec`, unless outliers spoil it."""
        if not self.outliers or kind != "norm" or codec != self.codec(LEAST_BITS["norm"]):
            return codec
        assert isinstance(codec, GroupInt)
        found, rest = outliers_and_rest(x) if is_aligned(codec, x.shape[-1]) else (False, x)
        # Not FP8: its error is 2.7 % also in the large channels, on which gradients depend most.
        chosen = WithRemainder(first=codec) if _error_of_groups(rest, self.group) > SPOILED else codec
        return WithRows(inner=chosen) if found else chosen

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError unless each entry of `layers` matches one of these modules."""
        for pattern in self.layers:
            if not any(_matches(name, pattern) for name in names):
                some = ", ".join(list(names)[:6])
                raise ValueError(
                    f"layers has {pattern!r}, which matches none of the modules that can be compressed: {some}, ..."
                )


_ROWS = 1024  # rows that are examined


@torch.no_grad()
def _error_of_groups(x: Tensor, group: int) -> float:
    """Relative error of 8 bits in groups, as the root mean square over channels; each counts at most 1."""
    rows = x.detach().reshape(-1, x.shape[-1])
    rows = rows[:: -(-len(rows) // _ROWS)].float()
    flat = functional.pad(rows.flatten(), (0, -rows.numel() % group)).view(-1, group)
    spread = flat.amax(1) - flat.amin(1)
    squares = (spread / 255).square().div(12).repeat_interleave(group)[: rows.numel()].view_as(rows).mean(0)
    sizes = rows.square().mean(0)
    errors = (squares / sizes)[sizes > 0].clamp(max=1)  # NaN in `x` gives NaN, which compares as False
    return float(errors.mean().sqrt()) if len(errors) else 0.0


def _at_least(bits: Format, least: int) -> Format:
    return max(bits, least) if isinstance(bits, int) else bits


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a module or of one around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def _matches_itself(name: str, pattern: str) -> bool:
    """Whether the last part of a pattern matches that of a module's name, and is not just "*"."""
    last = pattern.rpartition(".")[2]
    return fnmatchcase(name, pattern) and last.strip("*") != "" and fnmatchcase(name.rpartition(".")[2], last)


def check_format(name: str, value: object) -> None:
    """Raise unless `value` is 2 to 8, or 16, or a codec that can save a tensor of any shape."""
    if isinstance(value, Codec):
        if not isinstance(value, Summable) or value.shaped or value.grain != 1:
            raise TypeError(
                f"{name} is {value!r}; allowed: bits, or a codec without state for any shape, such as BlockFloat8()"
            )
        return
    if value == WHOLE and type(value) is int:
        return
    try:
        check_int(name, value, 2, 8)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {value!r}; allowed: 2 to 8, or {WHOLE} (uncompressed)") from None
