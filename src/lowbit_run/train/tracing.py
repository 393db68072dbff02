"""The trace of a run: a few steps of every rank on one clock, in files for Perfetto and Chrome."""

import contextlib
import gzip
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lowbit import escape
from lowbit.wire.messages import Messages, Trip, gather_json, round_trip
from lowbit.wire.traffic import Trace
from lowbit_run.train.folder import RunFolder

if TYPE_CHECKING:
    from lowbit_run.train.members import Members
    from lowbit_run.train.stages import Pipeline

FOLDER, ALL = "trace", "all-ranks.json.gz"
_SETTLING = 2  # steps after the warm-up, which set up codecs and caches

log = escape.logger(__name__)


def traced_steps(steps: int, *, start: int, warmup: int, count: int) -> range:
    """Choose the steps to trace, such as range(103, 108): after the warm-up, if the run is long enough."""
    first = max(start, min(max(start, warmup) + _SETTLING, steps - count))
    return range(first + 1, min(first + count, steps) + 1)


class Tracing:
    """Traces steps of a run after `start` others; every rank makes one. Rank 0 writes into the folder."""

    def __init__(self, members: "Members", pipeline: "Pipeline", folder: RunFolder, start: int) -> None:
        run, warmup = members.config.run, members.config.codec_warmup_steps
        self._messages = Messages(members.side, "trace", timeout=run.timeout_seconds, checksums=run.checksums)
        self._members, self._pipeline, self._folder = members, pipeline, folder
        self._steps = traced_steps(run.steps, start=start, warmup=warmup, count=run.trace_steps)
        self._trace = Trace()
        self._before: Trip | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Trace | None]:
        """Trace what a `with` block does in this step, and yield the trace, if it is one of those to trace."""
        if step not in self._steps:
            yield None
            return
        if self._before is None:
            self._before = _compare_clocks(self._messages)
        with contextlib.ExitStack() as stack:
            for stage in self._pipeline.stages:
                stack.enter_context(self._trace.passes(stage))
            for stage in self._pipeline.lowbit_stages.values():
                stage.traffic.trace = self._trace
            try:
                yield self._trace
            finally:
                for stage in self._pipeline.lowbit_stages.values():
                    stage.traffic.trace = None
        if step == self._steps[-1]:
            self._write()

    def _write(self) -> None:
        assert self._before is not None
        members, clocks = self._members, (self._before, _compare_clocks(self._messages))
        first = members.replicas.index * members.layout.ranks  # rank 0 of this pipeline
        offset = sum(clock.offset for clock in clocks) // 2  # the same for all spans, so that they keep their lengths
        spans = [  # on the clock of rank 0; peers become ranks of the whole run
            [s.name, None if s.peer is None else first + s.peer, s.begin + offset, s.end + offset, s.about]
            for s in self._trace.spans
        ]
        error = max(abs(clock.offset - offset) + clock.error for clock in clocks)
        gathered = gather_json({"spans": spans, "clock_error_ns": error}, members.side)
        self._trace.spans.clear()
        if members.rank != 0:
            return
        names = {f"{FOLDER}/rank-{rank}.json.gz": {rank: of_rank} for rank, of_rank in enumerate(gathered)}
        names[f"{FOLDER}/{ALL}"] = dict(enumerate(gathered))
        self._folder.note(f"{FOLDER}/", *names)
        (self._folder.path / FOLDER).mkdir(exist_ok=True)
        for name, ranks in names.items():
            text = json.dumps({"traceEvents": list(_events(ranks)), "displayTimeUnit": "ms"})
            (self._folder.path / name).write_bytes(gzip.compress(text.encode(), mtime=0))


def _compare_clocks(messages: Messages) -> Trip:
    """Measure this rank's round trip to rank 0, and the offset of rank 0's clock; zeros on rank 0."""
    if messages.rank:
        return round_trip(messages, 0)
    for rank in range(1, messages.ranks):
        round_trip(messages, rank)
    return Trip(0.0, 0, 0)


def _events(ranks: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield Chrome trace events in microseconds: a process per rank, with a thread for the rank and one per link."""
    for rank, of_rank in ranks.items():
        about = {"name": f"rank {rank}", "clock_error_us": of_rank["clock_error_ns"] / 1e3}
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": about}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        tids = {peer: 0 if peer is None else peer + 1 for _, peer, *_ in of_rank["spans"]}
        for peer, tid in sorted(tids.items(), key=lambda item: item[1]):
            name = f"sends to rank {peer}" if tid else "computes"
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
        for name, peer, begin, end, args in of_rank["spans"]:
            yield {
                "ph": "X", "name": name, "cat": CATEGORIES.get(name, "rest"), "pid": rank, "tid": tids[peer],
                "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": args,
            }  # fmt: skip


CATEGORIES = {
    "forward": "compute", "backward": "compute", "weight": "compute", "optimizer": "compute", "encode": "coding",
    "decode": "coding", "checksum": "coding", "wait": "waiting", "all-reduce": "all-reduce", "send": "sending",
}  # fmt: skip
"""Kinds of spans by name; a step and its pipeline pass are "rest": their time outside inner spans."""
