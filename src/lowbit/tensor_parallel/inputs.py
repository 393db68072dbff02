"""Row-wise layers whose ranks exchange inputs instead of partial sums, and each multiply by all weights.

The partial sums after attention have E features, but on W ranks each is computed from the E / W outputs of a rank's own
heads. In 8 bits these take the bytes of the sums in 8 / W bits, and their error is a tenth of that of sums in 4 bits.
In return every rank keeps the layer's whole weight and computes W times as many products.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.codecs import Cast, GroupInt
from lowbit.codecs.base import Summable
from lowbit.collectives.reduce import check_flat
from lowbit.escape import shown
from lowbit.tensor_parallel.reduce import sum_in_process, sum_over_ranks
from lowbit.tensor_parallel.rowwise import Installed, LayerSum, register, row_forward, tp_linear
from lowbit.tensor_parallel.sums import ModelSum, mark

INPUT_WIDTHS, INPUT_GROUP = (4, 5, 6, 8), 64
"""Formats of inputs among which a budget chooses: bits of `GroupInt(symmetric=True)`, and its group."""
_ROWS = 64  # rows of the message whose bits are counted


@dataclass(frozen=True, kw_only=True)
class Slices(Summable):
    """Codes rows of which each rank holds a slice of the features, so that the sum over the ranks concatenates them.

    Rank r's rows are zero outside features r E / W to (r + 1) E / W. Only these are coded, one rank's slices of all
    rows at once; bytes and formulas are those of `codec` for that number of elements.

    Args:
        codec: of the slices. width: E. world: W, a divisor of E. rank: the rank whose slices this codec codes.

    Raises:
        TypeError: a codec that keeps state or only codes whole tokens. ValueError: W does not divide E.
    """

    codec: Summable
    width: int
    world: int
    rank: int = 0

    def __post_init__(self) -> None:
        check_flat(self.codec)
        if self.width % self.world:
            raise ValueError(f"width is {self.width}; allowed: a multiple of the {self.world} ranks")

    @property
    def grain(self) -> int:
        return self.width

    @property
    def ranks(self) -> int:
        return self.world

    def part(self, rank: int) -> "Slices":
        return self if rank == self.rank else replace(self, rank=rank)

    def identity(self) -> str:
        return f"{self.part(0)} [{self.part(0).fingerprint()}]"

    def fingerprint(self) -> str:
        text = f"Slices/{self.payload_version}/{self.codec.fingerprint()}/{self.width}/{self.world}/{self.rank}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self.codec.nbytes((math.prod(shape) // self.world,))

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        self.codec.encode(self._of(x, self.rank).contiguous().view(-1), out=payload)

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        if not accumulate:
            out.zero_()
        self._put(payload, out, self.rank)

    def _sum(self, payloads: Iterable[Tensor], out: Tensor, divisor: int, scratch: Tensor | None) -> None:
        out.zero_()
        for rank, payload in enumerate(payloads):
            self._put(payload, out, rank)
        if divisor > 1:
            out.div_(out.new_full((), divisor))  # CUDA multiplies by the inverse of a number

    def _put(self, payload: Tensor, out: Tensor, rank: int) -> None:
        part = self._of(out, rank)
        part.add_(self.codec.decode(payload, shape=(part.numel(),)).view(part.shape))

    def _of(self, x: Tensor, rank: int) -> Tensor:
        size = self.width // self.world
        return x.view(-1, self.width).narrow(1, rank * size, size)


def input_numbers(inputs: object) -> tuple[int, int]:
    """Return bits and group of a format of inputs, as calibrations store them: group 0 means bfloat16."""
    if inputs == Cast(dtype=torch.bfloat16):
        return 16, 0
    if isinstance(inputs, GroupInt) and inputs == input_format(inputs.bits, inputs.group):
        return inputs.bits, inputs.group
    raise ValueError(
        f"inputs is {shown(inputs)}; allowed: 'auto', None, GroupInt(bits=..., group=..., symmetric=True), "
        "Cast(dtype=torch.bfloat16)"
    )


def input_format(bits: int, group: int) -> Summable:
    """Return the format of these numbers."""
    return GroupInt(bits=bits, group=group, symmetric=True) if group else Cast(dtype=torch.bfloat16)


def layers_with_inputs(sums: Mapping[str, ModelSum], ranks: int, inputs: Summable, most: float) -> dict[str, float]:
    """Return the layers that may send their inputs instead of their partial sums, with the bits of a row of each.

    These are plain `Linear`s whose inputs take at most `most` bits for each output, and that have no more inputs than
    outputs: computing all products of an MLP's last layer on every rank would cost more than it saves on the link.
    """
    found: dict[str, float] = {}
    for name, summed in sums.items():
        layer = summed.module
        if type(layer) is not nn.Linear or summed.partial is not None:  # quantized layers compute products themselves
            continue
        if layer.in_features % ranks or layer.in_features > layer.out_features:
            continue
        slices = Slices(codec=inputs, width=layer.in_features, world=ranks)
        bits = 8 * slices.nbytes((_ROWS, layer.in_features)) / _ROWS
        if bits <= most * layer.out_features:
            found[name] = bits
    return found


@dataclass(kw_only=True, eq=False)
class InputGather:
    """A row-wise layer that sends its inputs whenever its partial sums would be coded; see the module.

    On real ranks a call is the operator `lowbit::tp_linear`, so that graphs may contain it. Each rank sends (W - 1)
    times the bytes of its slices, 8.25 E / (8 W) per row in `GroupInt(bits=8, group=64)`.

    Args:
        sums: of the layer: decides, by its format and settings, which calls are coded, and adds up the others.
        layer: the layer. codec: of the inputs.
    """

    sums: LayerSum
    layer: nn.Linear
    codec: Summable

    def __post_init__(self) -> None:
        self.slices = Slices(codec=self.codec, width=self.layer.in_features, world=self.sums.ranks)
        self.sums.inputs = self.slices
        self.number = register(self)
        self._gathered = self._state()

    def linear(self, x: Tensor, weight: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the layer's output without bias, of x (..., E / W), weight (F, E / W) and whole (F, E)."""
        sums = self.sums
        if self._stays(x):
            partial = F.linear(x, weight)
            sums.reduce_(partial, group)
            return partial
        if self._state() != self._gathered:
            raise RuntimeError(
                f"the weight of {sums.name} was changed after all ranks had gathered it to send inputs; allowed: "
                "remove() before the change and low_bit_ after it, or a calibration with inputs None"
            )
        full = self._placed(x, group.rank())
        sums.traffic.take(full, sums.ranks, self.slices, "one_shot")
        sum_over_ranks(full, self.slices, group, "one_shot", sums.settings)
        total = F.linear(full, whole)
        if sums.watch is not None:
            sums.watch(sums.name, [F.linear(x, weight)], total)
        return total

    def emulated(self, parts: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
        """Return what `linear` returns on ranks that have these parts of the input and these columns of the weight."""
        sums = self.sums
        if self._stays(parts[0]):
            return sums(list(map(F.linear, parts, columns)))
        full = [self._placed(part, rank) for rank, part in enumerate(parts)]
        sums.traffic.take(full[0], sums.ranks, self.slices, "one_shot")
        total = F.linear(sum_in_process(full, self.slices, "one_shot"), self.layer.weight)
        if sums.watch is not None:
            sums.watch(sums.name, list(map(F.linear, parts, columns)), total)
        return total

    def _state(self) -> tuple[int, ...]:
        """Return what a change of this rank's part of the weight changes; of a DTensor, it counts at either tensor."""
        weight = self.layer.weight
        parts = [weight, weight.to_local()] if isinstance(weight, DTensor) else [weight]
        return parts[-1].data_ptr(), *(0 if part.is_inference() else part._version for part in parts)

    def _stays(self, x: Tensor) -> bool:
        partial = torch.empty((*x.shape[:-1], self.sums.width), dtype=x.dtype, device="meta")
        return self.sums.settings.choice(partial, self.sums.ranks, self.sums.codec) == "plain"

    def _placed(self, x: Tensor, rank: int) -> Tensor:
        """Return a tensor of all inputs that is zero except for a rank's own."""
        full = x.new_zeros(*x.shape[:-1], self.slices.width)
        full.narrow(-1, rank * x.shape[-1], x.shape[-1]).copy_(x)
        return full


def send_inputs(
    installed: Installed, sums: Mapping[str, ModelSum], inputs: Mapping[str, Summable], group: dist.ProcessGroup
) -> None:
    """Let layers of a model on real ranks send their inputs in these formats; all ranks must call this."""
    for layer_sum in installed.sums:
        summed = sums[layer_sum.name]
        layer = summed.module
        if layer_sum.name in inputs and isinstance(layer, nn.Linear) and isinstance(layer.weight, DTensor):
            gather = InputGather(sums=layer_sum, layer=layer, codec=inputs[layer_sum.name])
            product = partial(_product, gather, layer.weight.full_tensor().detach())
            installed.replace(layer, mark(row_forward(layer, layer_sum, group, product), summed))


def _product(gather: InputGather, whole: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return tp_linear(x, weight, whole, gather.number, gather.sums.group_name)
