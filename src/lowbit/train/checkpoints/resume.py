"""Resuming from a checkpoint in any layout: which rank takes which tensors from where, and which codecs start afresh.

Parameters and AdamW's moments are found by their name in the whole model. A rank takes the generators of the rank that
had its number. A codec takes the state of the boundary after the same layer, if the format is the same and both ends of
the boundary can take it from the same pipeline.
"""

from __future__ import annotations

import dataclasses
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

from lowbit.codecs import StatefulCodec, parse
from lowbit.ranks.objects import gather_json
from lowbit.train.checkpoints.manifest import Manifest, step_name
from lowbit.train.checkpoints.save import NO_CHECKPOINT, Checkpoints, TransientError, raise_everywhere, together
from lowbit.train.checkpoints.search import Found, Search
from lowbit.train.checkpoints.share import DTYPES, Reader, crc32
from lowbit.train.checkpoints.state import End, aliases_of, ends_of, parameters_of, restore
from lowbit.train.config import RunConfig
from lowbit.train.identity import NOT_RECORDED, Change, changes_between, refuse
from lowbit.train.stages import Pipeline

log = logging.getLogger(__name__)

Item = tuple[int, str]
"""A tensor in a checkpoint: the rank that wrote the share, and the name there."""

_PIECE_BYTES = 8 << 20  # of a tensor that is sent
_OVER = object()


def resume(
    checkpoints: Checkpoints,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    now: Manifest,
    *,
    replica: int,
    run: RunConfig,
    group: dist.ProcessGroup | None,
) -> tuple[int, list[dict[str, Any]]]:
    """Restore the newest intact step; to be called on every rank.

    Args:
        now: the manifest of this run. replica: number of this rank's pipeline.
        run: whether there must be a checkpoint, and which keys may have changed since.

    Returns:
        Steps done, 0 if no rank has any checkpoint; and all changes since the run began, oldest first.

    Raises:
        CheckpointError: none is intact, or this run differs in a key that may not change; the same on every rank.
    """
    rank, folder = checkpoints.rank, checkpoints.folder
    found = Search(folder, group).newest()
    if found is None:
        raise_everywhere(NO_CHECKPOINT.format(folder) if run.resume is True else "", group)
        if rank == 0:
            log.warning("no checkpoint in %s: starting with step 0", folder)
        return 0, []
    where = f"checkpoint {folder / step_name(found.step)}"
    changes = _compare(found, now, where, rank, run.allow_change, group)
    sources = _Sources(found, pipeline, rank=rank, replica=replica)
    raise_everywhere(f"{where}: {sources.problem}" if sources.problem else "", group)
    received = _Exchange(found, folder, rank, group).run(sources.items)
    tensors = {name: received[item] for name, item in sources.tensors.items()}
    for name in tensors.keys() & sources.copies:  # which the optimizer changes in place
        tensors[name] = tensors[name].clone()
    problem = ""
    try:
        restore(pipeline, optimizer, tensors, sources.lanes(received), steps=found.step)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{where} cannot be taken up: {type(error).__name__}: {error}"
    raise_everywhere(problem, group)
    if rank == 0 and sources.fresh:
        log.warning("%s: what codecs remember begins afresh at %s", where, ", ".join(sources.fresh))
    return found.step, [*found.first.changes, *(change.at(found.step) for change in changes)]


def _compare(
    found: Found, now: Manifest, where: str, rank: int, allowed: tuple[str, ...], group: dist.ProcessGroup | None
) -> list[Change]:
    """What differs between the run that wrote a step and this one, if that is allowed."""
    written = found.shares.get(rank, found.first)
    changes = changes_between(written.identity, now.identity, step=found.step)
    raise_everywhere(refuse(where, changes, allowed), group)
    layout = [Change(k, written.layout[k], v) for k, v in now.layout.items() if k.startswith("pipeline.")]
    versions = [Change(k, written.versions.get(k, NOT_RECORDED), v) for k, v in now.versions.items()]
    changes += [change for change in (*layout, *versions) if change.before != change.after]
    if rank == 0:
        for change in changes:
            log.warning("%s: %s", where, change)
    return changes


