"""Ranges of partial sums: exponential moving averages of minimum and maximum, by layer, rank and feature."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.ranks.objects import gather_json, gather_tensor
from lowbit.tensor_parallel import files

_FORMAT = "lowbit-calibration-state"


class Observer:
    """Moving averages over sequences, started at zero and corrected for that, like Adam's averages of gradients.

    After n sequences the corrected average is sum_i m^(n - i) (1 - m) value_i / (1 - m^n). Unlike an average that
    starts with the first value, it gives the first sequences no more weight than the others.

    Args:
        widths: features of each layer. ranks: of the tensor-parallel model. momentum: m, from 0 to 1 (exclusive).

    Attributes:
        lows, highs: by layer, float32 (ranks + 1, E), not corrected; the last row is of the sum over the ranks.
        count: sequences seen.
    """

    def __init__(self, widths: Mapping[str, int], *, ranks: int, momentum: float) -> None:
        self.ranks, self.momentum, self.count = ranks, momentum, 0
        self.lows = {name: torch.zeros(ranks + 1, width) for name, width in widths.items()}
        self.highs = {name: torch.zeros(ranks + 1, width) for name, width in widths.items()}
        self._seen: dict[str, dict[int, tuple[Tensor, Tensor]]] = {name: {} for name in widths}

    def see(self, layer: str, rank: int, x: Tensor) -> None:
        """Note the extremes of a rank's partial sums, (batch, sequence, E) or (sequence, E); ValueError for NaN or Inf.

        `rank` is `ranks` for their sum.
        """
        x = x.detach().reshape(-1, *x.shape[-2:])
        low, high = x.amin(1).float().cpu(), x.amax(1).float().cpu()
        wrong = ~(torch.isfinite(low) & torch.isfinite(high))
        if bool(wrong.any()):
            feature = int(wrong.any(0).nonzero()[0])
            raise ValueError(
                f"sequence {self.count + int(wrong.any(1).nonzero()[0])} makes feature {feature} of {layer} "
                f"on rank {rank} NaN or infinite; allowed: finite values"
            )
        self._seen[layer][rank] = (low, high)

    def commit(self) -> None:
        """Add the extremes of one forward pass, which must have used all layers, to the averages."""
        if missing := [name for name, seen in self._seen.items() if self.ranks not in seen]:
            raise ValueError(f"a forward pass did not use {', '.join(missing)}; allowed: layers that every pass uses")
        batch = 0
        for name, seen in self._seen.items():
            for rank, (low, high) in seen.items():
                batch = len(low)
                for i in range(batch):
                    self.lows[name][rank].mul_(self.momentum).add_(low[i], alpha=1 - self.momentum)
                    self.highs[name][rank].mul_(self.momentum).add_(high[i], alpha=1 - self.momentum)
            seen.clear()
        self.count += batch

    def gather(self, group: dist.ProcessGroup) -> None:
        """Complete this rank's averages by those of the others; to be called by all ranks of a real group.

        Raises:
            CalibrationError: the ranks have other layers, or of other widths.
        """
        rank = dist.get_rank(group)
        mine = {name: len(low[0]) for name, low in sorted(self.lows.items())}
        for peer, theirs in enumerate(gather_json(mine, group)):
            if theirs != mine:
                raise files.CalibrationError(
                    f"rank {peer} has layers with features {theirs}, and rank {rank} {mine}; allowed: the same"
                )
        for averages in (self.lows, self.highs):
            parts = gather_tensor(torch.cat([averages[name][rank] for name in mine]), group)
            for name, part in zip(mine, parts.split(list(mine.values()), dim=1), strict=True):
                averages[name][: self.ranks] = part

    def resume(self, lows: Mapping[str, Tensor], highs: Mapping[str, Tensor], count: int) -> None:
        """Go on from the averages of an earlier run over `count` sequences."""
        for name, low in lows.items():
            self.lows[name].copy_(low)
            self.highs[name].copy_(highs[name])
        self.count = count

    def save(self, path: str | Path, facts: Mapping[str, str]) -> None:
        """Write the averages atomically, with facts about the calibration."""
        files.write(path, self.lows, self.highs, {"format": _FORMAT, "count": str(self.count), **facts})

    def load(self, path: str | Path, facts: Mapping[str, str]) -> None:
        """Resume from a file that `save` wrote; if there is none, do nothing.

        Raises:
            CalibrationError: the file is cut short, or has other facts.
        """
        if not Path(path).exists():
            return
        lows, highs, metadata = files.read(path, _FORMAT)
        for key, value in facts.items():
            if metadata.get(key) != value:
                raise files.CalibrationError(
                    f"{path} is the state of a calibration with {key} {metadata.get(key)!r}; this one has {value!r}"
                )
        self.resume(lows, highs, int(metadata["count"]))
