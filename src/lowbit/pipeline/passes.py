"""The passes of a pipeline as one rank runs them: what crosses in each, agreed on before the first byte of it.

A pass is one call of `schedule.step` or `schedule.eval`. Its configuration decides all messages: whether it trains, how
many micro-batches it has, and the layouts of what the first stage is given. Only the rank with that stage sees those,
so at the start of each pass it tells all others which configuration it is, half a round trip ahead of the first
activations. One that has been there before costs nothing more: schedules that share stages, evaluations in between and
batches that alternate are all the same to it.

For a new one, all ranks state what they take it for, in one exchange. Where a stage was not told the layouts of its
inputs and outputs, or is given others, each stage then tries its module out once and passes the layouts of the outputs
on to the next, and a second exchange compares them. What cannot be is the same error on every rank, and nothing has
been sent yet.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.pipeline import announce
from lowbit.pipeline.hooks import Batch, Layouts, layout_of
from lowbit.pipeline.numbering import MOST_PIPELINES, rank_names, stage_names
from lowbit.ranks.agreement import Agreement
from lowbit.ranks.checksum import Checksums
from lowbit.ranks.errors import AgreementError, described
from lowbit.ranks.failure import FailureBoard
from lowbit.ranks.statements import contradictions

if TYPE_CHECKING:
    from lowbit.pipeline.stage import LowBitStage

# Messages may be awaited in vain for long, so no two pipelines of a group have the same tags.
_FIRST_TAG = 1 << 29  # away from the small ones that a program may use itself
_MOST_TAGS = 1 << 24
_PHASES = 3  # see `Step.phase`


@dataclass(frozen=True)
class Configuration:
    """What crosses in a pass, and under which tags.

    Attributes:
        number: of the pipeline's, in the order in which they were agreed on.
        training: whether gradients are computed.
        micro_batches: how many.
        alike: for each of them, the first one with the same layouts.
        layouts: by stage of this rank, then by micro-batch.
        first_tag: of its messages; most_tensors: that cross a boundary together; phases: of steps that are to come.
    """

    number: int
    training: bool
    micro_batches: int
    alike: tuple[int, ...]
    layouts: Mapping[int, Sequence[Layouts]]
    first_tag: int
    most_tensors: int
    phases: int

    def tag(self, boundary: int, backward: bool, phase: int, micro_batch: int, index: int) -> int:
        """Of a message: tensor `index` of a micro-batch. phase: of the step, 0 to 2, since sizes change with it."""
        lane = (boundary * 2 + backward) * self.phases + phase % self.phases
        return self.first_tag + (lane * self.micro_batches + micro_batch) * self.most_tensors + index

    def tags(self, boundaries: int) -> int:
        """How many tags it takes."""
        return boundaries * 2 * self.phases * self.micro_batches * self.most_tensors


class Passes:
    """All passes of the stages of one pipeline that this rank holds.

    Args:
        stages: all of this rank, ascending; group: of the pipeline; number: of the pipeline in the group.
        limit: seconds to wait; checksums: of its messages.
    """

    def __init__(
        self,
        stages: Sequence[LowBitStage],
        group: dist.ProcessGroup,
        number: int,
        limit: float,
        checksums: Checksums,
    ) -> None:
        self._group, self._name, self._limit = group, f"pipeline {number}", limit
        self._tag = _FIRST_TAG + number
        self._tags = _FIRST_TAG + MOST_PIPELINES + number * _MOST_TAGS
        self._last_tag = self._tags + _MOST_TAGS
        # Only within a pass: the stages refer to this, and what refers back keeps a group's connections open.
        self._stages: Sequence[LowBitStage] = ()
        first = stages[0]
        self._source, self._is_source = first.rank_of(0), first.is_first
        self._names = rank_names(group, first.stages_of)
        self._board = FailureBoard(group, self._name, self._names, limit)
        self._checksums = checksums
        self._announcements: announce.Announcements | None = None
        self._known: dict[Any, int] = {}  # on the rank with the first stage: numbers by what it saw
        self._agreed: list[Configuration] = []
        self._last: dict[tuple[bool, int], tuple[Configuration, bool]] = {}  # and if twice in a row
        self._passes = self._rounds = 0
        self._loaded = False  # other states, which are to be compared
        self._broken = ""

    def run(self, stages: Sequence[LowBitStage], batch: Batch, body: Callable[[], None]) -> None:
        """A pass, in which `body` is the schedule's part. stages: as given to the constructor.

        Raises:
            ValueError: a batch that cannot be cut into the schedule's micro-batches, or tensors that a codec cannot
                take. The same on all ranks.
            AgreementError: the ranks do not agree on what the pass is, or on what crosses. The same on all ranks.
            RuntimeError: a pass before this one ended in an error.
        """
        if self._broken:
            raise RuntimeError(
                f"a step of this pipeline ended early ({self._broken}); start again with a new process group"
            )
        self._stages = stages
        try:
            with self._telling():
                problem = self._begin(batch)
            if not problem:
                body()
                for stage in self._stages:
                    stage.transport.drain()
                likely, again = self._last[batch.training, batch.micro_batches]
                if again:  # what is awaited in vain takes memory until it comes
                    for stage in self._stages:
                        stage.await_next(likely)
            if self._announcements is not None:
                self._announcements.finish()
        except BaseException as error:
            self._broken = described(error)
            if not getattr(error, "on_all_ranks", False) or isinstance(error, _Conflict):
                self._board.give_up(error, self._stages[0].transport.sever)
            if isinstance(error, _Conflict):
                raise AgreementError(str(error)) from None
            raise
        finally:
            self._stages = ()
        if problem:
            raise ValueError(problem)

    def forget(self) -> None:
        """Agree anew on each configuration: the codecs' states are others now."""
        self._known.clear()
        self._last.clear()
        self._loaded = bool(self._agreed)

    def _begin(self, batch: Batch) -> str:
        """Everything before the first message; returns what is wrong with the batch, which all ranks know then."""
        self._passes += 1
        for stage in self._stages:
            stage.begin(self._board, self._passes, batch, self._names)
        seen, problem = self._seen(batch) if self._is_source else ((), "")
        configuration = None
        if self._agreed:
            number, problem = self._told(batch, seen, problem)
            if problem:
                return problem
            configuration = None if number is None else self._agreed[number]
        if configuration is None:
            configuration, problem = self._agree(batch, seen, problem)
            if configuration is None:
                return problem
            self._agreed.append(configuration)
            self._loaded = False
            self._known[seen] = configuration.number
        kind = batch.training, batch.micro_batches
        again = self._last.get(kind, (None, False))[0] is configuration
        self._last[kind] = configuration, again
        for stage in self._stages:
            stage.use_configuration(configuration)
        return ""

    def _seen(self, batch: Batch) -> tuple[tuple[Any, ...], str]:
        """What the first stage is given, by micro-batch, and what is wrong with it."""
        if len(batch.args) != batch.micro_batches:
            return (), (
                f"the batch gives {len(batch.args)} micro-batches, and the schedule has {batch.micro_batches}; "
                "allowed: at least one sample for each"
            )
        layouts = [tuple(layout_of(x) for x in args if isinstance(x, Tensor)) for args in batch.args]
        empty = [i for i, tensors in enumerate(layouts) if any(x.dim() and not len(x) for x in tensors)]
        if empty:
            return (), (
                f"micro-batch {empty[0]} of {batch.micro_batches} is empty; allowed: at least one sample for each"
            )
        named = [tree_leaves(sorted(kwargs.items())) for kwargs in batch.kwargs]
        return (_mode(batch), *zip(map(_key, layouts), map(_key, named), strict=True)), ""

    def _facts(self, batch: Batch) -> dict[str, str]:
        return {
            "kind of pass": "training" if batch.training else "evaluation",
            "micro-batches": str(batch.micro_batches),
            "training steps so far": str(self._stages[0].steps),
        }

    def _told(self, batch: Batch, seen: Any, problem: str) -> tuple[int | None, str]:
        """Which configuration this pass has, None for a new one, and what is wrong with the batch: told or heard."""
        if self._announcements is None:
            self._announcements = announce.choose(self._group, self._source, self._board, self._checksums, self._tag)
        facts = self._facts(batch)
        if self._is_source:
            number = self._known.get(seen)
            told = self._announcements.tell(self._passes, [number, problem, facts])
            self._stages[0].traffic.announced_bytes += told
            return number, problem
        start = time.perf_counter()
        heard = self._announcements.hear(self._passes)
        self._stages[0].traffic.wait_seconds += time.perf_counter() - start
        number, problem, theirs = _checked(heard, self._source)
        mine = self._names[dist.get_rank(self._group)]
        if conflict := contradictions({self._names[self._source]: theirs, mine: facts}):
            raise _Conflict(conflict)
        if number is not None and self._loaded:
            raise _Conflict(
                f"the ranks do not agree:\n  codec state: loaded anew on {mine}; not on {self._names[self._source]}"
            )
        if number is not None and number >= len(self._agreed):
            raise _Conflict(
                f"the ranks do not agree:\n  configurations so far: more than {number} on "
                f"{self._names[self._source]}; {len(self._agreed)} on {mine}"
            )
        return number, problem

    def _agree(self, batch: Batch, seen: Any, problem: str) -> tuple[Configuration | None, str]:
        """Agree on a new configuration; None, and what is wrong, if it cannot be."""
        declared = [stage.declared for stage in self._stages]
        facts, faults = {}, {}
        for stage, layouts in zip(self._stages, declared, strict=True):
            mine = {f"declared by stage {stage.stage_index}": str(layouts is not None)}
            if layouts is not None:
                more, faults[stage.stage_index] = stage.prepare([layouts], [0], batch.training)
                mine |= more | _crossing(stage, [layouts])
            facts[stage.stage_index] = stage.identity() | self._facts(batch) | mine
        if self._is_source:
            facts[0] |= _source_facts(seen, problem, declared[0])
        names = stage_names(self._group, self._stages[0].stages_of)
        agreement = self._agreement()
        self._rounds += 1
        everybody = agreement.exchange(facts, names)
        if problem := everybody[0].get("problem", ""):
            agreement.linger()
            return None, problem
        alike = _alike(everybody[0], batch.micro_batches)
        static = everybody[0]["as declared"] == "True" and all(
            stated.get(f"declared by stage {index}") == "True" for index, stated in everybody.items()
        )
        if static:
            alike = [0] * batch.micro_batches
            chosen = {s.stage_index: {0: d} for s, d in zip(self._stages, declared, strict=True) if d}
        else:
            chosen = self._try_out(batch, sorted(set(alike)))
            agreement = self._agreement()
            facts = {}
            for stage in self._stages:
                variants = list(chosen[stage.stage_index].values())
                more, faults[stage.stage_index] = stage.prepare(
                    variants, list(chosen[stage.stage_index]), batch.training
                )
                facts[stage.stage_index] = more | _crossing(stage, variants)
            self._rounds += 1
            everybody = agreement.exchange(facts, names)
        if fault := "; ".join(filter(None, faults.values())):  # word for word the same on all ranks
            agreement.linger()
            return None, fault
        most = max(int(stated[f"tensors from stage {i}"]) for i, stated in everybody.items())
        layouts = {index: [variants[i] for i in alike] for index, variants in chosen.items()}
        warm = self._stages[0].steps >= self._stages[0].warmup_steps
        made = Configuration(
            number=len(self._agreed), training=batch.training, micro_batches=batch.micro_batches, alike=tuple(alike),
            layouts=layouts, first_tag=self._tags, most_tensors=max(1, most), phases=1 if warm else _PHASES,
        )  # fmt: skip
        tags = self._tags + made.tags(self._stages[0].num_stages - 1)
        if tags > self._last_tag:
            agreement.linger()
            return None, f"no tags are left after the pipeline's {made.number} configurations"
        self._tags = tags
        return made, ""

    def _agreement(self) -> Agreement:
        """The next one among all stages."""
        return Agreement(self._group, f"{self._name}/{self._rounds}", self._limit)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Let ranks that wait for this one's statement know of an error before it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, _Conflict):
                self._agreement().give_up(str(error))
            elif not getattr(error, "on_all_ranks", False):
                name = self._names[dist.get_rank(self._group)]
                self._agreement().give_up(f"{name} gave up: {described(error)}")
            raise

    def _try_out(self, batch: Batch, variants: Sequence[int]) -> dict[int, dict[int, Layouts]]:
        """Layouts by stage and micro-batch, of which `variants` are the different ones: from stage to stage."""
        found: dict[int, dict[int, Layouts]] = {stage.stage_index: {} for stage in self._stages}
        for micro_batch in variants:
            outputs: Sequence[Any] = ()
            for stage in self._stages:
                inputs: Sequence[Any] = outputs
                if stage.is_first:
                    inputs = batch.args[micro_batch]
                elif stage.is_remote(stage.stage_index - 1):
                    with self._board.blaming(stage.rank_of(stage.stage_index - 1)):
                        inputs = stage.layouts_from_below()
                outputs = ()
                if not stage.is_last:  # whose outputs may be anything, and go nowhere
                    outputs = stage.trial(inputs, batch.kwargs[micro_batch], training=batch.training)
                if stage.is_remote(stage.stage_index + 1):
                    with self._board.blaming(stage.rank_of(stage.stage_index + 1)):
                        stage.layouts_to_above(outputs)
                tensors = tuple(layout_of(x) for x in inputs if isinstance(x, Tensor))
                found[stage.stage_index][micro_batch] = Layouts(tensors, tuple(outputs))
        return found


