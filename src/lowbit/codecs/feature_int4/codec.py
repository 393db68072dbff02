"""`FeatureInt4`: 4-bit integers with a static scale for each feature, and a few outlier features in bfloat16."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.codecs.checks import check_int
from lowbit.codecs.feature_int4 import reference
from lowbit.codecs.feature_int4.reference import LIMIT, feature_int4_layout
from lowbit.codecs.sums import Summable

# Of scales: their reciprocals are normal numbers, and 7 of them finite.
SMALLEST, LARGEST = 2.0**-126, 2.0**125


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FeatureInt4(Summable):
    """INT4 with a calibrated scale for each feature, and k outlier features as bfloat16, for tensor-parallel sums.

    The format of arXiv 2411.07942, for the all-reduces behind attention and MLP: their summands have a few features
    that are large on every input, and others whose range hardly depends on it. So no scale travels. E features are the
    last dimension; what is coded has N rows of E elements: any shape (..., E), or a flat piece of whole rows.

    Bytes of a payload: 2 N k (`features`: the outliers of each row, bfloat16, ascending), 0 to 15 (up to a multiple of
    16) and N ceil((E - k) / 2) (`codes`: of each row the other features, ascending; with h = ceil((E - k) / 2), byte j
    holds number j in its low half and number j + h, or 0, in its high half; halves are two's complement). Bits:
    (16 k + 4 (E - k)) / E, 4.1875 with k = E / 64.

    scale = range / 7, inverse = 1 / scale, code = round(x inverse), ties to even, cut to [-7, 7]; y = code scale. Each
    is one float32 operation: x is multiplied by the rounded inverse, not divided. Code -8 is NaN: NaN and Inf decode
    to NaN, in outliers they stay what they are. Finite values beyond a range become its end; outliers beyond bfloat16's
    largest number become that. Scales are at least 2^-126 and at most 2^125. A payload of zeros decodes to zeros.

    In a sum over R ranks (`lowbit.collectives.all_reduce`) `part(r)` codes what rank r adds, with its own scales, and
    `whole()` the sum, where that travels too (two_shot), with those of `total`. `sum` decodes the payloads of all ranks
    and adds them up in one pass: float32, in the order of the ranks, the features back in their places.

    To watch whether the ranges still hold, `counting(clipped)` gives a codec that also counts, within the same pass,
    what it cuts: values that would have become 8 or more (|x| at least 7.5 / 7 of the range, so that the error exceeds
    half a step), and, in any feature, NaN and Inf.

    Deviations from the paper, which gives neither layout nor rounding: a code for NaN; a calibrated second
    quantization, so that the sum may be reduced in two steps.

    Args:
        ranges: (R, E) float32, positive: the largest magnitude that rank r's partial sums have in each feature. Those
            of outliers are not used, but must be positive.
        total: (E,) float32: the same of the sum over the ranks.
        features: the k outliers, ascending; fewer than E, maybe none.
        rank: whose partial sums this codec codes.
        artifact: fingerprint of what these ranges come from. Ranks that have compared it compare it and the shape
            before a sum, not every layer's ranges: one comparison for all layers. Absent: the ranges. Ranks that then
            take different layers in one call do not get each other's messages, and after 2 s the same error (but for 1
            pair of layers in 32768, whose messages look alike). The transport "collectives" of `lowbit.collectives`
            cannot tell messages apart: there they get wrong sums, or the engine's error where bytes differ.
    """

    payload_version: ClassVar[int] = 2

    ranges: Tensor
    total: Tensor
    features: tuple[int, ...]
    rank: int = 0
    artifact: str = ""
    _tables: _Tables = field(init=False)
    _counters: tuple[Tensor | None, Tensor | None] = field(init=False, default=(None, None))

    def __post_init__(self) -> None:
        if not isinstance(self.ranges, Tensor) or self.ranges.dim() != 2 or not self.ranges.numel():
            given = tuple(self.ranges.shape) if isinstance(self.ranges, Tensor) else self.ranges
            raise ValueError(f"ranges is {given}; allowed: a tensor of (ranks, features)")
        ranks, size = self.ranges.shape
        _check_ranges("ranges", self.ranges, (ranks, size))
        _check_ranges("total", self.total, (size,))
        _check_features(self.features, size)
        check_int("rank", self.rank, 0, ranks - 1)
        if not isinstance(self.artifact, str):
            raise TypeError(f"artifact is {self.artifact!r}; allowed: a string")
        # Copies: who made the tensors may go on to change them.
        object.__setattr__(self, "ranges", self.ranges.detach().cpu().clone())
        object.__setattr__(self, "total", self.total.detach().cpu().clone())
        object.__setattr__(self, "_tables", _Tables(self.ranges, self.total, self.features))

    @classmethod
    def fit(cls, parts: Sequence[Tensor], *, outliers: int | None = None, artifact: str = "") -> FeatureInt4:
        """Return a codec calibrated on these partial sums: ranges are their largest magnitudes.

        Args:
            parts: of each rank, all of one shape (..., E).
            outliers: how many features travel as bfloat16: those of the largest range over all ranks; absent: E // 64.
            artifact: as above.

        Raises:
            ValueError: no parts, of different shapes, empty, not finite, features that are 0 in all of a rank's rows or
                in all sums, or `outliers` of not fewer than E features.
        """
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) != 1 or not shapes[0] or not math.prod(shapes[0]):
            raise ValueError(f"parts have shapes {shapes}; allowed: at least one, all of one shape (..., E), not empty")
        size = parts[0].shape[-1]
        rows = [part.detach().float().reshape(-1, size) for part in parts]
        ranges = torch.stack([r.abs().amax(0) for r in rows])
        total = torch.stack(rows).sum(0).abs().amax(0)
        count = size // 64 if outliers is None else outliers
        check_int("outliers", count, 0, size - 1)
        chosen = ranges.amax(0).topk(count).indices.sort().values
        return cls(ranges=ranges, total=total, features=tuple(chosen.tolist()), artifact=artifact)

    @property
    def grain(self) -> int:
        return self.total.numel()

    @property
    def ranks(self) -> int:
        return self.ranges.shape[0]

    @property
    def device(self) -> torch.device | None:
        counter = self._counters[0]
        return None if counter is None else counter.device

    def part(self, rank: int) -> FeatureInt4:
        check_int("rank", rank, 0, self.ranks - 1)
        return self if rank == self.rank else self._like(rank=rank)

    def whole(self) -> FeatureInt4:
        tables, (_, second) = self._tables.whole(), self._counters
        return self._like(ranges=self.total[None], rank=0, _tables=tables, _counters=(second, second))

    def counting(self, clipped: Tensor) -> FeatureInt4:
        """Return the same codec with a counter, on the device of what it codes, of the values that it cuts.

        Args:
            clipped: int64 (2,); [0]: of this rank's partial sums, how many values were cut, NaN or Inf; [1]: the same
                of the sums that it coded for all ranks (two_shot). A call that is under way may still add.

        Returns:
            A codec equal to this one, and as fast.

        Raises:
            ValueError: another dtype or shape.
        """
        if clipped.dtype != torch.int64 or clipped.shape != (2,) or not clipped.is_contiguous():
            raise ValueError(f"clipped is {clipped.dtype} {tuple(clipped.shape)}; allowed: contiguous int64 (2,)")
        return self._like(_counters=(clipped[:1], clipped[1:]))

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return feature_int4_layout(self._rows(shape), self.grain, len(self.features)).nbytes

    def identity(self) -> str:
        if self.artifact:
            return f"FeatureInt4 of artifact {self.artifact}"
        return f"{self.part(0)} [{self.part(0).fingerprint()}]"

    def layer(self) -> str:
        return self._tables.digest()[:16] if self.artifact else ""

    def fingerprint(self) -> str:
        text = f"FeatureInt4/{self.payload_version}/{self._tables.digest()}/{self.rank}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FeatureInt4):
            return NotImplemented
        return (self.fingerprint(), self.artifact) == (other.fingerprint(), other.artifact)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        return (
            f"FeatureInt4({self.grain} features, {len(self.features)} outliers, "
            f"rank {self.rank} of {self.ranks}, {self.fingerprint()})"
        )

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        scales = self._tables.on(x.device)
        reference.encode(
            x.view(-1, self.grain), payload, scales.inverse[self.rank], scales.order,
            len(self.features), self._counters[0],
        )  # fmt: skip

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        scales = self._tables.on(payload.device)
        reference.decode(
            payload, out.view(-1, self.grain), scales.scale[self.rank], scales.order,
            len(self.features), accumulate,
        )  # fmt: skip

    def _sum(self, payloads: Iterable[Tensor], out: Tensor, divisor: int, scratch: Tensor | None) -> None:
        self._rows(out.shape)
        scales, payloads = self._tables.on(out.device), list(payloads)
        if len(payloads) != self.ranks:
            raise ValueError(f"payloads are {len(payloads)}; allowed: {self.ranks}, one for each rank")
        reference.sum(payloads, out.view(-1, self.grain), scales.scale, scales.order, len(self.features), divisor)

    def _rows(self, shape: Sequence[int]) -> int:
        numel, size = math.prod(shape), self.grain
        if numel % size or (len(shape) > 1 and shape[-1] != size):
            raise ValueError(
                f"shape is {tuple(shape)}; allowed: (..., {size}), or one dimension of a multiple of {size} elements"
            )
        return numel // size

    def _like(self, **changes: object) -> FeatureInt4:
        """A codec that differs in what has been checked already, and shares the tables."""
        codec = object.__new__(FeatureInt4)
        for name, value in (vars(self) | changes).items():
            object.__setattr__(codec, name, value)
        return codec


@dataclass(frozen=True)
class _Scales:
    """On one device: scale and inverse (R, E) float32, 0 at the outliers; order (E,) int32: outliers last."""

    scale: Tensor
    inverse: Tensor
    order: Tensor


class _Tables:
    """Scales, inverses and the order of features, computed once for all ranks' codecs."""

    def __init__(self, ranges: Tensor, total: Tensor, features: tuple[int, ...]) -> None:
        self._ranges, self._total, self._features = ranges, total, features
        self._scales: dict[torch.device, _Scales] = {}
        self._whole: _Tables | None = None
        self._digest = ""

    def on(self, device: torch.device) -> _Scales:
        """The tables on a device; copied there at the first use, which must not be inside a CUDA graph's capture."""
        if device not in self._scales:
            self._scales[device] = self._on(device)
        return self._scales[device]

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> _Scales:
        chosen = torch.zeros(self._total.numel(), dtype=torch.bool)
        chosen[list(self._features)] = True
        scale = (self._ranges / LIMIT).clamp(SMALLEST, LARGEST)
        inverse = scale.reciprocal()
        order = torch.cat([(~chosen).nonzero(), chosen.nonzero()]).view(-1).int()
        zeroed = (torch.where(chosen, 0.0, t) for t in (scale, inverse))
        return _Scales(*(t.to(device) for t in (*zeroed, order)))

    def whole(self) -> _Tables:
        """Those of the sum over all ranks."""
        if self._whole is None:
            self._whole = _Tables(self._total[None], self._total, self._features)
        return self._whole

    def digest(self) -> str:
        """Hexadecimal, of the contents."""
        if not self._digest:
            digest = hashlib.sha256(repr((tuple(self._ranges.shape), self._features)).encode())
            for tensor in (self._ranges, self._total):
                digest.update(tensor.contiguous().numpy().tobytes())
            self._digest = digest.hexdigest()
        return self._digest


