"""Ranges of partial sums: exponential moving averages of minimum and maximum, by boundary, rank and feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.ranks.objects import gather_json, gather_tensor
from lowbit.tensor_parallel import artifact

_FORMAT = "lowbit-calibration-state"


class Observer:
    """Moving averages over sequences, as Adam averages gradients: started at zero and corrected for that.

    After n sequences the corrected average is sum_i m^(n - i) (1 - m) value_i / (1 - m^n): unlike an average that
    starts with the first value, it does not give the first sequences more weight than the others.

    Args:
        widths: features of each boundary. ranks: of the tensor-parallel model. momentum: m, from 0 to 1 (exclusive).

    Attributes:
        lows, highs: by boundary, float32 (ranks + 1, E), not corrected; the last row is of the sum over the ranks.
        count: sequences seen.
    """

    def __init__(self, widths: Mapping[str, int], *, ranks: int, momentum: float) -> None:
        self.ranks, self.momentum, self.count = ranks, momentum, 0
        self.lows = {name: torch.zeros(ranks + 1, width) for name, width in widths.items()}
        self.highs = {name: torch.zeros(ranks + 1, width) for name, width in widths.items()}
        self._seen: dict[str, dict[int, tuple[Tensor, Tensor]]] = {name: {} for name in widths}

    def see(self, boundary: str, rank: int, x: Tensor) -> None:
        """Take note of a tensor, (batch, sequence, E) or (sequence, E); `rank` is `ranks` for the sum over them.

        Raises:
            ValueError: NaN or infinity.
        """
        x = x.detach().reshape(-1, *x.shape[-2:])
        low, high = x.amin(1).float().cpu(), x.amax(1).float().cpu()
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            wrong = ~(torch.isfinite(low) & torch.isfinite(high))
            feature = int(wrong.any(0).nonzero()[0])
            raise ValueError(
                f"sequence {self.count + int(wrong.any(1).nonzero()[0])} makes feature {feature} of {boundary} "
                f"on rank {rank} NaN or infinite; allowed: finite values"
            )
        self._seen[boundary][rank] = (low, high)

    def commit(self) -> None:
        """The forward pass is over: average what it showed, sequence by sequence.

        Raises:
            ValueError: a boundary that the forward pass did not come through.
        """
        missing = [name for name, seen in self._seen.items() if self.ranks not in seen]
        if missing:
            raise ValueError(
                f"a forward pass did not come through {', '.join(missing)}; allowed: boundaries that every pass uses"
            )
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
        """Complete what this rank has seen by what the others have; to be called by all ranks of a real group.

        Raises:
            CalibrationError: the ranks have other boundaries, or of other widths.
        """
        rank = dist.get_rank(group)
        mine = {name: len(low[0]) for name, low in sorted(self.lows.items())}
        for peer, theirs in enumerate(gather_json(mine, group)):
            if theirs != mine:
                raise artifact.CalibrationError(
                    f"rank {peer} has boundaries with features {theirs}, and rank {rank} {mine}; allowed: the same"
                )
        for averages in (self.lows, self.highs):
            parts = gather_tensor(torch.cat([averages[name][rank] for name in mine]), group)
            for name, part in zip(mine, parts.split(list(mine.values()), dim=1), strict=True):
                averages[name][: self.ranks] = part

    def tensors(self) -> dict[str, Tensor]:
        """All averages, for a file."""
        return join(self.lows, self.highs)

    def take(self, tensors: Mapping[str, Tensor], count: int) -> None:
        """Go on from the averages of an earlier run over `count` sequences."""
        lows, highs = split(tensors)
        for name, low in lows.items():
            self.lows[name].copy_(low)
            self.highs[name].copy_(highs[name])
        self.count = count

    def save(self, path: str | Path, facts: Mapping[str, str]) -> None:
        """Write the averages, atomically, with what they are of."""
        artifact.write(path, self.tensors(), {"format": _FORMAT, "count": str(self.count), **facts})

    def resume(self, path: str | Path, facts: Mapping[str, str]) -> None:
        """Take over what `save` wrote; nothing if there is no such file.

        Raises:
            CalibrationError: the file is cut short, or of other facts.
        """
        if not Path(path).exists():
            return
        tensors, found = artifact.read(path, _FORMAT)
        for key, value in facts.items():
            if found.get(key) != value:
                raise artifact.CalibrationError(
                    f"{path} is the state of a calibration with {key} {found.get(key)!r}; this one has {value!r}"
                )
        self.take(tensors, int(found["count"]))


def corrected(averages: Mapping[str, Tensor], count: int, momentum: float) -> dict[str, Tensor]:
    """Averages of `count` values, corrected for the zero that they started from."""
    weight = 1 - momentum**count
    return {name: average / weight for name, average in averages.items()}


def join(lows: Mapping[str, Tensor], highs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One dictionary for a file."""
    return {f"{name}.low": t for name, t in lows.items()} | {f"{name}.high": t for name, t in highs.items()}


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `join` put together."""

    def ending(end: str, names: Iterable[str]) -> dict[str, Tensor]:
        return {name.removesuffix(end): tensors[name] for name in names if name.endswith(end)}

    return ending(".low", tensors), ending(".high", tensors)
