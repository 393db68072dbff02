"""The lanes of one stage (up to four `Lane`s: two directions of two boundaries), and the messages of a pass."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from lowbit.escape import printable
from lowbit.pipeline.anchors import TokenAnchor
from lowbit.pipeline.arguments import Codecs, StepKind, codec_at
from lowbit.pipeline.boundary import Direction, Lane, Slot
from lowbit.pipeline.layouts import Batch, Configuration, Constant, Layouts
from lowbit.pipeline.transport import Transport
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Route


class Lanes:
    """One stage's side of all passes: its lanes, the transport of their messages, and the count of training steps.

    Attributes:
        steps: training steps so far.
        samples: ids of the next training step's batch, for codecs that need them.
        anchor: configuration of token anchors.
        tokens: token ids of the next pass's batch, int64 (batch, sequence).
        stated: fact about this pass's tokens, which all ranks must share; stated_samples: about its samples.
        changed: the ranks must agree again, because codecs or their states have been replaced.
        peers: ranks of the neighbours on other ranks, by stage; nothing crosses to other neighbours.
        group, traffic, drain, sever: those of the transport.
        code_constants: whether constants are coded as activations are, instead of sent exactly.
    """

    def __init__(
        self, stage: int, stages: int, forward: Codecs, backward: Codecs, device: torch.device,
        transport: Transport, warmup_steps: int, code_constants: bool, anchor: TokenAnchor | None = None,
    ) -> None:  # fmt: skip
        self._stage, self._stages, self._device = stage, stages, device
        self.code_constants = code_constants
        self.transport, self.warmup_steps, self.steps = transport, warmup_steps, 0
        self.group, self.traffic = transport.group, transport.traffic
        self.drain, self.sever = transport.drain, transport.sever
        self.samples: Tensor | None = None
        self.anchor, self.stated, self.stated_samples = anchor, "none", ""
        self.tokens: Tensor | None = None
        self.peers: Mapping[int, int] = {}
        self._lanes: dict[tuple[Direction, bool], Lane] = {}
        self.set_codecs(forward, backward)

    def set_codecs(self, forward: Codecs, backward: Codecs, *, keep_state: bool = False) -> None:
        lanes: dict[tuple[Direction, bool], Lane] = {}  # by direction, and whether they lead out of the stage
        directions: list[tuple[Direction, Codecs]] = [("forward", forward), ("backward", backward)]
        for boundary in range(max(0, self._stage - 1), min(self._stage, self._stages - 2) + 1):
            for direction, codecs in directions:
                codec = codec_at(direction, codecs, boundary, self._stages - 1)
                outgoing = (direction == "forward") == (boundary == self._stage)
                traffic, overhead = self.transport.traffic, self.transport.overhead
                lane = Lane(boundary, direction, codec, self._device, traffic, overhead, self.anchor)
                before = self._lanes.get((direction, outgoing))
                if keep_state and before:
                    lane.states.load_state_dict(before.states.state_dict())
                lane.anchors = before.anchors if before else lane.anchors
                lanes[direction, outgoing] = lane
        self._lanes, self.changed = lanes, True
        self._learned: dict[int, list[list[int]]] = {}  # by boundary and micro-batch: tensors that get gradients
        self._routes: dict[Lane, list[list[Route]]] = {}  # of this pass, by micro-batch and tensor
        self._notes: dict[tuple[int, int], Tensor] = {}  # for gradients to send, by tensor and micro-batch
        self._expected: set[tuple[Direction, int, int]] = set()  # posted receives: direction, configuration, phase

    def begin(
        self, board: FailureBoard, number: int, batch: Batch, peers: Mapping[int, int], ranks: Sequence[str]
    ) -> None:
        """Begin pass `number`, whose configuration is not known yet; ValueError if sample ids are missing."""
        self._notes.clear()
        for lane in self.by_name(outgoing_only=True).values():
            lane.states.end_step()  # before other streams of a GPU wait for this one
        self.transport.begin(board, number)
        self.peers, self._ranks = peers, ranks
        self._step = self._kind(batch.training)
        tokens, self.tokens, self.stated, self.stated_samples = self.tokens, None, "none", ""
        if self.anchor is not None and tokens is not None:
            self.stated = self.anchor.stated(tokens)
            self._step = replace(self._step, tokens=tokens.tensor_split(batch.micro_batches))  # as the schedule splits
        self._title = f"step {self.steps + 1}" if batch.training else f"evaluation after step {self.steps}"
        if not batch.training:
            return
        samples, self.samples = self.samples, None
        crossing = [lane.codec for lane in self._lanes.values() if self._peer(lane) is not None]
        keyed = next((codec for codec in crossing if codec.needs_key), None)
        if keyed is not None and not self._step.full_precision:
            if samples is None:
                raise ValueError(f"{keyed} needs set_samples(ids) before every training step")
            self.stated_samples = f"{len(samples)} with digest {xxhash.xxh3_64_hexdigest(samples.numpy().tobytes())}"
            parts = samples.tensor_split(batch.micro_batches)  # as the schedule splits the batch
            self._step = replace(self._step, samples=[part.tolist() for part in parts])

    def prepare(self, variants: Mapping[int, Layouts], training: bool) -> dict[str, str]:
        """Get ready for tensors that will cross; return facts that both ends of a boundary must share.

        "codecs of stage ...": why they cannot code what crosses, a line for each reason.

        `variants`: different layouts, by the first micro-batch that has each.
        """
        faults, facts = [], {}
        for lane in self._lanes.values():
            try:
                crossing = [slot for layouts in variants.values() for slot in self._slots(lane, layouts, training)]
                lane.check_tokens(crossing, self._step.tokens)
                lane.check_samples(crossing, self._step.samples)
            except ValueError as error:
                faults.append(str(error))
            for first, layouts in variants.items():
                slots = self._slots(lane, layouts, training)
                try:
                    lane.prepare(slots)
                    lane.warm_up(slots)  # before any rank waits for a message
                    which = f" of micro-batch {first}" if len(variants) > 1 else ""
                    facts |= {f"{name}{which}": fact for name, fact in lane.facts(slots).items()}
                except (TypeError, ValueError) as error:
                    text = str(error)
                    faults.append(text if text.startswith(lane.name) else f"{lane.name}: {text}")
        facts[f"codecs of stage {self._stage}"] = "\n".join(dict.fromkeys(faults))
        facts[f"tensors from stage {self._stage}"] = str(max(len(each.outputs) for each in variants.values()))
        return facts

    def use(self, configuration: Configuration, *, ahead: bool = False) -> None:
        """Use a configuration in this pass; or, if `ahead`, expect it in the next pass, a whole round trip ahead.

        The transport posts receives that are not posted yet. If the next pass has another configuration, they wait for
        the next pass of this one: each configuration has its own tags.
        """
        if ahead:
            self._step = self._kind(configuration.training)
        layouts = configuration.layouts[self._stage]
        for boundary in (self._stage - 1, self._stage):
            crossing = [each.outputs if boundary == self._stage else each.inputs for each in layouts]
            self._learned[boundary] = [[i for i, x in enumerate(each) if x.requires_grad] for each in crossing]
        now = configuration.number, self._step.phase
        for (direction, outgoing), lane in self._lanes.items():
            lane.use([self._slots(lane, each, configuration.training) for each in layouts])
            self._routes[lane] = self._routes_of(lane, outgoing, configuration)
            if outgoing or (direction, *now) in self._expected or (lane.codec.needs_key and ahead):
                continue  # sizes depend on samples that are not known yet
            self._expected.add((direction, *now))
            micro_batches = range(len(self._routes[lane]))
            self.transport.expect(message for i in micro_batches for message in self._messages(lane, i))
        if not ahead:
            self.changed = False  # the ranks have agreed on it
            self._expected = {key for key in self._expected if key[1:] != now}
            self.steps += configuration.training
            if self.anchor is not None and configuration.training and self.steps == self.warmup_steps:
                self.changed = True  # in the next pass, the ends of boundaries compare their fits, which are final then

    def send(self, direction: Direction, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        lane = self._lanes[direction, True]
        for index, tensor in enumerate(tensors):
            with self.transport.leaving(tensor):
                note = self._notes.pop((index, micro_batch), None) if direction == "backward" else None
                if note is not None and note.is_cuda:  # computed on the stream of arriving tensors
                    note.record_stream(torch.cuda.current_stream(note.device))
                message = lane.encode(index, self._step, micro_batch, tensor, room=self.transport.room, note=note)
                if message.numel():
                    self.transport.send(self._routes[lane][micro_batch][index], message)

    def take(self, direction: Direction, micro_batch: int, layouts: Sequence[Tensor]) -> list[Tensor]:
        lane, tensors = self._lanes[direction, False], []
        for index, layout in enumerate(layouts):
            with self.transport.arriving():
                tensors.append(self.transport.landing(layout))
                if nbytes := lane.nbytes(index, self._step, micro_batch):
                    payload = self.transport.take(self._routes[lane][micro_batch][index], nbytes)
                    lane.decode(index, self._step, micro_batch, payload, tensors[-1])
                    self._observe(direction, index, micro_batch, tensors[-1])
        return tensors

    def _observe(self, direction: Direction, index: int, micro_batch: int, tensor: Tensor) -> None:
        if direction == "backward":
            sent = self._learned[self._stage][micro_batch][index]
            self._lanes["forward", True].observe(sent, micro_batch, tensor)
        elif self._step.training and index in (learned := self._learned[self._stage - 1][micro_batch]):
            place = learned.index(index)
            note = self._lanes["backward", True].observe(place, micro_batch, tensor)
            if note is not None:
                self._notes[place, micro_batch] = note

    def load_state(self, steps: int, states: Mapping[str, Any], anchors: Mapping[str, Any]) -> None:
        """Set the steps so far, and states of codecs and anchors by lane; ValueError: of another stage or codec."""
        lanes = self.by_name()
        if unknown := sorted({*states, *anchors} - set(lanes)):
            raise ValueError(f"state has {printable(', '.join(unknown))}; this stage has {', '.join(lanes)}")
        for name in anchors:
            if lanes[name].anchors is None:
                raise ValueError(f"state has a token anchor for {name}; allowed: with LowBitStage(anchor=...)")
        before: dict[str, Any] = {}
        with contextlib.suppress(ValueError, RuntimeError):  # a session that a wrong message has reached has no state
            before = {name: lane.state_dict() for name, lane in lanes.items()}
        try:
            for name, lane in lanes.items():
                lane.load_state_dict(states.get(name, {}), anchors.get(name, {}))
        except BaseException:  # a program may go on without the state
            for name, lane in lanes.items():
                lane.load_state_dict(*before.get(name, ({}, {})))
            raise
        self.steps, self.changed = steps, True

    def forward(self, outgoing: bool) -> Lane:
        if ("forward", outgoing) not in self._lanes:
            raise ValueError(f"outgoing is {outgoing}; stage {self._stage} has no neighbour on that side")
        return self._lanes["forward", outgoing]

    def by_name(self, *, outgoing_only: bool = False) -> dict[str, Lane]:
        return {lane.name: lane for (_, out), lane in self._lanes.items() if out or not outgoing_only}

    def _kind(self, training: bool) -> StepKind:
        renewing = training and self.anchor is not None and self.anchor.renews(self.steps, self.warmup_steps)
        return StepKind(training, self.steps < self.warmup_steps, renewing=renewing)

    def _slots(self, lane: Lane, layouts: Layouts, training: bool) -> list[Slot]:
        """Shapes and dtypes of the tensors that cross on a lane; none cross to a neighbour on this rank."""
        if self._peer(lane) is None:
            return []
        crossing = layouts.outputs if lane.boundary == self._stage else layouts.inputs
        if lane.direction == "backward":
            crossing = [x for x in crossing if x.requires_grad and training]
        return [Slot(x.shape, x.dtype, isinstance(x, Constant) and not self.code_constants) for x in crossing]

    def _peer(self, lane: Lane) -> int | None:
        return self.peers.get(self._stage + 1 if lane.boundary == self._stage else self._stage - 1)

    def _messages(self, lane: Lane, micro_batch: int) -> list[tuple[Route, int]]:
        routes = enumerate(self._routes[lane][micro_batch])
        sized = [(route, lane.nbytes(index, self._step, micro_batch)) for index, route in routes]
        return [(route, nbytes) for route, nbytes in sized if nbytes]

    def _routes_of(self, lane: Lane, outgoing: bool, configuration: Configuration) -> list[list[Route]]:
        peer, phase, backward = self._peer(lane), self._step.phase, lane.direction == "backward"
        if peer is None:
            return []
        sender = self._ranks[self.transport.rank if outgoing else peer]
        return [
            [
                Route(
                    peer,
                    configuration.channel(lane.boundary, backward, phase, micro_batch, index),
                    f"{lane.name}, micro-batch {micro_batch}, tensor {index}, {self._title}: the message from {sender}",
                )
                for index in range(lane.messages(micro_batch))
            ]
            for micro_batch in range(configuration.micro_batches)
        ]