def _check_ranges(name: str, x: object, shape: tuple[int, ...]) -> None:
    """Raise unless `x` is a float32 tensor of this shape whose numbers are finite and positive."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        raise TypeError(
            f"{name} is {x.dtype if isinstance(x, Tensor) else type(x).__name__}; allowed: a float32 tensor"
        )
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {shape}")
    rows = x.reshape(-1, x.shape[-1])
    bad = ~(rows.isfinite() & (rows > 0))
    if bad.any():
        row, feature = bad.nonzero()[0].tolist()
        where = f"{name}[{row}, {feature}]" if len(shape) > 1 else f"{name}[{feature}]"
        value = float(rows[row, feature])
        raise ValueError(f"{where}, the range of feature {feature}, is {value:g}; allowed: finite and above 0")


def _check_features(features: object, size: int) -> None:
    if not isinstance(features, tuple) or not all(type(f) is int for f in features):
        raise TypeError(f"features is {features!r}; allowed: a tuple of integers")
    if len(features) >= size:
        raise ValueError(f"features are {len(features)}; allowed: fewer than the {size} there are")
    if list(features) != sorted(set(features)) or (features and not 0 <= features[0] <= features[-1] < size):
        raise ValueError(f"features is {features}; allowed: ascending, from 0 to {size - 1}")
