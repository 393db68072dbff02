"""The passes of a pipeline as one rank runs them, and the agreement on each kind of pass before its first byte.

The rank with the first stage announces each pass's configuration (`Configuration`); a known one costs nothing more.
On a new one all ranks agree; if layouts are not declared, after each stage has run its module once (a trial).
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import __version__
from lowbit.escape import lines
from lowbit.pipeline import hooks
from lowbit.pipeline.hooks import HookedStage
from lowbit.pipeline.lanes import Lanes
from lowbit.pipeline.layouts import Batch, Configuration, Layouts, layout_of, receive_layouts, send_layouts
from lowbit.wire.agreement import Agreement, contradictions
from lowbit.wire.checksum import Checksums, agreed_facts
from lowbit.wire.errors import AgreementError, PeerError, described
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Expected, Mailbox, Route, Sent
from lowbit.wire.tags import ANNOUNCEMENTS, PIPELINES


class Passes:
    """All passes of the `stages` of pipeline `number` that this rank holds, ascending. `limit`: seconds to wait."""

    def __init__(
        self, stages: Sequence[HookedStage], group: dist.ProcessGroup, number: int, limit: float, checksums: Checksums
    ) -> None:
        carrier, topic, self._limit = stages[0].lanes.group, f"pipeline {number}", limit
        self._channels, (channel,) = PIPELINES.channels(number), ANNOUNCEMENTS.channels(number)
        # Set only within a pass: the stages refer to this, and a reference back would keep a group's connections open.
        self._stages: Sequence[HookedStage] = ()
        # Read here, not earlier: a V schedule places the stages only after they are created.
        self._places = places = _Places(dict(stages[0].stage_index_to_group_rank), group)
        self._board = FailureBoard(group, topic, places.names, limit)
        mailbox = Mailbox(carrier, checksums, self._board)
        self._announcements = _Announcements(mailbox, places.source, places.names[places.source], channel)
        self._agreements = (Agreement(group, f"{topic}/{i}", limit) for i in count())  # one for each exchange of facts
        self._agreement: Agreement  # the last one
        self._known: dict[Any, int] = {}  # on the rank with the first stage: configurations by kind of batch
        self._agreed: list[Configuration] = []
        self._last: dict[tuple[bool, int], tuple[Configuration, bool]] = {}  # and whether it was used twice in a row
        self._pass_number = 0
        self._loaded = False  # codec states have been loaded, and the ranks have not compared them
        self._broken = ""

    def run(self, stages: Sequence[HookedStage], batch: Batch, body: Callable[[], None], *, ahead: bool) -> None:
        """Run a pass: what the ranks must agree on, then `body`, then, if `ahead`, receives of the next pass."""
        if self._broken:
            raise RuntimeError(
                f"a step of this pipeline ended early ({self._broken}); start again with a new process group"
            )
        self._stages, refusal = stages, ""
        try:
            try:
                self._begin(batch)
            except _Refused as error:
                refusal = str(error)
            except Exception as error:  # the other ranks wait for this rank's statement
                conflict = isinstance(error, _Conflict)
                if conflict or not getattr(error, "on_all_ranks", False):
                    why = str(error) if conflict else f"{self._board.own_name} gave up: {described(error)}"
                    next(self._agreements).give_up(why)
                raise
            else:
                body()
                self._end(batch, ahead)
            self._announcements.finish()
        except BaseException as error:
            self._broken = described(error)
            if not getattr(error, "on_all_ranks", False) or isinstance(error, _Conflict):
                self._board.give_up(error, self._stages[0].lanes.sever)
            if isinstance(error, _Conflict):
                raise AgreementError(str(error)) from None
            raise
        finally:
            self._stages = ()
        if refusal:
            raise ValueError(lines(refusal))

    def _begin(self, batch: Batch) -> None:
        self._pass_number += 1
        for stage in self._stages:
            peers = self._places.peers(stage.stage_index)
            stage.lanes.begin(self._board, self._pass_number, batch, peers, self._places.names)
        if any(stage.lanes.changed for stage in self._stages):  # each configuration must be agreed on again
            self._known.clear()
            self._last.clear()
            self._loaded = bool(self._agreed)
        seen, problem = (), ""
        if self._places.is_source and not (problem := batch.problem()):
            settings, *inputs = batch.keys()
            lanes = self._stages[0].lanes
            ids = lanes.stated.partition("[")[0], lanes.stated_samples.partition(" ")[0]  # how many there are
            seen = ((*settings, *ids), *inputs)
        number = self._announced(batch, seen, problem) if self._agreed else None
        if number is None:
            self._agreed.append(self._agree(batch, seen, problem))
            self._loaded = False
            number = self._known[seen] = len(self._agreed) - 1
        configuration, kind = self._agreed[number], (batch.training, batch.micro_batches)
        self._last[kind] = configuration, self._last.get(kind, (None, False))[0] is configuration
        for stage in self._stages:
            stage.use(configuration.layouts[stage.stage_index])
            stage.lanes.use(configuration)

    def _end(self, batch: Batch, ahead: bool) -> None:
        for stage in self._stages:
            stage.lanes.drain()
        likely, again = self._last[batch.training, batch.micro_batches]
        # Only a configuration that repeats: a receive that is posted in vain takes memory until its message comes.
        if again and ahead and not any(stage.lanes.changed for stage in self._stages):
            for stage in self._stages:
                stage.lanes.use(likely, ahead=True)

    def _facts(self, batch: Batch) -> dict[str, str]:
        ids = {stage.lanes.stated for stage in self._stages}
        samples = {stage.lanes.stated_samples for stage in self._stages} - {""}
        return {
            "kind of pass": "training" if batch.training else "evaluation",
            "micro-batches": str(batch.micro_batches),
            "training steps so far": str(self._stages[0].lanes.steps),
            **({"token ids": ", ".join(sorted(ids))} if self._stages[0].lanes.anchor else {}),
            **({"sample ids": ", ".join(sorted(samples))} if samples else {}),
        }

    def _identity(self, lanes: Lanes) -> dict[str, str]:
        codecs = {name: lane.codec for name, lane in lanes.by_name().items()}
        return {
            "lowbit version": __version__,
            # Versions differ in which declared tensors they take to need a gradient.
            "torch version": ".".join(torch.__version__.split(".")[:2]),
            "number of stages": str(len(self._places.by_stage)),
            "stages by rank": str(self._places.held),
            "warm-up steps": str(lanes.warmup_steps),
            "constants": "coded" if lanes.code_constants else "exact",
            "token anchor": str(lanes.anchor or "none"),
            **agreed_facts(lanes.transport.overhead > 0),
            **{f"{name} codec": f"{codec} [{codec.fingerprint()}]" for name, codec in codecs.items()},
        }

    def _announced(self, batch: Batch, seen: Any, problem: str) -> int | None:
        """Announce or receive the number of this pass's configuration; None if it is new."""
        name = self._places.names[self._places.source]
        facts, traffic = self._facts(batch), self._stages[0].lanes.traffic
        if self._places.is_source:
            number = self._known.get(seen)
            traffic.announced_bytes += self._announcements.send(self._pass_number, [number, problem, facts])
        else:
            with traffic.timing("wait_seconds", message="the announcement of the pass"):
                announcement = self._announcements.receive(self._pass_number)
            number, problem, theirs = _checked(announcement, name)
            here = self._board.own_name
            if conflict := contradictions({name: theirs, here: facts}):
                raise _Conflict(conflict)
            if number is not None and self._loaded:
                raise _Conflict(f"the ranks do not agree:\n  codec state: loaded on {here}; not on {name}")
            if number is not None and number >= len(self._agreed):
                raise _Conflict(
                    f"the ranks do not agree:\n  configurations so far: more than {number} on {name}; "
                    f"{len(self._agreed)} on {here}"
                )
        if problem:
            raise _Refused(problem)
        return number

    def _agree(self, batch: Batch, seen: Any, problem: str) -> Configuration:
        declared = {s.stage_index: {} if s.declared is None else {0: s.declared} for s in self._stages}
        facts = {stage.stage_index: self._identity(stage.lanes) | self._facts(batch) for stage in self._stages}
        for index, layouts in declared.items():
            facts[index][f"declared by stage {index}"] = str(bool(layouts))
        if self._places.is_source:  # only it knows the inputs; alike: for each micro-batch, the first one like it
            keys, first = seen[1:], self._stages[0].declared
            as_declared = first is not None and all(
                [x[:2] for x in inputs] == [(x.shape, x.dtype) for x in first.inputs] for inputs, _ in keys
            )
            alike = json.dumps([keys.index(key) for key in keys])
            facts[0] |= {"alike": alike, "as declared": str(as_declared), "problem": problem}
        stated = self._exchange(facts, declared, batch.training)
        if problem := stated[0].get("problem", ""):
            self._refuse(problem)
        alike = _alike(stated[0], batch.micro_batches)
        if stated[0]["as declared"] == "True" and all(
            of_stage.get(f"declared by stage {index}") == "True" for index, of_stage in stated.items()
        ):
            alike, variants = [0] * batch.micro_batches, declared
        else:
            # A trial costs a forward pass of each stage, so micro-batches that are alike share one.
            variants = self._try_out(batch, sorted(set(alike)))
            stated = self._exchange({index: {} for index in variants}, variants, batch.training)
        faults = (of_stage[f"codecs of stage {index}"] for index, of_stage in sorted(stated.items()))
        if fault := "; ".join(dict.fromkeys(text for each in faults for text in each.splitlines())):
            self._refuse(fault)
        most = max(int(of_stage[f"tensors from stage {index}"]) for index, of_stage in stated.items())
        layouts = {index: [by_first[i] for i in alike] for index, by_first in variants.items()}
        number, lanes = len(self._agreed), self._stages[0].lanes
        configuration = Configuration(
            number=number, training=batch.training, micro_batches=batch.micro_batches, layouts=layouts,
            first_channel=self._channels.start, most_tensors=max(1, most),
            phases=3 if lanes.anchor and lanes.anchor.renew else 2 if lanes.steps < lanes.warmup_steps else 1,
        )  # fmt: skip
        if (taken := configuration.channels(len(self._places.by_stage) - 1)) > len(self._channels):
            self._refuse(f"the pipeline has no tags left for another configuration after {number} of them")
        self._channels = self._channels[taken:]
        return configuration

    def _exchange(
        self, facts: dict[int, dict[str, str]], variants: Mapping[int, Mapping[int, Layouts]], training: bool
    ) -> dict[int, Mapping[str, str]]:
        """Exchange facts of stages and their layouts; return those of all stages."""
        for stage in self._stages:
            if layouts := variants[stage.stage_index]:
                facts[stage.stage_index] |= stage.lanes.prepare(layouts, training)
        self._agreement = next(self._agreements)
        return self._agreement.exchange(facts, self._places.stage_names)

    def _refuse(self, problem: str) -> Never:
        self._agreement.linger()
        raise _Refused(problem)

    def _try_out(self, batch: Batch, variants: Sequence[int]) -> dict[int, dict[int, Layouts]]:
        """Find layouts by stage and micro-batch, for the micro-batches in `variants`, by trials from stage to stage."""
        layouts: dict[int, dict[int, Layouts]] = {stage.stage_index: {} for stage in self._stages}
        for micro_batch in variants:
            outputs: Sequence[Any] = ()
            for stage in self._stages:
                index, inputs, lanes = stage.stage_index, outputs, stage.lanes
                peers = lanes.peers
                if stage.is_first:
                    inputs = batch.args[micro_batch]
                elif index - 1 in peers:
                    peer = peers[index - 1]
                    with self._board.blaming(peer):
                        inputs = receive_layouts(lanes.group, peer, self._places.names[peer], self._limit)
                outputs = ()
                if not stage.is_last:  # outputs of the last stage may be anything, as they are not sent
                    outputs = hooks.trial(stage, inputs, batch.kwargs[micro_batch], training=batch.training)
                if index + 1 in peers:
                    with self._board.blaming(peers[index + 1]):
                        send_layouts(outputs, lanes.group, peers[index + 1], self._limit)
                tensors = tuple(layout_of(x) for x in inputs if isinstance(x, Tensor))
                layouts[index][micro_batch] = Layouts(tensors, tuple(outputs))
        return layouts


