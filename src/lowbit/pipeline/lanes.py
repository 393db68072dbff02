"""The lanes of one stage, and the messages that cross on them in a pass.

A stage has up to four lanes (`Lane`, in `boundary`): two directions of two boundaries. Each message has a route of its
own: the neighbour's rank, and a channel that follows from the configuration of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.pipeline.arguments import Codecs, Step, codec_at
from lowbit.pipeline.boundary import Direction, Lane
from lowbit.pipeline.layouts import Layouts
from lowbit.pipeline.looking import Look
from lowbit.pipeline.numbering import Configuration
from lowbit.pipeline.states import Slot
from lowbit.pipeline.transport import Transport
from lowbit.wire.mailbox import Route


class Lanes:
    """All lanes of a stage.

    Args:
        stage, stages: index of the stage, and number of stages.
        device: where the tensors live.
        transport: of the messages.

    Raises:
        TypeError, ValueError: as `codec_at`.
    """

    def __init__(
        self, stage: int, stages: int, forward: Codecs, backward: Codecs, device: torch.device, transport: Transport
    ) -> None:
        self._stage, self._transport = stage, transport
        self._peers: Mapping[int, int] = {}
        self._lanes: dict[tuple[Direction, bool], Lane] = {}  # by direction, and whether they lead out of the stage
        directions: list[tuple[Direction, Any]] = [("forward", forward), ("backward", backward)]
        self._looks: dict[int, Look] = {}  # by boundary
        self._learned: dict[int, list[list[int]]] = {}  # by boundary and micro-batch: tensors that get gradients
        for boundary in range(max(0, stage - 1), min(stage, stages - 2) + 1):
            look = self._looks[boundary] = Look(stages - 1)
            for direction, codecs in directions:
                codec = codec_at(direction, codecs, boundary, stages - 1)
                outgoing = (direction == "forward") == (boundary == stage)
                lane = Lane(boundary, direction, codec, device, transport.traffic, transport.overhead, look)
                self._lanes[direction, outgoing] = lane
        self._notes: dict[tuple[int, int], Tensor] = {}  # for gradients to send, by tensor and micro-batch
        self._step, self._title = Step(), ""
        self._ranks: Sequence[str] = ()
        self._configuration: Configuration | None = None  # of this pass
        self._expected: set[tuple[Direction, int, int]] = set()  # receives of these are posted: configuration and phase

    def place(self, peers: Mapping[int, int]) -> None:
        """Set the ranks of neighbours on other ranks, by stage; nothing crosses to other neighbours."""
        self._peers = peers

    def keyed(self) -> Codec | None:
        """A codec that needs the sample ids of what crosses here, if there is one."""
        remote = [lane.codec for lane in self._lanes.values() if self._peer(lane) is not None]
        return next((codec for codec in remote if codec.needs_key), None)

    def end_step(self) -> None:
        """The pass before is over: what senders observed in it may count from now on."""
        self._notes.clear()
        for lane in self.by_name(outgoing_only=True).values():
            lane.states.end_step()

    def begin(self, step: Step, title: str, ranks: Sequence[str]) -> None:
        """A pass begins; its configuration is not known yet. title, ranks: names of it and of the ranks, for errors."""
        self._step, self._title, self._ranks = step, title, ranks

    def prepare(self, variants: Mapping[int, Layouts], training: bool) -> tuple[dict[str, str], str]:
        """Get ready for tensors that will cross; returns facts that both ends of a boundary must share, and faults.

        Args:
            variants: different layouts, by the first micro-batch that has each.
            training: whether gradients cross.
        """
        faults, facts = [], {}
        for lane in self._lanes.values():
            for first, layouts in variants.items():
                slots = self._slots(lane, layouts, training)
                try:
                    lane.prepare(slots, self._step)
                    lane.warm_up(slots)  # before anybody waits for a message
                    which = f" of micro-batch {first}" if len(variants) > 1 else ""
                    facts |= {f"{name}{which}": fact for name, fact in lane.facts(slots).items()}
                except (TypeError, ValueError) as error:
                    text = str(error)
                    faults.append(text if text.startswith(lane.name) else f"{lane.name}: {text}")
        fault = "; ".join(dict.fromkeys(faults))
        most = max(len(layouts.outputs) for layouts in variants.values())
        return facts | {"codecs": fault or "fit what crosses", f"tensors from stage {self._stage}": str(most)}, fault

    def use(self, configuration: Configuration, step: Step | None = None) -> None:
        """Use a configuration in this pass; or, if `step` is given, expect it in the next pass, with that step.

        The transport posts receives, unless it has. If the next pass turns out to be another one, they wait for the
        next pass of this configuration: each has tags of its own.
        """
        self._step, self._configuration = step or self._step, configuration
        layouts = configuration.layouts[self._stage]
        for boundary, look in self._looks.items():
            crossing = [each.outputs if boundary == self._stage else each.inputs for each in layouts]
            self._learned[boundary] = [[i for i, x in enumerate(each) if x.requires_grad] for each in crossing]
            look.use(self._learned[boundary])
        for lane in self._lanes.values():
            lane.use([self._slots(lane, each, configuration.training) for each in layouts])
        now = configuration.number, self._step.phase
        for (direction, outgoing), lane in self._lanes.items():
            if outgoing or (direction, *now) in self._expected or (lane.codec.needs_key and step):
                continue  # samples that are not known yet decide sizes
            self._expected.add((direction, *now))
            micro_batches = range(configuration.micro_batches)
            messages = (message for i in micro_batches for message in self._messages(lane, i))
            self._transport.expect(messages)
        if step is None:
            self._expected = {key for key in self._expected if key[1:] != now}

    def send(self, direction: Direction, micro_batch: int, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        """Send tensors to the neighbour; returns operations that the schedule shall run."""
        lane, ops = self._lanes[direction, True], []
        for index, tensor in enumerate(tensors):
            with self._transport.leaving(tensor):
                note = self._notes.pop((index, micro_batch), None) if direction == "backward" else None
                if note is not None and note.is_cuda:  # made on the stream of what arrives
                    note.record_stream(torch.cuda.current_stream(note.device))
                message = lane.encode(index, self._step, micro_batch, tensor, room=self._transport.room, note=note)
                if message.numel():
                    ops += self._transport.send(self._route(lane, micro_batch, index), message)
        return ops

    def receive(self, direction: Direction, micro_batch: int) -> list[dist.P2POp]:
        """Prepare to receive; returns operations that the schedule shall run and wait for."""
        messages = self._messages(self._lanes[direction, False], micro_batch)
        return [op for route, nbytes in messages for op in self._transport.receive(route, nbytes)]

    def take(self, direction: Direction, micro_batch: int, layouts: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the neighbour sent, with these layouts."""
        lane, tensors = self._lanes[direction, False], []
        for index, layout in enumerate(layouts):
            with self._transport.arriving():
                tensors.append(self._transport.landing(layout))
                if nbytes := lane.nbytes(index, self._step, micro_batch):
                    payload = self._transport.take(self._route(lane, micro_batch, index), nbytes)
                    lane.decode(index, self._step, micro_batch, payload, tensors[-1])
                    self._observe(direction, index, micro_batch, tensors[-1])
        return tensors

    def _observe(self, direction: Direction, index: int, micro_batch: int, tensor: Tensor) -> None:
        """Show a tensor that arrived to the lane that leads back."""
        if direction == "backward":
            sent = self._learned[self._stage][micro_batch][index]
            self._lanes["forward", True].observe(sent, micro_batch, tensor)
        elif self._step.training and index in (learned := self._learned[self._stage - 1][micro_batch]):
            place = learned.index(index)
            note = self._lanes["backward", True].observe(place, micro_batch, tensor)
            if note is not None:
                self._notes[place, micro_batch] = note

    def raise_rates(self, bits: float) -> None:
        """Raise the rates that were chosen by `bits` per element. No receives may be posted ahead."""
        for lane in self._lanes.values():
            lane.states.raise_rates(bits)

    def forward(self, outgoing: bool) -> Lane:
        """The lane of activations to the next stage, or from the one before.

        Raises:
            ValueError: there is no stage on that side.
        """
        if ("forward", outgoing) not in self._lanes:
            raise ValueError(f"outgoing is {outgoing}; stage {self._stage} ends the pipeline there")
        return self._lanes["forward", outgoing]

    def by_name(self, *, outgoing_only: bool = False) -> dict[str, Lane]:
        """All lanes, or those that lead out of this stage, by name."""
        return {lane.name: lane for (_, out), lane in self._lanes.items() if out or not outgoing_only}

    def _slots(self, lane: Lane, layouts: Layouts, training: bool) -> list[Slot]:
        """Shapes and dtypes of the tensors that cross on a lane; none to a neighbour on this rank."""
        if self._peer(lane) is None:
            return []
        crossing = layouts.outputs if lane.boundary == self._stage else layouts.inputs
        if lane.direction == "backward":
            crossing = [x for x in crossing if x.requires_grad and training]
        return [(x.shape, x.dtype) for x in crossing]

    def _peer(self, lane: Lane) -> int | None:
        return self._peers.get(self._stage + 1 if lane.boundary == self._stage else self._stage - 1)

    def _messages(self, lane: Lane, micro_batch: int) -> list[tuple[Route, int]]:
        """Where the messages of a micro-batch come from, and their sizes."""
        sizes = [lane.nbytes(i, self._step, micro_batch) for i in range(lane.messages(micro_batch))]
        return [(self._route(lane, micro_batch, index), nbytes) for index, nbytes in enumerate(sizes) if nbytes]

    def _route(self, lane: Lane, micro_batch: int, index: int) -> Route:
        peer, backward = self._peer(lane), lane.direction == "backward"
        assert self._configuration is not None  # within a pass
        assert peer is not None
        channel = self._configuration.channel(lane.boundary, backward, self._step.phase, micro_batch, index)
        sender = self._ranks[peer if backward == (lane.boundary == self._stage) else self._transport.rank]
        about = f"{lane.name}, micro-batch {micro_batch}, tensor {index}, {self._title}: the message from {sender}"
        return Route(peer, channel, about)
