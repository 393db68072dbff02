"""Which step to go on from: the newest that all ranks together have intact, wherever its shares lie."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowbit.ranks.objects import gather_json
from lowbit.train.checkpoint import as_values, fail_together, together
from lowbit.train.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    read_manifest,
    read_manifest_bytes,
    shares_in,
    staged_in,
    step_name,
    steps_in,
)
from lowbit.train.plan import parameters_at
from lowbit.train.share import commit_share, verify_share

log = logging.getLogger(__name__)

_NAMED = 4  # shares that are missing; of more, the number is told


@dataclass(frozen=True, kw_only=True)
class Found:
    """A step to go on from.

    Attributes:
        step: steps done. shares: manifests by the rank that wrote them; each was verified to the last byte.
        holders: for each of them, the rank of this run that has it on its disk and has read it.
    """

    step: int
    shares: dict[int, Manifest]
    holders: dict[int, int]

    @property
    def first(self) -> Manifest:
        """That of the lowest rank, for what all have in common."""
        return self.shares[min(self.shares)]

    @property
    def complete(self) -> bool:
        """Whether no share is missing; of several pipelines with equal weights, one suffices to go on."""
        return bool(self.shares) and len(self.shares) == self.first.ranks


@dataclass(frozen=True)
class _Copy:
    """A share as one rank sees it."""

    holder: int
    where: str  # the same text means the same bytes on the same disk


class Search:
    """Looks through the disks of all ranks; to be made and used on each of them at once.

    Args:
        folder: of checkpoints on this rank's disk; it need not exist.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        self._folder, self._group = folder, group
        self._rank = dist.get_rank(group)
        self._reasons: dict[int, dict[str, str]] = {}  # by step, then by share
        self._ranks: dict[tuple[int, str], int] = {}  # that wrote a step, by step and attempt
        self._copies: dict[tuple[int, str], dict[int, list[_Copy]]] = {}
        self._verified: dict[tuple[int, str], Found] = {}
        _finish(folder, group)
        for holder, told in enumerate(gather_json(_inventory(folder), group)):
            for step, rank, share in told:
                self._take_note(holder, step, rank, share)

    def newest(self) -> Found | None:
        """The newest intact step; None if no rank has any step, intact or not.

        That is one with all shares. Where there is none, one with at least the whole model: of several pipelines, all
        ranks of which are gone but one's. Steps that are skipped are told in a line each, on rank 0.

        Raises:
            CheckpointError: there are steps, and none is intact.
        """
        if not self._copies and not self._reasons:
            return None
        for key in self._newest_first():
            if len(self._copies[key]) == self._ranks[key] and (found := self._verify(key)).complete:
                return self._tell(found)
        for key in self._newest_first():
            found = self._verify(key)
            if found.shares and not self._uncovered(key, found):
                return self._tell(found)
        steps = sorted({step for step, _ in self._copies} | self._reasons.keys(), reverse=True)
        reasons = "; ".join(f"{step_name(step)}: {self._why(step)}" for step in steps)
        fail_together(
            f"no checkpoint in {self._folder} is intact: {reasons}; "
            "allowed: one of which every share is on the disk of some rank",
            self._group,
        )

    def _take_note(self, holder: int, step: int, rank: int, share: dict[str, Any]) -> None:
        if "reason" in share:
            self._reasons.setdefault(step, {})[f"rank-{rank}"] = share["reason"]
            return
        key = step, share["attempt"]
        self._ranks[key] = share["ranks"]
        self._copies.setdefault(key, {}).setdefault(rank, []).append(_Copy(holder, share["where"]))

    def _newest_first(self) -> Iterator[tuple[int, str]]:
        yield from sorted(self._copies, reverse=True)

    def _verify(self, key: tuple[int, str]) -> Found:
        """Have every share of a step read by a rank that sees it; if it is damaged there, by one with another copy."""
        if key in self._verified:
            return self._verified[key]
        shares: dict[int, Manifest] = {}
        holders: dict[int, int] = {}
        waiting = {rank: self._by_preference(rank, copies) for rank, copies in self._copies[key].items()}
        while any(waiting.values()):
            chosen = {rank: copies[0] for rank, copies in waiting.items() if copies}
            waiting = {
                rank: [c for c in copies[1:] if c.where != chosen[rank].where]
                for rank, copies in waiting.items()
                if copies
            }
            mine = [rank for rank, copy in chosen.items() if copy.holder == self._rank]
            for outcomes in together(lambda mine=mine: self._read(key[0], mine), self._group):
                for rank, outcome in outcomes:
                    if isinstance(outcome, str):
                        self._reasons.setdefault(key[0], {})[f"rank-{rank}"] = outcome
                    else:
                        shares[rank] = Manifest.from_values(outcome)
                        holders[rank] = chosen[rank].holder
                        waiting.pop(rank, None)
        self._verified[key] = Found(step=key[0], shares=dict(sorted(shares.items())), holders=holders)
        return self._verified[key]

    def _read(self, step: int, ranks: list[int]) -> list[tuple[int, Any]]:
        """Manifests of these ranks' shares on this disk, or what is wrong with them."""
        found: list[tuple[int, Any]] = []
        for rank in ranks:
            try:
                share = self._folder / step_name(step) / f"rank-{rank}"
                found.append((rank, as_values(verify_share(share))))
            except DamagedError as error:
                found.append((rank, str(error)))
        return found

    def _by_preference(self, rank: int, copies: list[_Copy]) -> list[_Copy]:
        """First the rank that wrote it, if it sees it; else they take turns."""
        ranks = dist.get_world_size(self._group)
        return sorted(copies, key=lambda copy: (copy.holder - rank) % ranks)

    def _uncovered(self, key: tuple[int, str], found: Found) -> list[int]:
        """Places in a pipeline whose part of the model is in no share."""
        places = found.first.layout["pipeline.ranks"]
        return sorted(set(range(places)) - {rank % places for rank in found.shares})

    def _tell(self, found: Found) -> Found:
        """Say, on one rank, what was passed over."""
        if self._rank == 0:
            steps = {step for step, _ in self._copies} | self._reasons.keys()
            for step in sorted((s for s in steps if s > found.step), reverse=True):
                log.warning("checkpoint %s is skipped: %s", self._folder / step_name(step), self._why(step))
            if not found.complete:
                log.warning(
                    "checkpoint %s: %s; the whole model is in the others",
                    self._folder / step_name(found.step), self._why(found.step),
                )  # fmt: skip
        return found

    def _why(self, step: int) -> str:
        """What keeps a step from being intact."""
        reasons = [f"{share} {reason}" for share, reason in sorted(self._reasons.get(step, {}).items())]
        for key, found in ((k, v) for k, v in self._copies.items() if k[0] == step):
            absent = sorted(set(range(self._ranks[key])) - found.keys())
            told = self._reasons.get(step, {})
            absent = [rank for rank in absent if f"rank-{rank}" not in told]
            for rank in absent[:_NAMED]:
                reasons.append(f"rank-{rank}{self._layers_of(key, rank)} is on no rank's disk")
            if more := absent[_NAMED:]:
                reasons.append(f"{len(more)} more up to rank-{more[-1]} are on no rank's disk")
        return ", ".join(reasons)

    def _layers_of(self, key: tuple[int, str], rank: int) -> str:
        found = self._verified.get(key)
        if found is None or not found.shares:
            return ""
        return f" ({parameters_at(found.first.layout, rank)})"