class _Places:
    """Ranks of a pipeline's stages (`held`: by rank; `source`: with the first one), and what errors call both."""

    def __init__(self, by_stage: Mapping[int, int], group: dist.ProcessGroup) -> None:
        self.by_stage, self.rank, self.source = by_stage, group.rank(), by_stage[0]
        self.is_source = self.rank == self.source
        ranks = dist.get_process_group_ranks(group)
        self.held = [sorted(s for s, r in by_stage.items() if r == rank) for rank in range(len(ranks))]
        self.names = [
            f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
            for rank, stages in zip(ranks, self.held, strict=True)
        ]
        self.stage_names = [f"rank {ranks[by_stage[i]]} (stage {i})" for i in range(len(by_stage))]

    def peers(self, stage: int) -> dict[int, int]:
        """Ranks of the neighbours on other ranks, by stage."""
        ranks = {i: self.by_stage.get(i, self.rank) for i in (stage - 1, stage + 1)}
        return {i: rank for i, rank in ranks.items() if rank != self.rank}


class _Conflict(AgreementError):
    """A disagreement that only this rank has noticed."""


class _Refused(Exception):
    """A batch that all ranks refuse; the pipeline can continue with another one."""


def _checked(announcement: Any, source: str) -> tuple[int | None, str, dict[str, str]]:
    match announcement:
        case [None | int() as number, str(problem), dict(facts)] if (
            type(number) is not bool
            and (number is None or number >= 0)
            and all(isinstance(value, str) for value in facts.values())
        ):
            return number, problem, facts
    raise ValueError(f"{source} announced {str(announcement)[:80]!r}; allowed: a configuration")