class _Conflict(AgreementError):
    """One that only this rank has noticed."""


def _checked(told: Any, source: int) -> tuple[int | None, str, dict[str, str]]:
    match told:
        case [None | int() as number, str(problem), dict(facts)] if (
            type(number) is not bool
            and (number is None or number >= 0)
            and all(isinstance(value, str) for value in facts.values())
        ):
            return number, problem, facts
    raise ValueError(f"rank {source} announced {str(told)[:80]}; allowed: a configuration")


def _source_facts(seen: Any, problem: str, declared: Layouts | None) -> dict[str, str]:
    """What only the rank with the first stage knows of a batch."""
    alike = [] if problem else [seen[1:].index(key) for key in seen[1:]]
    known = declared is not None and all(
        [x[:2] for x in given] == [(x.shape, x.dtype) for x in declared.inputs] for given, _ in seen[1:]
    )
    return {"alike": json.dumps(alike), "as declared": str(known), "problem": problem}


def _alike(stated: Mapping[str, str], micro_batches: int) -> list[int]:
    alike = json.loads(stated["alike"])
    if (
        isinstance(alike, list)
        and len(alike) == micro_batches
        and all(type(i) is int and 0 <= i < micro_batches for i in alike)
    ):
        return alike
    raise ValueError(f"stage 0 states micro-batches {str(alike)[:80]}; allowed: one number for each")


def _crossing(stage: LowBitStage, variants: Sequence[Layouts]) -> dict[str, str]:
    return {f"tensors from stage {stage.stage_index}": str(max(len(v.outputs) for v in variants))}


def _mode(batch: Batch) -> tuple[Any, ...]:
    """What else decides layouts: whether gradients are computed, and in what dtype autocast computes."""
    kinds = {x.device.type for x in tree_leaves(batch.args) if isinstance(x, Tensor)}
    cast = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
    return batch.training, *sorted(cast)


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    """What decides layouts further on."""
    return tuple((x.shape, x.dtype, x.stride(), x.requires_grad) for x in values if isinstance(x, Tensor))
