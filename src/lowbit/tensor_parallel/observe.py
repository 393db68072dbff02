"""Observes partial sums for calibration: moving averages of minimum, maximum and mean, and sampled rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.collectives import agree
from lowbit.wire.messages import gather_tensor

AVERAGES = ("low", "high", "mean")
MOST_ROWS = 128
"""Number of rows that are kept for each layer and rank."""
_PER_SEQUENCE = 32


def sampling(count: int) -> tuple[int, int]:
    """Return the rows to keep per sequence, and n if only every n-th sequence is kept, of `count` sequences."""
    rows, every = _PER_SEQUENCE, 1
    while rows * -(-count // every) > MOST_ROWS:
        rows, every = (rows // 2, every) if rows > 1 else (1, 2 * every)
    return rows, every


class Observer:
    """Moving averages over sequences, started at zero and corrected for that, like Adam's averages of gradients.

    After n sequences the corrected average is sum_i m^(n - i) (1 - m) value_i / (1 - m^n). Unlike an average that
    starts with the first value, it gives the first sequences no more weight than the others.

    Args:
        widths: features of each layer. ranks: of the tensor-parallel model. momentum: m, from 0 to 1 (exclusive).

    Attributes:
        averages: "low", "high" and "mean" by layer, float32 (ranks + 1, E), not corrected; the last row is of the sum
            over the ranks.
        samples: rows by layer, bfloat16 (ranks, sequences, rows, E), spread evenly over the sequences of this run; on
            real ranks those of the other ranks are 0 until `gather`.
        count: number of sequences observed. before: those of earlier runs, whose rows are not available.
    """

    def __init__(self, widths: Mapping[str, int], *, ranks: int, momentum: float) -> None:
        self.ranks, self.momentum, self.count, self.before = ranks, momentum, 0, 0
        self.averages = {
            kind: {name: torch.zeros(ranks + 1, width) for name, width in widths.items()} for kind in AVERAGES
        }
        self.samples = {
            name: torch.zeros(ranks, 0, _PER_SEQUENCE, width, dtype=torch.bfloat16) for name, width in widths.items()
        }
        self._seen: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in widths}

    def see(self, layer: str, rank: int, x: Tensor) -> None:
        """Observe the sums of a rank, or of `ranks` for the total: (..., sequence, E); ValueError for NaN and Inf."""
        x = x.detach().reshape(-1, *x.shape[-2:])
        low, high, mean = x.amin(1).float().cpu(), x.amax(1).float().cpu(), x.mean(1, dtype=torch.float32).cpu()
        wrong = ~(torch.isfinite(low) & torch.isfinite(high))
        if bool(wrong.any()):
            feature = int(wrong.any(0).nonzero()[0])
            raise ValueError(
                f"sequence {self.count + int(wrong.any(1).nonzero()[0])} makes feature {feature} of {layer} "
                f"on rank {rank} NaN or infinite; allowed: finite values"
            )
        seen = {"low": low, "high": high, "mean": mean}
        if rank < self.ranks:
            chosen = torch.arange(_PER_SEQUENCE, device=x.device) * x.shape[1] // _PER_SEQUENCE
            seen["rows"] = x[:, chosen].bfloat16().cpu()
        self._seen[layer][rank] = seen

    def commit(self) -> None:
        """Add the observations of one forward pass, which must have used all layers."""
        if missing := [name for name, seen in self._seen.items() if self.ranks not in seen]:
            raise ValueError(f"a forward pass did not use {', '.join(missing)}; allowed: layers that every pass uses")
        batch = 0
        for name, seen in self._seen.items():
            rows = None
            for rank, values in seen.items():
                batch = len(values["low"])
                for kind in AVERAGES:
                    average = self.averages[kind][name][rank]
                    for i in range(batch):
                        average.mul_(self.momentum).add_(values[kind][i], alpha=1 - self.momentum)
                if rank < self.ranks:
                    rows = values["rows"].new_zeros(self.ranks, *values["rows"].shape) if rows is None else rows
                    rows[rank] = values["rows"]
            assert rows is not None
            self.samples[name] = self._thinned(self.samples[name], rows)
            seen.clear()
        self.count += batch

    def gather(self, group: dist.ProcessGroup) -> None:
        """Complete this rank's averages and rows with those of the others; all ranks of a real group must call this."""
        rank = dist.get_rank(group)
        widths = {name: low.shape[1] for name, low in sorted(self.averages["low"].items())}
        agree(group, {"features of layers": str(widths)}, topic="calibration")
        for averages in self.averages.values():
            parts = gather_tensor(torch.cat([averages[name][rank] for name in widths]), group)
            for name, part in zip(widths, parts.split(list(widths.values()), dim=1), strict=True):
                averages[name][: self.ranks] = part
        for name in widths:
            self.samples[name] = gather_tensor(self.samples[name][rank], group)

    def resume(self, averages: Mapping[str, Mapping[str, Tensor]], count: int) -> None:
        """Continue from the averages of an earlier run over `count` sequences."""
        for kind, by_layer in averages.items():
            for name, average in by_layer.items():
                self.averages[kind][name].copy_(average)
        self.count = self.before = count

    def _thinned(self, kept: Tensor, new: Tensor) -> Tensor:
        """Return rows spread over all sequences, including those of `new`, (ranks, batch, rows, E)."""
        start = self.count - self.before
        stop = start + new.shape[1]
        rows, every = sampling(stop)
        before_rows, before_every = sampling(start)
        kept = kept[:, :: every // before_every, :: before_rows // rows]
        chosen = [i for i in range(new.shape[1]) if (start + i) % every == 0]
        return torch.cat([kept, new[:, chosen, :: _PER_SEQUENCE // rows]], 1)
