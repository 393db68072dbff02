"""`python -m benchmarks codecs`: `lowbit bench codecs` with the procedure of the TAH-Quant paper's research code.

`TAHQuant` must not be worse than that procedure. Its round trip is computed in plain PyTorch, and its bits are counted;
nothing is packed.

Differences from `lowbit.codecs.TAHQuant.published()`, which has the same tile, widths, share and pivots:

- scale = (max - min) / (2^bits - 1) and zero = min are sent as float16, but codes are computed from the unrounded
  ones, so that the receiver uses other numbers than the sender;
- levels lie on both ends of [min, max];
- entropy comes from float32 logarithms.

It can lose a token when it rounds the numbers of wide and narrow tokens separately. This fault is not reproduced.

Shapes: B sequences, S tokens, C channels, T tiles of a token, E elements of a tile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.config import section
from lowbit_lab.bench import codecs
from lowbit_lab.bench.codecs import FITTED, CodecsBenchmark

METADATA_BITS = 32  # scale and zero, float16 each
SMALLEST = 1e-30  # keeps log2 and the division by a tile's scale finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedProcedure:
    """Round trip and bits of the published procedure.

    Args:
        allocation: "tile" (per token, tiles of lowest entropy get 3 bits) or "token" (per sequence, tokens do).
        tile: channels of a tile, a power of two that divides the channels.
    """

    allocation: str = "tile"
    tile: int = 64
    high_bits: int = 4
    low_bits: int = 3
    high_fraction: float = 0.8
    pivot_ratio: float = 2.0

    def __post_init__(self) -> None:
        if self.allocation not in ("tile", "token"):
            raise ValueError(f"allocation is {self.allocation!r}; allowed: 'tile', 'token'")

    def bits_per_element(self, shape: Sequence[int]) -> float:
        """Return the bits per element of codes, scales, zeros, width flags, and pivot flags with their positions.

        Raises:
            ValueError: channels that `tile` does not divide, which the research code cannot code.
        """
        length, channels = shape[-2:]
        self._check(channels)
        tiles = channels // self.tile
        candidates = tiles if self.allocation == "tile" else length
        low = math.floor((1 - self.high_fraction) * candidates + 1e-9) / candidates
        flags = 1 / self.tile if self.allocation == "tile" else 1 / channels
        pivots = (1 + math.log2(self.tile)) / self.tile
        codes = self.high_bits - low * (self.high_bits - self.low_bits)
        return codes + METADATA_BITS / self.tile + flags + pivots

    def round_trip(self, x_BSC: Tensor) -> Tensor:
        """Return what the receiver reconstructs, in the dtype of the input."""
        self._check(x_BSC.shape[-1])
        x_BSTE = x_BSC.float().unflatten(-1, (-1, self.tile))
        levels = self._levels(x_BSTE)
        position, rotated = _pivots(x_BSTE, self.pivot_ratio)
        moved = _swap(x_BSTE, position)
        hadamard = _hadamard(self.tile).to(x_BSC.device)
        coded = torch.where(rotated, moved @ hadamard, x_BSTE)
        y = _quantize(coded, levels)
        y = torch.where(rotated, _swap(y @ hadamard, position), y)
        return y.flatten(-2).to(x_BSC.dtype)

    def _levels(self, x_BSTE: Tensor) -> Tensor:
        """Return 2^bits - 1 of each tile, (B, S, T or 1, 1)."""
        if self.allocation == "tile":
            entropy = _entropy(x_BSTE)
        else:
            entropy = _entropy(x_BSTE.flatten(-2))
        count = math.floor((1 - self.high_fraction) * entropy.shape[-1] + 1e-9)
        lowest = entropy.argsort(-1)[..., :count]
        bits = torch.full_like(entropy, self.high_bits).scatter_(-1, lowest, self.low_bits)
        bits = bits[..., None] if self.allocation == "tile" else bits[..., None, None]
        return 2**bits - 1

    def _check(self, channels: int) -> None:
        if channels % self.tile:
            raise ValueError(f"channels is {channels}; allowed: multiples of the tile, {self.tile}")


def _entropy(x: Tensor) -> Tensor:
    p = x.abs() / x.abs().sum(-1, keepdim=True).clamp(min=SMALLEST)
    return -(p * p.clamp(min=SMALLEST).log2()).sum(-1)


def _pivots(x_BSTE: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the position of each tile's largest magnitude, and whether the tile is rotated; both (B, S, T, 1)."""
    top = x_BSTE.abs().topk(2, dim=-1)
    rotated = top.values[..., :1] >= ratio * top.values[..., 1:]
    return top.indices[..., :1], rotated & (top.values[..., :1] > 0)


def _swap(x: Tensor, position: Tensor) -> Tensor:
    """Exchange the first element of each tile with the one at `position`."""
    pivot, first = x.gather(-1, position), x[..., :1]
    y = x.scatter(-1, position, first)
    return torch.cat([pivot, y[..., 1:]], -1)


def _hadamard(size: int) -> Tensor:
    """Normalised Walsh-Hadamard matrix in Sylvester order, (size, size)."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * size**-0.5


def _quantize(x: Tensor, levels: Tensor) -> Tensor:
    """Round trip through uniform codes, which are made with float32 scale and zero, and read with float16 ones."""
    zero = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - zero) / levels
    codes = ((x - zero) / scale.clamp(min=SMALLEST)).round().clamp(min=0)
    return torch.minimum(codes, levels) * scale.half().float() + zero.half().float()


codecs.EXTRA_NAMES.update(
    {
        "published-procedure": PublishedProcedure(allocation="tile"),
        "published-procedure-token": PublishedProcedure(allocation="token"),
    }
)


@section()
class PublishedBenchmark(CodecsBenchmark):
    """Settings of `lowbit bench codecs`, with more formats."""

    codecs: tuple[str, ...] = (
        "bf16", "fp8", "int8", "GroupInt(bits=6, group=32, symmetric=True)", "int4", "subspace", "transform",
        "tah-quant", "tah-quant-published", "tah-quant-published-token", "published-procedure",
        "published-procedure-token", *FITTED,
    )  # fmt: skip
    """See `lowbit bench codecs`. published-procedure and published-procedure-token (bits by token): errors and bits
    of the paper's research code, not its speed."""


COMMAND = dataclasses.replace(
    codecs.COMMAND,
    settings=PublishedBenchmark,
    examples=("python -m benchmarks codecs --codec published-procedure --data gaussian",),
)