def _finish(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Put the remaining shares of a step in their places, where a crash came when some were there already."""
    there = [(step, share["attempt"]) for step, _, share in _inventory(folder) if "attempt" in share]
    begun = {tuple(key) for told in gather_json(there, group) for key in told}
    for step, path in steps_in(folder).items():
        for rank, share in staged_in(path).items():
            with contextlib.suppress(DamagedError, OSError):  # or another rank was faster
                if (step, read_manifest(share).attempt) in begun:
                    commit_share(path / f"rank-{rank}")
    gather_json(None, group)  # on a common disk all wait for all


def _inventory(folder: Path) -> list[tuple[int, int, dict[str, Any]]]:
    """Step, rank and a few facts of every share on this disk."""
    found = []
    for step, path in steps_in(folder).items():
        for rank, share in shares_in(path).items():
            try:
                manifest = read_manifest(share)
                told = {
                    "attempt": manifest.attempt,
                    "ranks": manifest.ranks,
                    "where": _where(share),
                }
            except (DamagedError, OSError) as error:
                told = {"reason": str(error)}
            found.append((step, rank, told))
    return found


def _where(share: Path) -> str:
    """What is the same for two ranks only if they see the same bytes on the same disk."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else f"{os.uname().nodename} {os.getpid()}"
    status = (share / MANIFEST).stat()
    digest = hashlib.sha256(read_manifest_bytes(share)).hexdigest()
    return f"{machine} {status.st_dev} {status.st_ino} {digest}"
