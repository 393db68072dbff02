"""Resuming from a checkpoint in any layout: who reads what, who sends it to whom, and what starts empty.

Parameters and AdamW's moments are found by their name in the whole model. A rank takes the generators of the rank that
had its number. What a boundary remembers goes to the boundary after the same layer, if the format is the same and both
its ends can have it from the same pipeline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import parse
from lowbit.ranks.objects import gather_json
from lowbit.train import state
from lowbit.train.checkpoint import (
    NO_CHECKPOINT,
    About,
    Checkpoints,
    TransientError,
    fail_together,
    same_everywhere,
    together,
)
from lowbit.train.config import RunConfig
from lowbit.train.identity import NOT_RECORDED, Change, changes_between, refuse
from lowbit.train.manifest import step_name
from lowbit.train.search import Found, Search
from lowbit.train.share import DTYPES, Reader, crc32
from lowbit.train.stages import Pipeline
from lowbit.train.state import End

log = logging.getLogger(__name__)

Item = tuple[int, str]
"""A tensor in a checkpoint: the rank that wrote the share, and the name there."""

_PIECE_BYTES = 8 << 20  # of a tensor that travels
_OVER = object()


def take_up(
    checkpoints: Checkpoints,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    about: About,
    *,
    replica: int,
    run: RunConfig,
    group: dist.ProcessGroup | None,
) -> tuple[int, list[dict[str, Any]]]:
    """Restore the newest intact step; to be called by all ranks at once.

    Args:
        about: this run. replica: number of this rank's pipeline. run: whether there must be a checkpoint, and which
            keys may have changed since.

    Returns:
        Steps done, 0 if no rank has any checkpoint; and what has changed since the run began, oldest first.

    Raises:
        CheckpointError: none is intact, or this run differs in what it must not; the same on every rank.
    """
    found = Search(checkpoints.folder, group).newest()
    if found is None:
        if run.resume is True:
            fail_together(NO_CHECKPOINT.format(checkpoints.folder), group)
        if checkpoints.rank == 0:
            log.warning("no checkpoint in %s: starting with step 0", checkpoints.folder)
        return 0, []
    where = f"checkpoint {checkpoints.folder / step_name(found.step)}"
    changes = _compare(found, about, where, checkpoints.rank, run.allow_change, group)
    plan = _Plan(found, pipeline, rank=checkpoints.rank, replica=replica)
    same_everywhere(f"{where}: {plan.problem}" if plan.problem else "", group)
    tensors = _Exchange(found, checkpoints.folder, checkpoints.rank, group).run(plan.items)
    restored = {name: tensors[item] for name, item in plan.tensors.items()}
    for name in restored.keys() & plan.copies:  # which the optimizer changes in place
        restored[name] = restored[name].clone()
    problem = ""
    try:
        state.restore(pipeline, optimizer, restored, plan.lanes(tensors), steps=found.step)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{where} cannot be taken up: {type(error).__name__}: {error}"
    same_everywhere(problem, group)
    if checkpoints.rank == 0 and plan.fresh:
        log.warning("%s: what codecs remember begins afresh at %s", where, ", ".join(plan.fresh))
    return found.step, [*found.first.changes, *(change.at(found.step) for change in changes)]


def _compare(
    found: Found,
    about: About,
    where: str,
    rank: int,
    allowed: tuple[str, ...],
    group: dist.ProcessGroup | None,
) -> list[Change]:
    """What differs between the run that wrote a step and this one, if that is allowed."""
    written = found.shares.get(rank, found.first)
    changes = changes_between(written.identity, about.identity, step=found.step)
    same_everywhere(refuse(where, changes, allowed), group)
    layout = {k: v for k, v in about.layout.items() if k.startswith("pipeline.")}
    moved = [Change(k, written.layout[k], v) for k, v in layout.items() if written.layout[k] != v]
    newer = [Change(k, written.versions.get(k, NOT_RECORDED), v) for k, v in about.versions.items()]
    everything = [*changes, *moved, *(change for change in newer if change.before != change.after)]
    if rank == 0:
        for change in everything:
            log.warning("%s: %s", where, change)
    return everything


class _Plan:
    """What one rank takes from a checkpoint.

    Attributes:
        tensors: by the names that `state.restore` wants; copies: those that another name has, too.
        items: all of these and those of codecs, in a fixed order.
        fresh: boundaries of the whole pipeline whose codecs begin afresh. problem: what is missing; empty: nothing.
    """

    def __init__(self, found: Found, pipeline: Pipeline, *, rank: int, replica: int) -> None:
        self._found, self._pipeline, self._rank, self._replica = found, pipeline, rank, replica
        self.tensors: dict[str, Item] = {}
        self.problem = ""
        self._lanes: dict[str, _Memory] = {}
        self._sources = _remembered(found)
        self._take_parameters()
        self._take_generators()
        self.fresh = list(dict.fromkeys(self._take_codecs()))
        codecs = [item for memory in self._lanes.values() for item in memory.items.values()]
        self.items = sorted({*self.tensors.values(), *codecs})
        first = {item: name for name, item in reversed(self.tensors.items())}
        self.copies = {name for name, item in self.tensors.items() if first[item] != name}

    def lanes(self, tensors: Mapping[Item, Tensor]) -> dict[str, dict[str, Any]]:
        """What `state.restore` wants for boundaries."""
        return {
            name: state.unflatten(memory.values | {p: tensors[i] for p, i in memory.items.items()})
            for name, memory in self._lanes.items()
        }

    def _take_parameters(self) -> None:
        aliases = {k: v for m in self._pipeline.modules.values() for k, v in m.aliases.items()}
        for name, parameter in state.parameters_of(self._pipeline).items():
            known = name if self._share_with(name) is not None else aliases.get(name, name)
            share = self._share_with(known)
            if share is None:
                self.problem = self.problem or f"no share has the parameter {name}"
                continue
            manifest = self._found.shares[share]
            entry = manifest.tensors[f"model/{known}"]
            if (DTYPES[entry["dtype"]], entry["shape"]) != (parameter.dtype, list(parameter.shape)):
                self.problem = self.problem or (
                    f"parameter {name} is {entry['dtype']} {entry['shape']}; "
                    f"the model has {parameter.dtype} {list(parameter.shape)}"
                )
            self.tensors[f"model/{name}"] = share, f"model/{known}"
            prefix = f"optimizer/{known}/"
            for moment in (n for n in manifest.tensors if n.startswith(prefix)):
                key = moment.removeprefix(prefix)
                if manifest.tensors[moment]["shape"] not in ([], entry["shape"]):
                    self.problem = self.problem or f"{moment} has not the shape of its parameter"
                self.tensors[f"optimizer/{name}/{key}"] = share, moment

    def _share_with(self, name: str) -> int | None:
        """A share that has a parameter: of this rank's number, on its own disk, or any."""
        having = [r for r, m in self._found.shares.items() if f"model/{name}" in m.tensors]
        order = lambda r: (r != self._rank, self._found.holders[r] != self._rank, r)  # noqa: E731
        return min(having, key=order, default=None)

    def _take_generators(self) -> None:
        share = self._found.shares.get(self._rank)
        if share is not None:
            random = [name for name in share.tensors if name.startswith("random/")]
            self.tensors |= {name: (self._rank, name) for name in random}

    def _take_codecs(self) -> Iterator[str]:
        """Find memories for this rank's lanes; names the boundaries of the whole pipeline where there is none."""
        pipeline = self._pipeline
        if pipeline.config.pipeline.boundary != "lowbit":
            return
        for stage in range(pipeline.plan.stages):
            for lane, end, codec in state.ends_of(pipeline.plan, pipeline.codecs, stage):
                memory = self._memory_for(end, codec)
                if stage in pipeline.modules and memory is not None:
                    self._lanes[lane] = memory
                if not self._crosses(lane) or self._in_warm_up:
                    continue
                if not parse(codec).settled and (memory is None or not memory.has_choice):
                    self.problem = self.problem or (
                        f"it tells nothing of what {codec} chose in the warm-up, which {lane} (after layer "
                        f"{end.after_layer}) needs; allowed: a format that is settled, with "
                        f"--allow-change pipeline.{end.direction}"
                    )
                elif parse(codec).stateful and (memory is None or not memory.whole):
                    yield lane

    @property
    def _in_warm_up(self) -> bool:
        return self._found.step < self._pipeline.config.codec_warmup_steps

    def _crosses(self, lane: str) -> bool:
        return self._pipeline.plan.crosses(int(lane.split()[1]))

    def _memory_for(self, end: End, codec: str) -> _Memory | None:
        """What a lane is to begin with: the memory of its place, or the choice of the nearest place that made one."""
        replicas = sorted(self._sources, key=lambda r: (r != self._replica % len(self._sources), r))
        for replica in replicas:
            known = self._sources[replica]
            if end in known and end.other in known and self._fits(known[end], codec):
                return known[end]
        if parse(codec).settled:
            return None
        near = [
            (abs(other.after_layer - end.after_layer), other.after_layer, replica, memory)
            for replica, known in self._sources.items()
            for other, memory in known.items()
            if other.direction == end.direction and memory.has_choice and _same(memory.codec, codec)
        ]
        return min(near, key=lambda each: each[:3])[-1].choice_only() if near else None

    def _fits(self, memory: _Memory, codec: str) -> bool:
        """Whether a codec here can use it: the same format and, unless shapes share a memory, the same shape."""
        if not _same(memory.codec, codec):
            return False
        config, first = self._pipeline.config, self._found.first
        shape = (config.rows, config.data.sequence, 1)
        alike = (first.layout["rows"], first.identity.get("data.sequence")) == shape[:2]
        return alike or parse(codec).shared_by(shape) is not None


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What an end of a boundary remembered. values: what is no tensor; items: the tensors; both by path."""

    codec: str
    values: dict[str, Any]
    items: dict[str, Item]
    whole: bool = True

    @property
    def has_choice(self) -> bool:
        return any(path.endswith("/choice") for path in self.values)

    def choice_only(self) -> _Memory:
        """Without what belongs to the place."""
        choices = {path: v for path, v in self.values.items() if path.endswith("/choice")}
        return _Memory(codec=self.codec, values=choices, items={}, whole=False)


def _remembered(found: Found) -> dict[int, dict[End, _Memory]]:
    """What ends of boundaries remember, by pipeline."""
    places = found.first.layout["pipeline.ranks"]
    known: dict[int, dict[End, _Memory]] = {}
    for rank, manifest in found.shares.items():
        of_pipeline = known.setdefault(rank // places, {})
        for unit in manifest.codecs:
            end = End.of(unit)
            items = {
                name.removeprefix(end.prefix): (rank, name) for name in manifest.tensors if name.startswith(end.prefix)
            }
            of_pipeline[end] = _Memory(codec=unit["codec"], values=unit["values"], items=items)
    return known


def _same(one: str, other: str) -> bool:
    try:
        return parse(one) == parse(other)
    except (TypeError, ValueError, RecursionError):
        return False


class _Exchange:
    """Tensors on the CPU, from this disk or from the rank that has the share.

    All ranks go through all transfers in the same order, a piece to each receiver in turn: so none waits for one that
    waits for it, nor for longer than a piece of everybody takes. All together may take longer than the time limit.
    """

    def __init__(self, found: Found, folder: Path, rank: int, group: dist.ProcessGroup | None) -> None:
        self._found, self._rank, self._group = found, rank, group
        self._step = folder / step_name(found.step)
        own = [share for share, holder in found.holders.items() if holder == rank]
        self._readers = {share: Reader(self._step / f"rank-{share}") for share in own}
        self._got: dict[Item, Tensor] = {}
        self._problem = ""

    def run(self, wanted: list[Item]) -> dict[Item, Tensor]:
        """What this rank wants; to be called by all ranks at once.

        Raises:
            TransientError: what arrived is not what was written; the same on every rank.
        """
        everybody = gather_json(wanted, self._group)
        together(partial(self._transfer, everybody), self._group)
        same_everywhere(self._problem, self._group, TransientError)
        return self._got

    def _transfer(self, everybody: list[list[Item]]) -> None:
        under_way = [self._pieces(receiver, items) for receiver, items in enumerate(everybody)]
        while under_way:
            under_way = [pieces for pieces in under_way if next(pieces, _OVER) is not _OVER]

    def _pieces(self, receiver: int, items: list[Item]) -> Iterator[None]:
        """Hand a rank its tensors, as far as this rank has a part in that; stops after each piece."""
        for share, name in items:
            holder, entry = self._found.holders[share], self._found.shares[share].tensors[name]
            dtype, here = DTYPES[entry["dtype"]], self._rank in (receiver, holder)
            tensor = torch.empty(entry["shape"] if here else 0, dtype=dtype)
            if self._rank == holder:
                tensor = self._readers[share](name)
            if holder != receiver:
                size = math.prod(entry["shape"]) * dtype.itemsize
                for start in range(0, size, _PIECE_BYTES):
                    self._pass_on(tensor, start, holder, receiver)
                    yield
            if self._rank == receiver:
                self._got[share, name] = tensor
                if holder != receiver and crc32(tensor) != entry["crc32"]:
                    where = f"{name} of {self._step.name}/rank-{share}"
                    self._problem = f"{where} arrived from rank {holder} with other bytes"

    def _pass_on(self, tensor: Tensor, start: int, holder: int, receiver: int) -> None:
        piece = tensor.view(-1).view(torch.uint8)[start : start + _PIECE_BYTES]
        if self._rank == holder:
            dist.send(piece, group=self._group, group_dst=receiver)
        elif self._rank == receiver:
            dist.recv(piece, group=self._group, group_src=holder)
