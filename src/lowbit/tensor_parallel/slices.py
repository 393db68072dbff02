"""`Slices`: the format of a layer's inputs, of which each rank holds some features; and which layers may send them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowbit.codecs import Cast, GroupInt
from lowbit.codecs.sums import Summable
from lowbit.collectives.checks import check_flat
from lowbit.tensor_parallel.sums import ModelSum

_ROWS = 64  # of the message whose bits are counted


@dataclass(frozen=True, kw_only=True)
class Slices(Summable):
    """Codes rows of which each rank holds a slice of the features: the sum over the ranks puts them side by side.

    Rank r's rows are zero outside features r E / W to (r + 1) E / W. Only these are coded, one rank's slices of all
    rows in a piece; bytes and formulas are those of `codec` for so many elements.

    Args:
        codec: of the slices. width: E. world: W, a divisor of E. rank: whose slices this codec codes.

    Raises:
        TypeError: a codec that keeps state or codes whole tokens only. ValueError: W does not divide E.
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

    def part(self, rank: int) -> Slices:
        return self if rank == self.rank else replace(self, rank=rank)

    def identity(self) -> str:
        return f"{self.part(0)} [{self.part(0).fingerprint()}]"

    def fingerprint(self) -> str:
        text = f"Slices/{self.payload_version}/{self.codec.fingerprint()}/{self.width}/{self.world}/{self.rank}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self.codec.nbytes((self._slices(shape),))

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
        """Add a rank's slices to a tensor."""
        part = self._of(out, rank)
        part.add_(self.codec.decode(payload, shape=(part.numel(),)).view(part.shape))

    def _of(self, x: Tensor, rank: int) -> Tensor:
        size = self.width // self.world
        return x.view(-1, self.width).narrow(1, rank * size, size)

    def _slices(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // self.world


def input_numbers(inputs: object) -> tuple[int, int]:
    """Return bits and group of a format of inputs, as calibrations keep them: group 0 is bfloat16.

    Raises:
        ValueError: another format.
    """
    if inputs == Cast(dtype=torch.bfloat16):
        return 16, 0
    if isinstance(inputs, GroupInt) and inputs == input_format(inputs.bits, inputs.group):
        return inputs.bits, inputs.group
    raise ValueError(
        f"inputs is {inputs!r}; allowed: None, GroupInt(bits=..., group=..., symmetric=True), "
        "Cast(dtype=torch.bfloat16)"
    )


def input_format(bits: int, group: int) -> Summable:
    """Return the format of these numbers."""
    return GroupInt(bits=bits, group=group, symmetric=True) if group else Cast(dtype=torch.bfloat16)


def layers_with_inputs(sums: Mapping[str, ModelSum], ranks: int, inputs: Summable, most: float) -> dict[str, float]:
    """Return the layers that may send their inputs instead of their partial sums, and the bits of a row of each.

    Allowed are plain `Linear`s whose inputs take at most `most` bits for each output, and that have no more inputs than
    outputs: all products of an MLP's last layer on every rank would cost more than the link does.
    """
    found: dict[str, float] = {}
    for name, summed in sums.items():
        layer = summed.module
        if type(layer) is not nn.Linear or layer.in_features % ranks or layer.in_features > layer.out_features:
            continue
        slices = Slices(codec=inputs, width=layer.in_features, world=ranks)
        bits = 8 * slices.nbytes((_ROWS, layer.in_features)) / _ROWS
        if bits <= most * layer.out_features:
            found[name] = bits
    return found
