"""Find the step to resume from: the newest of which the ranks together have all shares intact, on any disks."""

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowbit import escape
from lowbit.wire.messages import gather_json
from lowbit_run.train.checkpoints.manifest import (
    DamagedShareError,
    Manifest,
    read_manifest,
    shares_in,
    step_name,
    steps_in,
)  # fmt: skip
from lowbit_run.train.checkpoints.save import commit_share, raise_everywhere, together, verify_share

log = escape.logger(__name__)

_NAMED = 4  # missing shares that a message names; it counts the rest


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A step to resume from.

    Attributes:
        step: steps done. shares: manifests by the rank that wrote them; every byte was verified.
        holders: for each share, the rank of this run that has it on its disk and has read it.
    """

    step: int
    shares: dict[int, Manifest]
    holders: dict[int, int]

    @property
    def first(self) -> Manifest:
        """The manifest of the lowest rank, for the fields that all share."""
        return self.shares[min(self.shares)]

    @property
    def complete(self) -> bool:
        """Whether no share is missing."""
        return bool(self.shares) and len(self.shares) == self.first.ranks

    @property
    def sufficient(self) -> bool:
        """Whether the shares hold the whole model; of several pipelines with equal weights, one suffices."""
        places = self.first.layout["pipeline.ranks"] if self.shares else 1
        return {rank % places for rank in self.shares} == set(range(places))


class Search:
    """Searches the disks of all ranks; every rank makes and uses one. The folder need not exist."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        self._folder, self._group, self._rank = folder, group, dist.get_rank(group)
        self._reasons: dict[int, dict[str, str]] = {}  # kinds of damage, by step, then by share
        self._ranks: dict[tuple[int, str], int] = {}  # number that wrote a step, by step and attempt
        self._holders: dict[tuple[int, str], dict[int, list[int]]] = {}  # by step and attempt, then by share
        self._verified: dict[tuple[int, str], SavedStep] = {}
        _commit_remaining(folder, group)
        for holder, inventory in enumerate(gather_json(_inventory(folder), group)):
            for step, rank, share in inventory:
                if "reason" in share:
                    self._reasons.setdefault(step, {})[f"rank-{rank}"] = share["reason"]
                    continue
                key = step, share["attempt"]
                self._ranks[key] = share["ranks"]
                self._holders.setdefault(key, {}).setdefault(rank, []).append(holder)

    def newest(self) -> SavedStep | None:
        """Return the newest intact step; None if no rank has any step, intact or not.

        A step with all shares is intact. If there is none, so is one with the whole model that lacks some pipelines.
        Rank 0 logs a line for each step that is skipped.
        """
        if not self._holders and not self._reasons:
            return None
        newest_first = sorted(self._holders, reverse=True)
        whole = [key for key in newest_first if len(self._holders[key]) == self._ranks[key]]
        saved = next((saved for saved in map(self._verify, whole) if saved.complete), None)
        saved = saved or next((saved for saved in map(self._verify, newest_first) if saved.sufficient), None)
        steps = sorted({step for step, _ in self._holders} | self._reasons.keys(), reverse=True)
        if saved is None:
            reasons = "; ".join(f"{step_name(step)}: {self._why(step)}" for step in steps)
            raise_everywhere(
                f"no checkpoint in {self._folder} is intact: {reasons}; "
                "allowed: one of which every share is on the disk of some rank",
                self._group,
            )
        elif self._rank == 0:
            for step in (step for step in steps if step > saved.step):
                log.warning("checkpoint %s is skipped: %s", self._folder / step_name(step), self._why(step))
            if not saved.complete:
                path = self._folder / step_name(saved.step)
                log.warning("checkpoint %s: %s; the whole model is in the others", path, self._why(saved.step))
        return saved

    def _verify(self, key: tuple[int, str]) -> SavedStep:
        """Let ranks read every share of a step; if a copy is damaged, the next rank with a copy reads its own."""
        if key in self._verified:
            return self._verified[key]
        step, ranks = key[0], dist.get_world_size(self._group)
        shares, holders = dict[int, Manifest](), dict[int, int]()
        # The rank that wrote a share reads it if its disk has it; otherwise ranks take turns.
        waiting = {
            rank: sorted(having, key=lambda holder, rank=rank: (holder - rank) % ranks)
            for rank, having in self._holders[key].items()
        }
        while waiting := {rank: having for rank, having in waiting.items() if having}:
            turns = {rank: having.pop(0) for rank, having in waiting.items()}
            to_read = [rank for rank, holder in turns.items() if holder == self._rank]
            for rank, outcome in chain.from_iterable(together(partial(self._read, step, to_read), self._group)):
                if isinstance(outcome, str):
                    self._reasons.setdefault(step, {})[f"rank-{rank}"] = outcome
                else:
                    shares[rank], holders[rank] = Manifest.from_values(outcome), turns[rank]
                    del waiting[rank]
        self._verified[key] = SavedStep(step=step, shares=dict(sorted(shares.items())), holders=holders)
        return self._verified[key]

    def _read(self, step: int, ranks: list[int]) -> list[tuple[int, Any]]:
        """Verify these ranks' shares on this disk; return manifests, or what is damaged in words."""
        outcomes: list[tuple[int, Any]] = []
        for rank in ranks:
            try:
                manifest = verify_share(self._folder / step_name(step) / f"rank-{rank}")
                outcomes.append((rank, dataclasses.asdict(manifest)))
            except DamagedShareError as error:
                outcomes.append((rank, str(error)))
        return outcomes

    def _why(self, step: int) -> str:
        damaged = self._reasons.get(step, {})
        reasons = [f"{share} {reason}" for share, reason in sorted(damaged.items())]
        for key, holders in ((key, holders) for key, holders in self._holders.items() if key[0] == step):
            absent = [r for r in range(self._ranks[key]) if r not in holders and f"rank-{r}" not in damaged]
            reasons += [f"rank-{rank} is on no rank's disk" for rank in absent[:_NAMED]]
            if more := absent[_NAMED:]:
                reasons.append(f"{len(more)} more up to rank-{more[-1]} are on no rank's disk")
        return ", ".join(reasons)


def _commit_remaining(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Move the remaining shares of a step into place, if a crash came after the first was moved."""
    attempts = [(step, share["attempt"]) for step, _, share in _inventory(folder) if "attempt" in share]
    begun = {tuple(key) for keys in gather_json(attempts, group) for key in keys}
    left = [(step, path) for step, path in steps_in(folder).items() if shares_in(path, staged=True)]
    # Ranks take turns: on a shared disk, one could remove what another has just moved.
    for turn in [turn for turn, some in enumerate(gather_json(bool(left), group)) if some]:
        for step, path in left if turn == dist.get_rank(group) else ():
            for rank, share in shares_in(path, staged=True).items():
                with contextlib.suppress(DamagedShareError, OSError):
                    if (step, read_manifest(share).attempt) in begun:
                        commit_share(path / f"rank-{rank}")
        gather_json(None, group)


def _inventory(folder: Path) -> list[tuple[int, int, dict[str, Any]]]:
    """List step, rank and a few facts of every share on this disk."""
    inventory: list[tuple[int, int, dict[str, Any]]] = []
    for step, path in steps_in(folder).items():
        for rank, share in shares_in(path).items():
            try:
                facts = {"attempt": (manifest := read_manifest(share)).attempt, "ranks": manifest.ranks}
            except DamagedShareError as error:
                facts = {"reason": str(error)}
            inventory.append((step, rank, facts))
    return inventory
