"""Resume from a checkpoint in any layout: choose which rank takes which tensors, and which codecs start empty.

Parameters and AdamW's moments are found by their name in the whole model. A rank takes the random generators of the
rank that had its number. A codec takes the state of the boundary after the same layer, if the format is the same and
both ends of the boundary can take it from the same pipeline.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import escape
from lowbit.codecs import StatefulCodec, parse
from lowbit.wire.messages import Messages, gather_json
from lowbit_run.train.checkpoints.manifest import FINISHED, NO_CHECKPOINT, TENSORS, Manifest, step_name
from lowbit_run.train.checkpoints.save import DTYPES, Checkpoints, raise_everywhere, together
from lowbit_run.train.checkpoints.search import SavedStep, Search
from lowbit_run.train.checkpoints.state import ANCHOR, FOLLOWED, End, aliases_of, ends_of, parameters_of, restore
from lowbit_run.train.config import RunConfig
from lowbit_run.train.identity import Change, changes_between, refuse
from lowbit_run.train.stages import Pipeline

log = escape.logger(__name__)

Item = tuple[int, str]
"""A tensor in a checkpoint: the rank that wrote the share, and the tensor's name in it."""

_PIECE_BYTES = 8 << 20  # of a tensor that is sent


def resume(
    checkpoints: Checkpoints,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    now: Manifest,
    *,
    replica: int,
    run: RunConfig,
    group: dist.ProcessGroup | None,
    take_over: Callable[[int, Mapping[str, Any]], str],
) -> tuple[int, list[dict[str, Any]]]:
    """Restore the newest intact step; every rank must call it.

    Args:
        now: the manifest of this run. replica: number of this rank's pipeline.
        run: whether there must be a checkpoint, and which keys may have changed since.
        take_over: called with the steps done and the identity of the checkpoint, which has what the run itself chose,
            before the states of codecs are restored; returns an error message, or "".

    Returns:
        Steps done, 0 if no rank has any checkpoint; and all changes since the run began, oldest first.

    Raises:
        CheckpointError: (on every rank) no step is intact, or this run differs in a key that may not change.
    """
    rank, folder = checkpoints.rank, checkpoints.folder
    saved = Search(folder, group).newest()
    if saved is None:
        finished = rank == 0 and (folder.parent / "summary.json").exists()
        problem = NO_CHECKPOINT.format(folder) if run.resume is True else FINISHED.format(folder.parent) * finished
        raise_everywhere(problem, group)
        if rank == 0:
            log.warning("no checkpoint in %s: starting with step 0", folder)
        return 0, []
    where = f"checkpoint {folder / step_name(saved.step)}"
    changes = _compare(saved, now, where, rank, run.allow_change, group)
    if saved.step > run.steps:
        raise_everywhere(f"{where} has done {saved.step} steps; allowed for run.steps: at least as many", group)
    problem = take_over(saved.step, saved.first.identity)
    raise_everywhere(f"{where}: {problem}" if problem else "", group)
    sources = _Sources(saved, pipeline, rank=rank, replica=replica)
    raise_everywhere(f"{where}: {sources.problem}" if sources.problem else "", group)
    received = ShareExchange(saved, folder, group, run.timeout_seconds).run(sources.items)
    tensors = {name: received[item] for name, item in sources.tensors.items()}
    for name in tensors.keys() & sources.copies:  # the optimizer changes tensors in place
        tensors[name] = tensors[name].clone()
    problem = ""
    try:
        restore(pipeline, optimizer, tensors, sources.lanes(received), steps=saved.step)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{where} cannot be restored: {type(error).__name__}: {error}"
    raise_everywhere(problem, group)
    if rank == 0 and sources.fresh:
        log.warning("%s: codecs start without their earlier state at %s", where, ", ".join(sources.fresh))
    return saved.step, [*saved.first.changes, *({"step": saved.step, **change._asdict()} for change in changes)]


