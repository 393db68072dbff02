"""Formats of saved activations by layer type and by layer.

Tensors that need more than 8 bits in groups: `WithRemainder` has more bits, `WithRows` exact tokens.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_int
from lowbit.codecs.group_int.reference import group_int_layout
from lowbit.escape import shown
from lowbit.kernels.layout import Layout, ceil_div, zero_gaps

MORE = 4
"""Bits of the remainder."""
EVERY = 128
"""One token in this many is kept exactly."""
LEAST = 16
"""Tensors with fewer tokens keep none exactly."""
FAR = 8.0
"""A token is an outlier if its norm is at least this many times the tensor's median."""


@dataclass(frozen=True, kw_only=True)
class WithRemainder(Summable):
    """`GroupInt`, and a second one of the remainders: with 8 and 4 bits 12 bits per element, and 0.75 for scales.

    A payload is that of `first`, padded to a multiple of 16 bytes, and that of `rest`. NaN and Inf: as in `GroupInt`.
    """

    first: GroupInt

    @cached_property
    def rest(self) -> GroupInt:
        """The format of the remainder, which is centred on zero."""
        return GroupInt(bits=MORE, group=self.first.group, symmetric=True)

    def nearest(self) -> "WithRemainder":
        return WithRemainder(first=self.first.nearest())

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self._split(shape) + self.rest.nbytes(shape)

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        split = self._split(x.shape)
        self.first.encode(x, out=payload[: self.first.nbytes(x.shape)])
        payload[self.first.nbytes(x.shape) : split] = 0
        wide = x.float()
        remainder = wide - self.first.decode(payload[: self.first.nbytes(x.shape)], shape=x.shape)
        self.rest.encode(remainder, out=payload[split:])

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        y = self.first.decode(payload[: self.first.nbytes(out.shape)], shape=out.shape)
        y += self.rest.decode(payload[self._split(out.shape) :], shape=out.shape)
        out.add_(y) if accumulate else out.copy_(y)

    def _split(self, shape: Sequence[int]) -> int:
        return -(-self.first.nbytes(shape) // 16) * 16


def coarser(codec: Codec) -> Codec:
    """The format with 2 bits fewer if it has a remainder: 10.75 bits in all."""
    if isinstance(codec, GroupInt) and not codec.symmetric and codec.bits > 4:
        return replace(codec, bits=codec.bits - 2)
    return codec


def finer(codec: Codec) -> Codec:
    """The format with `MORE` more bits; a codec without a choice of bits is returned unchanged."""
    return WithRemainder(first=codec) if isinstance(codec, GroupInt) and not codec.symmetric else codec


@dataclass(frozen=True, kw_only=True)
class WithRows(Summable):
    """`inner`, and the tokens (rows of the last dimension) of largest norm in float32: one of every 128, rounded up.

    The tokens are chosen by their norms in each tensor; their number follows from the shape. A tensor of fewer than 16
    tokens keeps none. For a kept token `inner` codes zeros. Sections of a payload, at multiples of 16 bytes, for K kept
    tokens of C channels: `inner`'s payload; K indices in int32; K C float32 values. NaN and Inf: a kept token returns
    them unchanged; others as in `inner`.
    """

    shaped: ClassVar[bool] = True

    inner: GroupInt | WithRemainder

    def nearest(self) -> "WithRows":
        return WithRows(inner=self.inner.nearest())

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self._layout(shape).nbytes

    def inner_of(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        return payload[: self.inner.format_nbytes(shape)]

    def kept(self, payload: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Indices (K,) int64 and values (K, C) float32 of the tokens that are kept."""
        layout = self._layout(shape)
        values = layout.section(payload, "values", torch.float32).view(-1, shape[-1])
        return layout.section(payload, "indices", torch.int32).long(), values

    def keep(self, x: Tensor, payload: Tensor) -> None:
        """Write the tokens of largest norm into a payload, and zeros for them into that of `inner`, a `GroupInt`.

        It is for kernels that have coded all tokens. Channels are a multiple of the group, so that none of its groups
        holds elements of two tokens.
        """
        assert isinstance(self.inner, GroupInt)
        index_K = self._write(x, payload)
        channels, settings = x.shape[-1], (self.inner.bits, self.inner.group, self.inner.symmetric)
        layout, row = (group_int_layout(count, *settings) for count in (x.numel(), channels))
        whole = self.inner.nearest().encode(torch.zeros(channels, dtype=torch.float32, device=x.device))
        for name in layout.sizes:
            part = row.section(whole, name)
            layout.section(payload, name).view(-1, len(part))[index_K] = part
        zero_gaps(payload, self._layout(x.shape))

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        index_K = self._write(x, payload)
        rest = x.clone()
        rest.view(-1, x.shape[-1])[index_K] = 0
        self.inner.encode(rest, out=self.inner_of(payload, x.shape))
        zero_gaps(payload, self._layout(x.shape))

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        self.inner.decode(self.inner_of(payload, out.shape), shape=out.shape, out=out, accumulate=accumulate)
        index_K, values_KC = self.kept(payload, out.shape)
        rows = out.view(-1, out.shape[-1])
        if accumulate:  # for these tokens `inner` has added zeros
            rows[index_K] += values_KC.to(out.dtype)
        else:
            rows[index_K] = values_KC.to(out.dtype)

    def _write(self, x: Tensor, payload: Tensor) -> Tensor:
        layout, rows = self._layout(x.shape), x.view(-1, x.shape[-1])
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
        index_K = norms.topk(count_of(x.shape)).indices
        layout.section(payload, "indices", torch.int32).copy_(index_K)
        layout.section(payload, "values", torch.float32).view(-1, x.shape[-1]).copy_(rows[index_K])
        return index_K

    def _layout(self, shape: Sequence[int]) -> Layout:
        count = count_of(shape)
        return Layout.of(
            inner=self.inner.format_nbytes(shape), indices=4 * count, values=4 * count * (shape[-1] if count else 0)
        )


def count_of(shape: Sequence[int]) -> int:
    """Number of tokens of a tensor of this shape that are kept."""
    rows = math.prod(shape[:-1])
    return ceil_div(rows, EVERY) if rows >= LEAST and len(shape) > 1 else 0


def outliers_and_rest(x: Tensor) -> tuple[bool, Tensor]:
    """Return whether any token's norm is `FAR` above the median, and the (tokens, channels) that would not be kept.

    Without outliers, or with NaN, these are all tokens.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    count, norms = count_of(x.shape), torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
    if not count or not bool(norms.max() > FAR * norms.median()):
        return False, rows
    rest = torch.ones(len(rows), dtype=torch.bool, device=x.device)
    rest[norms.topk(count).indices] = False
    return True, rows[rest]


KINDS = ("norm", "mlp", "linear", "attention")
WHOLE = 16
LEAST_BITS = {"norm": 8, "attention": 8}
"""Lower limit for norms and attention (a policy may go below it): their errors reach the gradients of many layers."""
GATED = 6
"""The default bits; with these, gates take one more in groups of twice the length: 7.25 bits instead of 6.5."""
GATES = ("silu", "gelu_tanh")
"""Activation functions that mostly gate a product, as in Llama and Gemma."""
SPOILED = 0.05
"""Error of 8 bits in groups, as the root mean square over channels, above which a norm gets `finer` groups."""
LOST = 0.3
"""Above this error, in any number of bits, a warning names the norm. In 4 bits, normally distributed inputs have an
error of 0.09, and most norms of three pretrained models 0.3 to 0.9, whose gradients were wrong by 17 to 151 %."""

Format = int | Codec


@dataclass(frozen=True, kw_only=True)
class LayerAware:
    """Bits of saved activations by layer type, an idea of AGoQ (arXiv 2605.00539).

    `LayerAware()` is our setting: norms and attention in 8 bits and more, gates in 7, the rest in 6.
    `LayerAware.published()` is the paper's: 4 bits, and attention uncompressed.

    n elements in b bits take n b / 8 + 4 n / group bytes (`GroupInt`, asymmetric): by default 6.5 bits an element,
    7.25 for gates (SiLU and tanh GELU), 8.5 for norms and v, 10.75 for q and k, 12.75 for a k that is smaller than
    q. With 16 bits tensors are saved unchanged, and others that follow from them are still recomputed. Instead of
    bits you can give a codec without state, such as `BlockFloat8()` or `GroupInt(bits=8, group=16)`: then norms and
    gates are computed by PyTorch's own functions, unless it is an asymmetric `GroupInt`, which has operators for them.

    Args:
        bits: 2 to 8, or 16, or a codec; for all layer types that have no bits of their own. The paper uses 4, with
            which gradients had four times the error of 6, in models that were trained for 60 steps.
        norm: bits for the inputs of norms, from which the inputs of the linear layers that follow are recomputed. None:
            8, or `bits` if that is more. With 4 bits, as in the paper, three short trainings from scratch lost 0.103,
            0.055 and 0.003 nats.
        mlp: bits for the inputs of activation functions and gates. ReLU takes one more bit per element. None: `bits`,
            but if that is 6, gates and their factors take 7 in groups of twice the length, because they caused most
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
            the channels of the other tokens have a mean error above 5 % with 8 bits in groups, as when a few channels
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
            raise TypeError(f"outliers is {shown(self.outliers)}; allowed: True or False")
        check_int("smallest", self.smallest, 0, 1 << 60)
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"layers is {shown(self.layers)}; allowed: a mapping from names to bits")
        for pattern, bits in self.layers.items():
            if not isinstance(pattern, str) or not pattern:
                raise TypeError(f"layers has {shown(pattern)}; allowed: names of modules, or patterns")
            check_format(f"layers[{pattern!r}]", bits)
        object.__setattr__(self, "layers", dict(self.layers))

    @classmethod
    def published(cls) -> "LayerAware":
        """Return AGoQ's bits: 4 for norms, activation functions, gates and linear layers; attention is not coded.

        These are from the abstract and published summaries of arXiv 2605.00539. They do not state the rest, which is
        ours: asymmetric groups of 64 with 4 bytes of scale and middle (4.5 bits an element in all), nearest rounding,
        and uncompressed inputs of linear layers with fewer than `smallest` elements. For the paper's bits by pipeline
        stage, `lowbit plan memory` writes a `LayerPlan` whose `policy` does not code attention either.
        """
        return cls(bits=4, norm=4, attention=WHOLE, outliers=False)

    def bits_of(self, kind: str, name: str = "") -> Format:
        """Bits or codec of a layer type ("norm", "mlp", "linear", "attention") in the module of this name.

        "gate": the activation functions `GATES` among "mlp".
        """
        own = getattr(self, "mlp" if kind == "gate" else kind)
        if kind == "gate" and own is None and self.bits == GATED:
            own = GroupInt(bits=GATED + 1, group=2 * self.group, rounding=self.rounding)
        least = LEAST_BITS.get(kind, 0) if own is None else 0
        chosen = _at_least(self.bits, least) if own is None else own
        if kind != "attention":
            for pattern, bits in self.layers.items():
                if _matches(name, pattern):
                    last = pattern.rpartition(".")[2]
                    itself = fnmatchcase(name, pattern) and fnmatchcase(name.rpartition(".")[2], last)
                    chosen = bits if itself and last.strip("*") else _at_least(bits, least)
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
        found, rest = (False, x) if x.shape[-1] % codec.group else outliers_and_rest(x)
        # Not FP8: its error is 2.7 % also in the large channels, on which gradients depend most.
        chosen = WithRemainder(first=codec) if error_of_groups(rest, codec) > SPOILED else codec
        return WithRows(inner=chosen) if found else chosen

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError unless each entry of `layers` matches one of these modules."""
        for pattern in self.layers:
            if not any(_matches(name, pattern) for name in names):
                some = ", ".join([name or "the whole model" for name in names][:6])
                raise ValueError(
                    f"layers has {shown(pattern)}, which matches none of the modules that can be compressed: "
                    f"{some}, ..."
                )


_ROWS = 1024  # rows that are examined


@torch.no_grad()
def error_of_groups(x: Tensor, codec: GroupInt) -> float:
    """Relative error of bits in groups, as the root mean square over channels; each counts at most 1."""
    rows = x.detach().reshape(-1, x.shape[-1])
    rows = rows[:: -(-len(rows) // _ROWS)].float()
    flat = functional.pad(rows.flatten(), (0, -rows.numel() % codec.group)).view(-1, codec.group)
    steps = (flat.amax(1) - flat.amin(1)) / (2**codec.bits - 1)
    squares = steps.square().div(12).repeat_interleave(codec.group)[: rows.numel()].view_as(rows).mean(0)
    sizes = rows.square().mean(0)
    errors = torch.where(
        sizes > 0, (squares / sizes).clamp(max=1), 0.0
    )  # NaN in `x` gives NaN, which compares as False
    return float((errors.sum() / (sizes > 0).sum().clamp(min=1)).sqrt())


def _at_least(bits: Format, least: int) -> Format:
    return max(bits, least) if isinstance(bits, int) else bits


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a module or of one around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def check_format(name: str, value: object) -> None:
    """Raise unless `value` is 2 to 8, or 16, or a codec that can save a tensor of any shape."""
    if isinstance(value, Codec):
        if not isinstance(value, Summable) or value.shaped or value.grain != 1:
            raise TypeError(
                f"{name} is {shown(value)}; allowed: bits, or a codec without state for any shape, such as "
                "BlockFloat8()"
            )
        return
    if value == WHOLE and type(value) is int:
        return
    try:
        check_int(name, value, 2, 8)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} is {shown(value)}; allowed: 2 to 8, or {WHOLE} (uncompressed)") from None