class _Sources:
    """Where one rank takes its tensors from.

    Attributes:
        tensors: by the names that `restore` wants; copies: those that another name has, too.
        items: all of these and those of codecs, in a fixed order.
        fresh: boundaries of the whole pipeline whose codecs begin afresh. problem: what is missing; empty: nothing.
    """

    def __init__(self, found: Found, pipeline: Pipeline, *, rank: int, replica: int) -> None:
        self._found, self._pipeline, self._rank, self._replica = found, pipeline, rank, replica
        self.tensors: dict[str, Item] = {}
        self.problem = ""
        self._lanes: dict[str, _Memory] = {}
        self._memories = _memories(found)
        self._take_parameters()
        self._take_generators()
        self.fresh = list(dict.fromkeys(self._take_codecs()))
        codecs = [item for memory in self._lanes.values() for item in memory.items.values()]
        self.items = sorted({*self.tensors.values(), *codecs})
        first = {item: name for name, item in reversed(self.tensors.items())}
        self.copies = {name for name, item in self.tensors.items() if first[item] != name}

    def lanes(self, received: Mapping[Item, Tensor]) -> dict[str, dict[str, Any]]:
        """What `restore` wants for boundaries."""
        return {
            name: memory.values | {path: received[item] for path, item in memory.items.items()}
            for name, memory in self._lanes.items()
        }

    def _take_parameters(self) -> None:
        aliases = aliases_of(self._pipeline)
        for name, parameter in parameters_of(self._pipeline).items():
            known = name if self._share_with(name) is not None else aliases.get(name, name)
            share = self._share_with(known)
            if share is None:
                self._note_problem(f"no share has the parameter {name}")
                continue
            entries = self._found.shares[share].tensors
            entry = entries[f"model/{known}"]
            if (DTYPES[entry["dtype"]], entry["shape"]) != (parameter.dtype, list(parameter.shape)):
                self._note_problem(
                    f"parameter {name} is {entry['dtype']} {entry['shape']}; "
                    f"the model has {parameter.dtype} {list(parameter.shape)}"
                )
            self.tensors[f"model/{name}"] = share, f"model/{known}"
            prefix = f"optimizer/{known}/"
            for moment in (n for n in entries if n.startswith(prefix)):
                if entries[moment]["shape"] not in ([], entry["shape"]):
                    self._note_problem(f"{moment} has not the shape of its parameter")
                self.tensors[f"optimizer/{name}/{moment.removeprefix(prefix)}"] = share, moment

    def _note_problem(self, text: str) -> None:
        self.problem = self.problem or text

    def _share_with(self, name: str) -> int | None:
        """A share that has a parameter: of this rank's number, on its own disk, or any."""
        having = [r for r, m in self._found.shares.items() if f"model/{name}" in m.tensors]
        order = lambda r: (r != self._rank, self._found.holders[r] != self._rank, r)  # noqa: E731
        return min(having, key=order, default=None)

    def _take_generators(self) -> None:
        if share := self._found.shares.get(self._rank):
            self.tensors |= {name: (self._rank, name) for name in share.tensors if name.startswith("random/")}

    def _take_codecs(self) -> Iterator[str]:
        """Find memories for this rank's lanes; yields the boundaries of the whole pipeline where there is none."""
        pipeline = self._pipeline
        if pipeline.config.pipeline.boundary != "lowbit":
            return
        in_warm_up = self._found.step < pipeline.config.codec_warmup_steps
        for stage in range(pipeline.layout.stages):
            for lane, end, codec in ends_of(pipeline.layout, pipeline.codecs, stage):
                memory = self._memory_for(end, codec)
                if stage in pipeline.modules and memory is not None:
                    self._lanes[lane] = memory
                if in_warm_up or not pipeline.layout.crosses(int(lane.split()[1])):
                    continue
                if not parse(codec).settled and (memory is None or not memory.has_choice):
                    self._note_problem(
                        f"it tells nothing of what {codec} chose in the warm-up, which {lane} (after layer "
                        f"{end.after_layer}) needs; allowed: a format that is settled, with "
                        f"--allow-change pipeline.{end.direction}"
                    )
                elif parse(codec).stateful and (memory is None or not memory.whole):
                    yield lane

    def _memory_for(self, end: End, codec: str) -> _Memory | None:
        """What a lane begins with: the memory of its place, or the choice of the nearest place that has one."""
        replicas = sorted(self._memories, key=lambda r: (r != self._replica % len(self._memories), r))
        for replica in replicas:
            known = self._memories[replica]
            if end in known and end.other in known and self._fits(known[end], codec):
                return known[end]
        if parse(codec).settled:
            return None
        near = [
            (abs(other.after_layer - end.after_layer), other.after_layer, replica, memory)
            for replica, known in self._memories.items()
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
        same_shape = (first.layout["rows"], first.identity.get("data.sequence")) == shape[:2]
        parsed = parse(codec)
        return same_shape or (isinstance(parsed, StatefulCodec) and parsed.shared_by(shape) is not None)


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """The state of a codec at one end of a boundary. items: its tensors; values: everything else; both by path."""

    codec: str
    values: dict[str, Any]
    items: dict[str, Item]
    whole: bool = True

    @property
    def has_choice(self) -> bool:
        return any(path.endswith("/choice") for path in self.values)

    def choice_only(self) -> _Memory:
        """The choice alone, which other places can use."""
        choices = {path: v for path, v in self.values.items() if path.endswith("/choice")}
        return dataclasses.replace(self, values=choices, items={}, whole=False)


def _memories(found: Found) -> dict[int, dict[End, _Memory]]:
    """What ends of boundaries remembered, by pipeline."""
    places = found.first.layout["pipeline.ranks"]
    memories: dict[int, dict[End, _Memory]] = {}
    for rank, manifest in found.shares.items():
        of_pipeline = memories.setdefault(rank // places, {})
        for unit in manifest.codecs:
            end = End.of(unit)
            own = [name for name in manifest.tensors if name.startswith(end.prefix)]
            items = {name.removeprefix(end.prefix): (rank, name) for name in own}
            of_pipeline[end] = _Memory(codec=unit["codec"], values=unit["values"], items=items)
    return memories


def _same(one: str, other: str) -> bool:
    try:
        return parse(one) == parse(other)
    except (TypeError, ValueError, RecursionError):
        return False


class _Exchange:
    """Tensors on the CPU, from this disk or from the rank that has the share.

    All ranks go through all transfers in the same order, a piece to each receiver in turn: so no two wait for each
    other, and no wait is longer than one piece for every rank takes. All together may exceed the time limit.
    """

    def __init__(self, found: Found, folder: Path, rank: int, group: dist.ProcessGroup | None) -> None:
        self._found, self._rank, self._group = found, rank, group
        self._step = folder / step_name(found.step)
        own = [share for share, holder in found.holders.items() if holder == rank]
        self._readers = {share: Reader(self._step / f"rank-{share}") for share in own}
        self._received: dict[Item, Tensor] = {}
        self._problem = ""

    def run(self, wanted: list[Item]) -> dict[Item, Tensor]:
        """What this rank wants; to be called on every rank.

        Raises:
            TransientError: what arrived is not what was written; the same on every rank.
        """
        wanted_by_rank = gather_json(wanted, self._group)
        together(partial(self._transfer, wanted_by_rank), self._group)
        raise_everywhere(self._problem, self._group, TransientError)
        return self._received

    def _transfer(self, wanted_by_rank: list[list[Item]]) -> None:
        under_way = [self._pieces(receiver, items) for receiver, items in enumerate(wanted_by_rank)]
        while under_way:
            under_way = [pieces for pieces in under_way if next(pieces, _OVER) is not _OVER]

    def _pieces(self, receiver: int, items: list[Item]) -> Iterator[None]:
        """Send a rank its tensors, as far as this rank has a part in that; stops after each piece."""
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
                self._received[share, name] = tensor
                if holder != receiver and crc32(tensor) != entry["crc32"]:
                    where = f"{name} of {self._step.name}/rank-{share}"
                    self._problem = f"{where} arrived from rank {holder} with other bytes"

    def _pass_on(self, tensor: Tensor, start: int, holder: int, receiver: int) -> None:
        piece = tensor.view(-1).view(torch.uint8)[start : start + _PIECE_BYTES]
        if self._rank == holder:
            dist.send(piece, group=self._group, group_dst=receiver)
        elif self._rank == receiver:
            dist.recv(piece, group=self._group, group_src=holder)