def _alike(stated: Mapping[str, str], micro_batches: int) -> list[int]:
    alike = json.loads(stated["alike"])
    fits = isinstance(alike, list) and len(alike) == micro_batches
    if not fits or any(type(i) is not int or not 0 <= i < micro_batches for i in alike):
        raise ValueError(f"stage 0 states micro-batches {str(alike)[:80]!r}; allowed: one number for each")
    return alike


_ANNOUNCEMENT_BYTES = 512
"""Bytes of the message, without its checksum: JSON, padded with blanks."""

_AHEAD = 4  # receives posted ahead: the first stage may be this many passes ahead of the last


class _Announcements:
    """Messages of the first stage's rank; each takes half a round trip: receives are posted ahead of their passes."""

    def __init__(self, mailbox: Mailbox, source: int, name: str, channel: int) -> None:
        self._mailbox, self._source, self._name, self._channel = mailbox, source, name, channel
        self._sent: list[Sent] = []
        self._expected: deque[Expected] = deque()

    def send(self, number: int, value: Any) -> int:
        text = json.dumps(value).encode()
        if len(text) > _ANNOUNCEMENT_BYTES:
            raise ValueError(f"an announcement has {len(text)} bytes; allowed: {_ANNOUNCEMENT_BYTES}")
        padded = text.ljust(_ANNOUNCEMENT_BYTES) + bytes(self._mailbox.checksums.room)
        message = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        others = [self._route(rank, number) for rank in range(self._mailbox.group.size()) if rank != self._source]
        self._sent += self._mailbox.send(message, (number, self._source, self._channel), *others)
        return len(others) * message.numel()

    def receive(self, number: int) -> Any:
        while len(self._expected) < _AHEAD:
            coming = number + len(self._expected)
            place = coming, self._source, self._channel
            self._expected.append(self._mailbox.expect(self._route(self._source, coming), _ANNOUNCEMENT_BYTES, place))
        return _parsed(self._expected.popleft().wait().numpy().tobytes(), self._source, self._name)

    def finish(self) -> None:
        while self._sent:
            self._sent.pop().wait()

    def _route(self, peer: int, number: int) -> Route:
        return Route(peer, self._channel, f"the announcement of pass {number} from {self._name}")


def _parsed(text: bytes, source: int, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"{name} sent an announcement that is not JSON: {error}", source) from None