def _compare(
    saved: SavedStep, now: Manifest, where: str, rank: int, allowed: tuple[str, ...], group: dist.ProcessGroup | None
) -> list[Change]:
    """Compare this run with the one that wrote a step; raise if a difference is not allowed."""
    written = saved.shares.get(rank, saved.first)
    changes = changes_between(written.identity, now.identity, step=saved.step)
    raise_everywhere(refuse(where, changes, allowed), group)
    layout = [Change(k, written.layout[k], v) for k, v in now.layout.items() if k.startswith("pipeline.")]
    versions = [Change(k, written.versions.get(k), v) for k, v in now.versions.items()]
    changes += [change for change in (*layout, *versions) if change.before != change.after]
    if rank == 0:
        for change in changes:
            log.warning("%s: %s", where, change)
    return changes


class _Sources:
    """The source of each tensor that one rank takes.

    Attributes:
        tensors: by the names that `restore` expects; copies: names that share their tensor with another name.
        items: all of these and the tensors of codecs, sorted.
        fresh: boundaries of the whole pipeline whose codecs start empty. problem: the first obstacle, or "".
    """

    def __init__(self, saved: SavedStep, pipeline: Pipeline, *, rank: int, replica: int) -> None:
        self._saved, self._pipeline, self._rank, self._replica = saved, pipeline, rank, replica
        self.tensors: dict[str, Item] = {}
        self.problem = ""
        self._lanes: dict[str, _Memory] = {}
        self._memories = _memories(saved)
        self._take_parameters()
        self._take_followed()
        if share := saved.shares.get(rank):
            self.tensors |= {name: (rank, name) for name in share.tensors if name.startswith("random/")}
        self.fresh = list(dict.fromkeys(self._take_codecs()))
        codecs = [item for memory in self._lanes.values() for item in memory.items.values()]
        self.items = sorted({*self.tensors.values(), *codecs})
        first = {item: name for name, item in reversed(self.tensors.items())}
        self.copies = {name for name, item in self.tensors.items() if first[item] != name}

    def lanes(self, received: Mapping[Item, Tensor]) -> dict[str, dict[str, Any]]:
        """Return the codec states at this rank's boundaries, as `restore` expects them."""
        return {
            name: memory.values | {path: received[item] for path, item in memory.items.items()}
            for name, memory in self._lanes.items()
        }

    def _take_parameters(self) -> None:
        aliases = aliases_of(self._pipeline)  # a tied weight may be stored under either of its names
        for name, parameter in parameters_of(self._pipeline).items():
            stored = name if self._share_with(name) is not None else aliases.get(name, name)
            share = self._share_with(stored)
            if share is None:
                self._note_problem(f"no share has the parameter {name}")
                continue
            entries = self._saved.shares[share].tensors
            entry = entries[f"model/{stored}"]
            if (DTYPES[entry["dtype"]], entry["shape"]) != (parameter.dtype, list(parameter.shape)):
                self._note_problem(
                    f"parameter {name} is {entry['dtype']} {entry['shape']}; "
                    f"the model has {parameter.dtype} {list(parameter.shape)}"
                )
            self.tensors[f"model/{name}"] = share, f"model/{stored}"
            prefix = f"optimizer/{stored}/"
            for moment in (n for n in entries if n.startswith(prefix)):
                if entries[moment]["shape"] not in ([], entry["shape"]) and not moment.endswith(("/scale", "/qmap")):
                    self._note_problem(f"{moment} does not have the shape of its parameter")
                self.tensors[f"optimizer/{name}/{moment.removeprefix(prefix)}"] = share, moment

    def _note_problem(self, text: str) -> None:
        self.problem = self.problem or text

    def _share_with(self, name: str) -> int | None:
        """Return a share with this parameter, preferably one of this rank's number, then one on its own disk."""
        having = [r for r, m in self._saved.shares.items() if f"model/{name}" in m.tensors]
        order = lambda r: (r != self._rank, self._saved.holders[r] != self._rank, r)  # noqa: E731
        return min(having, key=order, default=None)

    def _take_followed(self) -> None:
        """Take tied copies, which two ranks of a pipeline hold, from one pipeline; if none has them, the parameter."""
        places = self._saved.first.layout["pipeline.ranks"]
        for name, tensor in self._pipeline.followed.items():
            having = [r for r, manifest in self._saved.shares.items() if FOLLOWED + name in manifest.tensors]
            order = lambda r: (r // places != self._replica, r // places, r != self._rank, r)  # noqa: E731
            share = min(having, key=order) if having else self._share_with(name)
            stored = FOLLOWED + name if having else f"model/{name}"
            if share is not None and self._saved.shares[share].tensors[stored]["shape"] == list(tensor.shape):
                self.tensors[FOLLOWED + name] = share, stored
            else:
                self._note_problem(f"no share has the parameter {name}")

    def _take_codecs(self) -> Iterator[str]:
        """Choose memories for this rank's lanes; yield the boundaries whose codecs start empty."""
        pipeline = self._pipeline
        in_warm_up = self._saved.step < pipeline.config.codec_warmup_steps
        for stage in range(pipeline.layout.stages):  # all, so that every rank yields the same boundaries
            for lane, end, codec in ends_of(pipeline, stage):
                memory = self._memory_for(end, codec)
                if stage in pipeline.modules and memory is not None:
                    self._lanes[lane] = memory
                if not pipeline.layout.crosses(int(lane.split()[1])):
                    continue
                if memory is None and end.direction == ANCHOR:
                    self._note_missing_anchor(end, said=stage in pipeline.modules and end.outgoing)
                elif in_warm_up:
                    continue
                elif memory is None and parse(codec).stateful:
                    yield lane

    def _note_missing_anchor(self, end: End, *, said: bool) -> None:
        """Refuse a boundary without a token anchor after the warm-up; in it, say (`said`) if few tokens are left."""
        config, step = self._pipeline.config, self._saved.step
        left = config.codec_warmup_steps - step
        if left <= 0:
            again, more = "", step + config.anchor_steps
            if more < config.run.steps:  # or the warm-up would have no end
                again = f"--pipeline.warmup_steps {more} --allow-change pipeline.warmup_steps, to fit anchors again, "
            self._note_problem(
                f"it has no token anchor after layer {end.after_layer}, where a boundary is coded now; allowed: the "
                f"earlier stages and formats, {again}or --pipeline.anchor false --allow-change pipeline.anchor"
            )
        elif said and step and left < config.anchor_steps:
            log.warning(
                "the token anchor after layer %d is fitted anew, in steps %d to %d of the warm-up",
                end.after_layer, step + 1, config.codec_warmup_steps,
            )  # fmt: skip

    def _memory_for(self, end: End, codec: str) -> "_Memory | None":
        """Return the memory saved for a lane's place, if the codec can use it."""
        replicas = sorted(self._memories, key=lambda r: (r != self._replica % len(self._memories), r))
        for replica in replicas:
            memories = self._memories[replica]
            # Both ends: a codec with state on one side only would decode garbage.
            if end in memories and end.other in memories and self._fits(memories[end], codec, end):
                return memories[end]
        return None

    def _fits(self, memory: "_Memory", codec: str, end: End) -> bool:
        """Whether a codec can use a memory: the same format and, unless shapes share a memory, the same shape."""
        config, first = self._pipeline.config, self._saved.first
        if end.direction == ANCHOR:  # a warm-up that continues after the fit has nothing to add to: its sums are gone
            in_warm_up, sums = (
                self._saved.step < config.codec_warmup_steps,
                {path.rpartition("/")[2] for path in memory.items},
            )
            return memory.codec == codec and (not in_warm_up or "sums" in sums)
        if not _same(memory.codec, codec):
            return False
        if end.direction == "forward" and first.identity.get("pipeline.anchor", False) != config.pipeline.anchor:
            return False  # it is of other activations: of what anchors leave, or of all
        parsed = parse(codec)
        rows, sequence = config.rows, config.data.sequence
        if (first.layout["rows"], first.identity.get("data.sequence")) == (rows, sequence):
            return True
        return isinstance(parsed, StatefulCodec) and parsed.shared_by((rows, sequence, 1)) is not None


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """State of a codec at one end of a boundary. items: its tensors; values: everything else; both by path."""

    codec: str
    values: dict[str, Any]
    items: dict[str, Item]


def _memories(saved: SavedStep) -> dict[int, dict[End, _Memory]]:
    """Codec states at the ends of boundaries, by pipeline."""
    places = saved.first.layout["pipeline.ranks"]
    memories: dict[int, dict[End, _Memory]] = {}
    for rank, manifest in saved.shares.items():
        of_pipeline = memories.setdefault(rank // places, {})
        for unit in manifest.codecs:
            end = End(unit["after_layer"], unit["direction"], unit["outgoing"])
            items = {n.removeprefix(end.prefix): (rank, n) for n in manifest.tensors if n.startswith(end.prefix)}
            of_pipeline[end] = _Memory(codec=unit["codec"], values=unit["values"], items=items)
    return memories


def _same(one: str, other: str) -> bool:
    try:
        return parse(one) == parse(other)
    except (TypeError, ValueError, RecursionError):
        return False


class ShareExchange:
    """Reads tensors from this rank's disk, or receives them from a rank that has the share on its disk.

    All ranks take part in all transfers in the same order, one piece to each receiver in turn. So there is no deadlock,
    and no wait is longer than sending one piece to every rank takes. The whole exchange may exceed the time limit.

    Args:
        folder: of checkpoints on this rank's disk. timeout: seconds to wait for a piece.
    """

    def __init__(self, saved: SavedStep, folder: Path, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._saved, self._group = saved, group
        self._messages = Messages(group, "checkpoints", timeout=timeout)
        self._rank = self._messages.rank
        from safetensors import safe_open

        held = [share for share, holder in saved.holders.items() if holder == self._rank]
        files = {share: folder / step_name(saved.step) / f"rank-{share}" / TENSORS for share in held}
        self._readers = {share: safe_open(path, framework="pt") for share, path in files.items()}
        self._received: dict[Item, Tensor] = {}

    def run(self, wanted: list[Item]) -> dict[Item, Tensor]:
        """Return the tensors that this rank wants, on the CPU; every rank must call it.

        Raises:
            DamagedError: a tensor arrived damaged. PeerError: a rank ended or does not answer.
        """
        wanted_by_rank = gather_json(wanted, self._group)

        def transfer() -> None:
            for _ in zip_longest(*(self._pieces(receiver, items) for receiver, items in enumerate(wanted_by_rank))):
                pass  # a piece to each receiver in turn

        together(transfer, self._group)
        return self._received

    def _pieces(self, receiver: int, items: list[Item]) -> Iterator[None]:
        """Do this rank's part in sending `items` to a receiver; yield after each piece."""
        for share, name in items:
            holder, entry = self._saved.holders[share], self._saved.shares[share].tensors[name]
            if self._rank == holder:
                tensor = self._readers[share].get_tensor(name).clone()
            else:  # neither sends nor receives: this rank only keeps the order, without memory for the tensor
                device = "cpu" if self._rank == receiver else "meta"
                tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
            if holder != receiver:
                for piece in tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES):
                    if self._rank == holder:
                        self._messages.send(piece, receiver).wait()
                    elif self._rank == receiver:
                        piece.copy_(self._messages.receive(piece.numel(), holder, name))
                    yield
            if self._rank == receiver:
                self._received[share, name] = tensor
