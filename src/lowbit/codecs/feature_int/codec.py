"""`FeatureInt`: integers with a calibrated range for each feature, by default a gain for each token, and outliers."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_choice, check_int
from lowbit.codecs.feature_int import reference
from lowbit.codecs.feature_int.reference import FEWEST, MOST, center_of, feature_int_layout
from lowbit.escape import shown
from lowbit.kernels.layout import planes_nbytes

# Bounds of ranges: their reciprocals are normal numbers.
SMALLEST, LARGEST = 2.0**-126, 2.0**125
GAINS = ("token", "static")
CLIPS = {3: 0.65, 4: 0.8, 5: 0.9, 6: 0.95, 7: 1.0, 8: 1.0}
"""Share of a token's largest magnitude at which codes saturate, by bits: least squared error on a real encoder."""
FLOOR = 1 / 64
"""Least range of a feature with a gain by token, of the root mean square over its rank's features."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FeatureInt(Summable):
    """Integers of 3 to 8 bits, a gain for each token times a calibrated scale for each feature, k features as bfloat16.

    Made for the all-reduces of tensor parallelism, after attention and MLP: their summands have a few features that are
    large on every input, and others whose range depends on little more than the token's own size. E features are the
    last dimension; inputs have N rows of E elements: any shape (..., E), or a flat piece of whole rows.

    Each step is one float32 operation, with c = 2^(bits - 1) - 0.5, the middle of the codes:

        v = (x - offset) inverse, inverse = 1 / range;  m: the largest |v| of the row without the outliers
        gain = bfloat16(max(m (clip / c), 2^-126)); 0 if m is 0; NaN if m is not finite
        code = round(v (1 / gain) + c), ties to even, cut to [0, 2^bits - 1]; NaN becomes 0; 1 / gain is 1 if gain is
            0 or NaN
        y = ((code - c) gain) range + offset

    So a row with NaN or Inf outside the outliers decodes to NaN; outliers are only rounded, and saturate at bfloat16's
    largest number. Finite values are clipped at clip m. A payload of zeros decodes to the offsets. Ranges are at least
    2^-126 and at most 2^125.

    Bytes of a payload: 2 N (`gains`: of each row, bfloat16), 2 N k (`features`: the outliers of each row, bfloat16,
    ascending) and N w (`codes`: of each row the other features, ascending); sections begin at multiples of 16. The
    n = E - k codes of a row are split into planes of 8, 4, 2 and 1 bits (5 bits: 4 + 1), low bits first; a plane of p
    bits has ceil(n p / 8) bytes, and with h as many, its byte j holds, from its low bits up, elements j, j + h,
    j + 2 h, ... Bits: (16 + 16 k + bits (E - k)) / E; 4.19 with 4 bits, k = E / 64 and E = 4096.

    gain="static" is the format of arXiv 2411.07942, without offsets: c = 2^(bits - 1) - 1, so that one code means 0,
    and the gain is float32(clip / c) in every row. Nothing is computed from a row, and no gain is sent: codes are 0 to
    2 c, bits (16 k + bits (E - k)) / E, and a payload of zeros decodes to -clip times the ranges. The paper specifies
    neither layout nor rounding. Two additions: in a row with NaN or Inf outside its outliers all codes are 2^bits - 1
    (decoders check the first), and the sum has calibrated ranges, too, so that it may be reduced in two steps. clip=1.2
    makes the ranges 1.2 times as wide.

    In a sum over R ranks (`lowbit.collectives.all_reduce`), `part(r)` codes rank r's summand with that rank's tables.
    If the sum is sent, too (two_shot), `whole()` codes it with the tables `total`. `sum` decodes the payloads of all
    ranks and adds them up in one pass: float32, in the order of the ranks, then the sum of all ranks' offsets.

    Args:
        bits: bits of a code, 3 to 8.
        gain: "token": one per row, or "static": only the ranges define where codes saturate, as published.
        clip: multiple of m at which codes saturate, above 0, at most 2; None: 1 for "static", else `CLIPS` by bits.
        ranges: (R, E) float32, positive: largest magnitude of rank r's partial sums in each feature, around the
            offsets. Those of outliers are not used, but must be positive.
        offsets: (R, E) float32, finite: means of rank r's partial sums; None: 0. Not used for outliers.
        total: (E,) float32: ranges of the sum over the ranks. total_offset: its means, given if `offsets` are.
        features: indices of the k outliers, ascending; fewer than E, possibly none.
        rank: rank whose partial sums this codec codes.
        artifact: fingerprint of the source of these tables. Ranks compare it and the shape before a sum, once for all
            layers, instead of every layer's tables; if omitted, they compare the tables. Ranks that take different
            layers in one call then do not get each other's messages, and all raise the same error after 2 s (except for
            1 pair of layers in 32768, whose messages look alike). The transport "collectives" cannot distinguish
            messages: there they get wrong sums, or PyTorch's error if sizes differ.
        held_out: mean and standard deviation, per rank, of the relative error on samples that were not used for the
            ranges. Not part of the format; `lowbit.tensor_parallel.Drift` compares with them.
    """

    payload_version: ClassVar[int] = 4

    bits: int = 4
    gain: Literal["token", "static"] = "token"
    clip: float | None = None
    ranges: Tensor
    offsets: Tensor | None = None
    total: Tensor
    total_offset: Tensor | None = None
    features: tuple[int, ...]
    rank: int = 0
    artifact: str = ""
    held_out: tuple[tuple[float, float], ...] = ()
    _tables: _FeatureTables = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.ranges, Tensor) or self.ranges.dim() != 2 or not self.ranges.numel():
            given = tuple(self.ranges.shape) if isinstance(self.ranges, Tensor) else self.ranges
            raise ValueError(f"ranges is {shown(given)}; allowed: a tensor of (ranks, features)")
        ranks, size = self.ranges.shape
        check_int("bits", self.bits, FEWEST, MOST)
        check_choice("gain", self.gain, GAINS)
        _check_clip(self.clip)
        _check_table("ranges", self.ranges, (ranks, size), positive=True)
        _check_table("total", self.total, (size,), positive=True)
        if (self.offsets is None) != (self.total_offset is None):
            raise ValueError("one of offsets and total_offset is None; allowed: both or neither")
        if self.offsets is not None:
            _check_table("offsets", self.offsets, (ranks, size))
            _check_table("total_offset", self.total_offset, (size,))
        if not isinstance(self.features, tuple) or not all(type(f) is int for f in self.features):
            raise TypeError(f"features is {shown(self.features)}; allowed: a tuple of integers")
        if len(self.features) >= size:
            raise ValueError(f"features are {len(self.features)}; allowed: fewer than the {size} there are")
        if list(self.features) != sorted({f for f in self.features if 0 <= f < size}):
            raise ValueError(f"features is {self.features}; allowed: ascending, from 0 to {size - 1}")
        check_int("rank", self.rank, 0, ranks - 1)
        if not isinstance(self.artifact, str):
            raise TypeError(f"artifact is {shown(self.artifact)}; allowed: a string")
        default = 1.0 if self.gain == "static" else CLIPS[self.bits]
        object.__setattr__(self, "clip", default if self.clip is None else float(self.clip))
        for name in ("ranges", "offsets", "total", "total_offset"):
            table = getattr(self, name)
            if table is not None:  # a copy: the caller may change the tensor later
                object.__setattr__(self, name, table.detach().cpu().clone())
        tables = _FeatureTables(self.ranges, self.offsets, self.total, self.total_offset, self.features)
        object.__setattr__(self, "_tables", tables)

    @classmethod
    def fit(
        cls, parts: Sequence[Tensor], *, bits: int = 4, gain: Literal["token", "static"] = "token",
        clip: float | None = None, means: bool = True, outliers: int | None = None, artifact: str = "",
    ) -> FeatureInt:  # fmt: skip
        """Return a codec calibrated on these partial sums: ranges are their largest magnitudes around their means.

        The range of a feature that is constant over all rows is its magnitude. With a gain by token, ranges are at
        least 1/64 of the root mean square over a rank's features: one that hardly varied in these rows may vary more
        later, and must not set the gain of all others then.

        Args:
            parts: samples of each rank's partial sums, all of one shape (..., E).
            bits, gain, clip, artifact: as above.
            means: whether to use the means as offsets; otherwise offsets are 0.
            outliers: number of bfloat16 features, those of the largest range over all ranks; None: E // 64.

        Raises:
            ValueError: parts are missing, empty, not finite or of different shapes; a feature is 0 in all of a rank's
                rows or in all sums; or `outliers` is not below E.
        """
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) != 1 or not shapes[0] or not math.prod(shapes[0]):
            raise ValueError(f"parts have shapes {shapes}; allowed: at least one, all of one shape (..., E), not empty")
        size = parts[0].shape[-1]
        rows_RNE = torch.stack([part.detach().float().reshape(-1, size) for part in parts])
        rows_RNE = torch.cat([rows_RNE, rows_RNE.sum(0, keepdim=True)])
        mean_RE = rows_RNE.mean(1) if means else rows_RNE.new_zeros(len(rows_RNE), size)
        ranges_RE = (rows_RNE - mean_RE[:, None]).abs().amax(1)
        # Not by the range: the mean of equal numbers is rounded.
        constant_RE = rows_RNE.amin(1) == rows_RNE.amax(1)
        ranges_RE = torch.where(constant_RE, rows_RNE.abs().amax(1), ranges_RE)
        if gain == "token":
            least_R1 = ranges_RE.square().mean(1, keepdim=True).sqrt() * FLOOR
            ranges_RE = torch.where(ranges_RE > 0, torch.maximum(ranges_RE, least_R1), 0.0)  # zeros are refused below
        count = size // 64 if outliers is None else outliers
        check_int("outliers", count, 0, size - 1)
        chosen = ranges_RE[:-1].amax(0).topk(count).indices.sort().values
        return cls(
            bits=bits, gain=gain, clip=clip, ranges=ranges_RE[:-1], total=ranges_RE[-1],
            offsets=mean_RE[:-1] if means else None, total_offset=mean_RE[-1] if means else None,
            features=tuple(chosen.tolist()), artifact=artifact,
        )  # fmt: skip

    @staticmethod
    def row_bits(bits: int, features: int, outliers: int, gain: str = "token") -> int:
        """Return the bits of a row of a payload: the gain if it is sent, outliers and codes."""
        return 16 * (gain == "token") + 16 * outliers + 8 * planes_nbytes(features - outliers, bits)

    @property
    def grain(self) -> int:
        return self.total.numel()

    @property
    def ranks(self) -> int:
        return self.ranges.shape[0]

    def part(self, rank: int) -> FeatureInt:
        check_int("rank", rank, 0, self.ranks - 1)
        return self if rank == self.rank else self._like(rank=rank)

    def whole(self) -> FeatureInt:
        tables = self._tables.whole
        return self._like(ranges=tables.ranges, offsets=tables.offsets, rank=0, _tables=tables)

    def like(self, *, bits: int, clip: float) -> FeatureInt:
        """Return a codec with the same tables and other codes.

        Raises:
            ValueError: as the class.
        """
        check_int("bits", bits, FEWEST, MOST)
        if clip is None:
            raise ValueError("clip is None; allowed: a number above 0 and at most 2")
        _check_clip(clip)
        return self._like(bits=bits, clip=float(clip))

    def format_nbytes(self, shape: Sequence[int]) -> int:
        rows, outliers = self._rows(shape), len(self.features)
        return feature_int_layout(rows, self.grain, outliers, self.bits, self.gain == "token").nbytes

    def identity(self) -> str:
        if self.artifact:
            return f"FeatureInt of artifact {self.artifact}"
        return f"{self.part(0)} [{self.part(0).fingerprint()}]"

    def layer(self) -> str:
        return self._tables.digest[:16] if self.artifact else ""

    def fingerprint(self) -> str:
        settings = f"{self.bits}/{self.gain}/{self.clip}"
        text = f"FeatureInt/{self.payload_version}/{settings}/{self._tables.digest}/{self.rank}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FeatureInt):
            return NotImplemented
        return (self.fingerprint(), self.artifact) == (other.fingerprint(), other.artifact)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        return (
            f"FeatureInt({self.bits} bits, {self.gain} gain, clip {self.clip:g}, {self.grain} features, "
            f"{len(self.features)} outliers, rank {self.rank} of {self.ranks}, {self.fingerprint()})"
        )

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        tables, rank = self._tables.on(x.device), self.rank
        reference.encode(
            x.view(-1, self.grain), payload, tables.inverse[rank], tables.offset[rank], tables.order,
            len(self.features), self.bits, self._share, self.gain == "token",
        )  # fmt: skip

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        tables, rank = self._tables.on(payload.device), self.rank
        reference.decode(
            [payload], out.view(-1, self.grain), tables.scale[rank, None], tables.offset[rank], tables.order,
            len(self.features), self.bits, self._static, 1, accumulate,
        )  # fmt: skip

    def _sum(self, payloads: Iterable[Tensor], out: Tensor, divisor: int, scratch: Tensor | None) -> None:
        self._rows(out.shape)
        tables, payloads = self._tables.on(out.device), list(payloads)
        if len(payloads) != self.ranks:
            raise ValueError(f"payloads are {len(payloads)}; allowed: {self.ranks}, one for each rank")
        reference.decode(
            payloads, out.view(-1, self.grain), tables.scale, tables.offsets, tables.order,
            len(self.features), self.bits, self._static, divisor, False,
        )  # fmt: skip

    @property
    def _share(self) -> float:
        """Ratio of a row's gain to its largest magnitude (with static ranges: to 1)."""
        assert self.clip is not None
        return max(self.clip / center_of(self.bits, self.gain == "token"), SMALLEST)

    @property
    def _static(self) -> float:
        """The gain of all rows; 0: each row has its own."""
        return self._share if self.gain == "static" else 0.0

    def _rows(self, shape: Sequence[int]) -> int:
        numel, size = math.prod(shape), self.grain
        if numel % size or (len(shape) > 1 and shape[-1] != size):
            raise ValueError(
                f"shape is {tuple(shape)}; allowed: (..., {size}), or one dimension of a multiple of {size} elements"
            )
        return numel // size

    def _like(self, **changes: object) -> FeatureInt:
        """Copy this codec with changes that have been checked already; the tables are shared."""
        codec = object.__new__(FeatureInt)
        for name, value in (vars(self) | changes).items():
            object.__setattr__(codec, name, value)
        return codec


