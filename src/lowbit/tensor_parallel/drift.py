"""`Drift`: checks whether a calibration still holds for the inputs of a running model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import escape
from lowbit.codecs import FeatureInt
from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_int
from lowbit.escape import shown
from lowbit.wire.messages import gather_json

ROWS = 4
"""Number of rows in a sample."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_log = escape.logger("lowbit.tensor_parallel")


def sample(x: Tensor, turn: int) -> Tensor:
    """Return up to `ROWS` rows of (..., E) in float32, different ones for each turn.

    They are spread by the golden ratio: evenly spaced ones would all have one position in the sequences of a batch.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= ROWS:
        return rows.float()
    chosen = [int(len(rows) * ((ROWS * turn + i + 0.5) * _GOLDEN % 1)) for i in range(ROWS)]
    return rows[chosen].float()


def relative_error(codec: Codec, rows: Tensor) -> Tensor:
    """Root mean square of each row's error over that of the row, the median over the rows, float64.

    A row of zeros counts as 0. The median is not affected by a few very large tokens or by padding.
    """
    error = codec.decode(codec.encode(rows), shape=rows.shape) - rows
    power = rows.double().square().sum(1)
    return torch.where(power > 0, error.double().square().sum(1) / power, 0.0).sqrt().median()


@dataclass(frozen=True, kw_only=True)
class DriftRow:
    """Partial sums of one layer and rank since the start.

    Args:
        layer: its name. rank: whose partial sums.
        samples: number of samples. error: the mean of their relative errors; NaN without samples.
        expected: the same for text that the calibration held out; NaN if the codec has no such number.
        bad: sampled calls with NaN or Inf in the partial sums.
        drifted: whether the error is above what is expected.
    """

    layer: str
    rank: int
    samples: int
    error: float
    expected: float
    bad: int
    drifted: bool


def _growth(row: DriftRow) -> float:
    return row.error / row.expected if row.expected else math.inf


@dataclass
class _Watched:
    """Samples of one layer. Sums stay on the device of the values, so that adding to them need not wait for it."""

    codec: FeatureInt
    sums: dict[int, Tensor] = field(default_factory=dict)  # float64 by rank: samples, their errors, calls with NaN
    calls: int = 0
    warned: bool = False


class Drift:
    """Sample the error of every row-wise layer of a running model; warn where it is above the calibration's own.

        drift = Drift()
        low_bit_(model, "calibration.safetensors", drift=drift)
        ...
        print(drift.report())

    In every `every`th call of a layer up to 4 rows are coded again, and the median of their relative errors is compared
    with that of the same number of rows of text that the calibration held out. A layer has drifted if the mean over the
    samples is above `threshold` times the calibration's, and the difference exceeds 3 standard deviations of such a
    mean. Then give the layer more bits, or calibrate on such text. NaN and Inf are reported separately: calibration
    neither causes nor cures them. After a pass, one warning counts the layers that have newly drifted, and names the
    worst. Only those calls, and `report`, wait for the device.

    Args:
        threshold: largest allowed ratio of the error to that of the calibration's held-out text.
        every: calls of a layer between two samples.
    """

    def __init__(self, *, threshold: float = 1.2, every: int = 64) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold >= 1:
            raise ValueError(f"threshold is {shown(threshold)}; allowed: a number of at least 1")
        check_int("every", every, 1, 1 << 30)
        self.threshold, self.every = threshold, every
        self._layers: dict[str, _Watched] = {}
        self._warned_nan = False
        self._seen: set[str] = set()  # layers sampled in this pass
        self._new: list[DriftRow] = []  # the worst rank of layers that have drifted in this pass

    def attach(self, layer: str, codec: Codec | None) -> None:
        """Watch a layer; TypeError for a codec without calibrated ranges."""
        if not isinstance(codec, FeatureInt):
            raise TypeError(f"drift watches calibrated ranges; codec is {codec}; allowed: a FeatureInt")
        self._layers[layer] = _Watched(codec)

    def look(self, layer: str, partials: Sequence[Tensor], first: int = 0) -> None:
        """Sample, in some calls, the error of partial sums that are about to be coded, of ranks from `first` on."""
        watched = self._layers[layer]
        watched.calls += 1
        if layer in self._seen:  # not all layers run in every pass
            self._summarize()
        if (watched.calls - 1) % self.every:
            return
        for rank, partial in enumerate(partials, first):
            good = partial.isfinite().all()
            rows = torch.where(good, sample(partial, watched.calls // self.every), 0.0)
            error = relative_error(watched.codec.part(rank), rows)
            sums = torch.stack([good.double(), error, 1 - good.double()])
            watched.sums[rank] = watched.sums[rank] + sums if rank in watched.sums else sums
        if not watched.warned:
            self._warn(layer, watched)
        self._seen.add(layer)
        if len(self._seen) == len(self._layers):
            self._summarize()

    def report(self, group: dist.ProcessGroup | None = None) -> "DriftReport":
        """Return the samples of this process; with a group, those of all its ranks, each of which must call this."""
        mine = [row for name, watched in self._layers.items() for row in self._rows(name, watched)]
        if group is not None:
            parts = gather_json([vars(row) for row in mine], group)
            order = {name: i for i, name in enumerate(self._layers)}
            mine = sorted(
                (DriftRow(**row) for part in parts for row in part), key=lambda row: (order[row.layer], row.rank)
            )
        return DriftReport(threshold=self.threshold, rows=tuple(mine))

    def _warn(self, layer: str, watched: _Watched) -> None:
        rows = self._rows(layer, watched)
        if any(row.bad for row in rows):
            watched.warned = True
            if not self._warned_nan:  # later layers only inherit it
                self._warned_nan = True
                row = next(row for row in rows if row.bad)
                _log.warning(
                    "NaN or Inf in the partial sums of %s on rank %d: not a matter of the calibration; the model, its "
                    "inputs or the data type cause it (float16 ends at 65504)", layer, row.rank,
                )  # fmt: skip
        elif drifted := [row for row in rows if row.drifted]:
            watched.warned = True
            self._new.append(max(drifted, key=_growth))

    def _summarize(self) -> None:
        """Warn of the layers that have drifted in the pass that ends."""
        if self._new:
            row = max(self._new, key=_growth)
            _log.warning(
                "the error of coded values has grown in %d of %d layers, most in %s on rank %d: %.1f %%, and %.1f %% "
                "on text that the calibration held out; calibrate on text like this (lowbit calibrate --continue), or "
                "with more bits", len(self._new), len(self._layers), row.layer, row.rank, 100 * row.error,
                100 * row.expected,
            )  # fmt: skip
        self._seen.clear()
        self._new.clear()

    def _rows(self, layer: str, watched: _Watched) -> list[DriftRow]:
        """Wait for the device."""
        rows = []
        for rank, sums in watched.sums.items():
            samples, error, bad = sums.tolist()
            mean, spread = watched.codec.held_out[rank] if watched.codec.held_out else (math.nan, 0.0)
            drifted = False
            if samples:
                error /= samples
                drifted = error - 3 * spread / math.sqrt(samples) > self.threshold * mean
            rows.append(DriftRow(
                layer=layer, rank=rank, samples=int(samples), error=error if samples else math.nan, expected=mean,
                bad=int(bad), drifted=drifted,
            ))  # fmt: skip
        return rows


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """A table of all layers: `str` formats it, `rows` has the values."""

    threshold: float
    rows: tuple[DriftRow, ...]

    @property
    def drifted(self) -> list[str]:
        """Layers whose error is above the calibration's, on any rank."""
        return list(dict.fromkeys(row.layer for row in self.rows if row.drifted))

    def __str__(self) -> str:
        width = max([5, *(len(row.layer) for row in self.rows)])
        lines = [f"{'layer':<{width}}  rank  samples  error  expected"]
        for row in self.rows:
            line = f"{row.layer:<{width}}  {row.rank:>4}  {row.samples:>7}  {row.error:>5.3f}  {row.expected:>8.3f}"
            lines.append(line + "  drifted" * row.drifted + f"  NaN or Inf in {row.bad} calls" * bool(row.bad))
        return "\n".join(lines)