@dataclass(frozen=True)
class _OnDevice:
    """Scale, inverse and offset (R, E) float32, 0 at the outliers; offsets (E,): of all ranks; order (E,) int32."""

    scale: Tensor
    inverse: Tensor
    offset: Tensor
    offsets: Tensor
    order: Tensor


@dataclass(frozen=True, eq=False)
class _FeatureTables:
    """Tables for kernels, computed once for the codecs of all ranks."""

    ranges: Tensor
    offsets: Tensor | None
    total: Tensor
    total_offset: Tensor | None
    features: tuple[int, ...]
    there: dict[torch.device, _OnDevice] = field(default_factory=dict)

    def on(self, device: torch.device) -> _OnDevice:
        """Return the tables on a device. The first use copies them, and must not be inside a CUDA graph's capture."""
        if device in self.there:
            return self.there[device]
        with torch.inference_mode(False):
            chosen = torch.zeros(self.total.numel(), dtype=torch.bool, device="cpu")
            chosen[list(self.features)] = True
            scale = self.ranges.clamp(SMALLEST, LARGEST)
            offset = torch.zeros_like(scale) if self.offsets is None else self.offsets
            scale, inverse, offset = (torch.where(chosen, 0.0, t) for t in (scale, scale.reciprocal(), offset))
            offsets = sum(offset, torch.zeros_like(offset[0]))  # in the order of the ranks
            order = torch.cat([(~chosen).nonzero(), chosen.nonzero()]).view(-1).int()
            self.there[device] = _OnDevice(*(t.to(device) for t in (scale, inverse, offset, offsets, order)))
        return self.there[device]

    @functools.cached_property
    def whole(self) -> _FeatureTables:
        """Tables of the sum over all ranks."""
        offset = None if self.total_offset is None else self.total_offset[None]
        return _FeatureTables(self.total[None], offset, self.total, self.total_offset, self.features)

    @functools.cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the contents."""
        digest = hashlib.sha256(repr((tuple(self.ranges.shape), self.features)).encode())
        for tensor in (self.ranges, self.total, self.offsets, self.total_offset):
            digest.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def _check_clip(clip: object) -> None:
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip <= 2):
        raise ValueError(f"clip is {shown(clip)}; allowed: a number above 0 and at most 2, or None")


def _check_table(name: str, x: object, shape: tuple[int, ...], *, positive: bool = False) -> None:
    """Raise unless `x` is a float32 tensor of this shape whose numbers are finite, and positive if they must be."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        raise TypeError(
            f"{name} is {x.dtype if isinstance(x, Tensor) else type(x).__name__}; allowed: a float32 tensor"
        )
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {shape}")
    bad = (~x.isfinite() | (x <= 0) if positive else ~x.isfinite()).nonzero()
    if len(bad):
        at, what, allowed = bad[0].tolist(), *(("range", "finite and above 0") if positive else ("mean", "finite"))
        value = float(x[tuple(at)])
        raise ValueError(f"{name}{at}, the {what} of feature {at[-1]}, is {value:g}; allowed: {allowed}")
