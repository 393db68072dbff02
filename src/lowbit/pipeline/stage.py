"""`LowBitStage`: a pipeline stage whose activations and gradients cross to its neighbours in few bits."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import __version__
from lowbit.codecs.base import Codec, Session, check_int
from lowbit.collectives.agreement import Agreement, default_group
from lowbit.collectives.checksum import Checksums, agreed_facts, check_checksums
from lowbit.collectives.failure import FailureBoard
from lowbit.pipeline.boundary import (
    Direction,
    Lane,
    Step,
    check_warm_up,
    checked_samples,
    codec_at,
    keys_of,
)
from lowbit.pipeline.hooks import HookedStage
from lowbit.pipeline.numbering import pipeline_number, rank_names
from lowbit.pipeline.traffic import Traffic
from lowbit.pipeline.transport import Route, choose

_TAG_BASE = 1 << 29  # away from the small tags that a program may use itself
_MOST_TENSORS, _MOST_MICRO_BATCHES = 1 << 6, 1 << 12  # what fits into a tag, with 1024 boundaries


class LowBitStage(HookedStage):
    """Drop-in for `torch.distributed.pipelining.PipelineStage`, under every schedule of PyTorch.

    Between this stage and each neighbour on another rank, floating tensors travel as payloads of a codec; integer and
    boolean tensors travel as they are. A neighbour on the same rank (V schedules) gets the tensor itself: no bytes
    travel there, so no codec is applied. Evaluation (`schedule.eval`) uses the forward codec as training does, except
    for codecs that know only the samples they are trained on (AQSGD): those evaluate at full precision.

    With Gloo, all receives of a step are posted when it starts and sends are not waited for before it ends, so that the
    link carries both directions while the ranks compute; other backends keep the schedule's order (see `transport`).
    From and to a GPU, Gloo's payloads pass through pinned memory of the host, coded and copied beside the computation.
    A stage's output is read there after `forward` has returned: nothing may write to its memory before the step ends,
    as replaying a CUDA graph would.

    Before the first byte, all ranks compare codecs, versions, shapes and payload sizes; see `AgreementError`.

    Args:
        submodule, stage_index, num_stages, device, and everything else without a default below: as for
            `PipelineStage`, positional or by keyword (`input_args`, `output_args`, `group`, `dw_builder`, ...).
        forward: format of activations: one codec, or a mapping from boundary index (i: between stages i and i + 1).
        backward: format of gradients, likewise.
        warmup_steps: so many calls of `schedule.step`, from the first, send everything in its own dtype. At least 1 for
            a codec that leaves something to choose, such as `SubspaceQuant(rank="auto")`: it is settled in the last.
        timeout: seconds after which a rank that does not come or answer is an error.
        checksums: whether 8 bytes behind each payload tell if it arrived as it was sent; the same on all ranks.

    Raises:
        TypeError, ValueError: an argument that cannot be; the text names it.
        AgreementError: (in the first step) ranks that contradict each other or are missing, the same on every rank.
        DamagedError: (in any step) what a neighbour sent did not arrive as it was; with NCCL, at the end of the step.
        PeerError: (in any step, over Gloo) a peer that ended or does not answer. NCCL has a watchdog of its own.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        *args: Any,
        forward: Codec | Mapping[int, Codec],
        backward: Codec | Mapping[int, Codec],
        warmup_steps: int = 0,
        timeout: float = 120.0,
        checksums: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_numbers(warmup_steps, timeout)
        check_checksums(checksums)
        check_warm_up("forward", forward, warmup_steps)
        check_warm_up("backward", backward, warmup_steps)
        super().__init__(submodule, stage_index, num_stages, torch.device(device), *args, **kwargs)
        self.traffic = Traffic()
        self.warmup_steps = warmup_steps
        self.limit = float(timeout)
        self._group = self.group or default_group()
        self._name = f"pipeline {pipeline_number(self._group, num_stages, self.group_size)}"
        self._checksums = Checksums(self._name, enabled=checksums)
        self._transport = choose(self._group, self.device, self.traffic, self._checksums)
        self._lanes = self._open_lanes(forward, backward)
        self._steps = self._passes = 0
        self._told = ""
        self._step = Step()
        self._samples: Tensor | None = None
        self._prepared_for: bool | None = None  # has_backward when shapes became known
        self._posted = False
        self._ranks = rank_names(self._group, self.stages_of)
        self._board: FailureBoard | None = None
        self._last_pass: bool | None = None  # the value of has_backward in the last step
        self._compared: dict[str, tuple[Agreement, int]] = {}  # the last one about each thing
        self._shapes: Agreement | None = None  # stated, but not yet checked
        self._settled: Agreement | None = None  # the last one that was checked
        self._shape_rounds = 0
        self._fault = ""
        self._identity = Agreement(self._group, f"{self._name}/identity", self.limit)
        self._identity.state(stage_index, self._identity_facts())

    def set_samples(self, ids: Tensor | Sequence[int]) -> None:
        """Tell which samples the next training step's batch holds; for codecs that keep something per sample.

        Call it before every training step after the warm-up, with the same ids on every rank. Other codecs ignore it.

        Args:
            ids: int64 (batch,), split into micro-batches like the batch itself. All different, or the step raises.

        Raises:
            TypeError, ValueError: not integers, or not one dimension.
        """
        self._samples = checked_samples(ids)

    @property
    def in_warmup(self) -> bool:
        """Whether the next training step sends everything at full precision; the same on all ranks."""
        return self._steps < self.warmup_steps

    def chosen(self) -> dict[str, Codec]:
        """What was settled at the end of the warm-up for what this stage sends, by boundary, direction and tensor."""
        return {
            f"{lane.name}, {tensor}": codec
            for (_, outgoing), lane in self._lanes.items()
            for tensor, codec in lane.chosen().items()
            if outgoing
        }

    def state_bytes(self) -> int:
        """Bytes that the codecs keep on this stage between steps."""
        return sum(lane.state_bytes() for lane in self._lanes.values())

    def forward_session(
        self, *, outgoing: bool, shape: Sequence[int], dtype: torch.dtype
    ) -> Session:
        """A session for activations of any shape that shares what the training's keep, if the codec allows that.

        For evaluation passes outside the schedule: encode and decode with `training=False`, once the warm-up is over.

        Args:
            outgoing: to the next stage, which opens the same with False; both must be on different ranks.
            shape, dtype: of the activations.

        Raises:
            ValueError: there is no stage on that side, or the warm-up is not over and would have to settle something.
        """
        return self._forward_lane(outgoing).session(0, torch.Size(shape), dtype)

    def forward_codec(self, *, outgoing: bool) -> Codec:
        """The format of activations, as it was given, to the next stage or from the one before.

        Raises:
            ValueError: there is no stage on that side.
        """
        return self._forward_lane(outgoing).codec

    def codec_state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the model: training steps so far, and what the codecs keep."""
        lanes = {lane.name: lane.state_dict() for lane in self._lanes.values()}
        return {"steps": self._steps, "lanes": {name: s for name, s in lanes.items() if s}}

    def load_codec_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `codec_state_dict` gave, before the next step.

        Raises:
            ValueError: a state of another stage or codec.
        """
        lanes = {lane.name: lane for lane in self._lanes.values()}
        if unknown := sorted(set(state["lanes"]) - set(lanes)):
            raise ValueError(f"state has {', '.join(unknown)}; this stage has {', '.join(lanes)}")
        self._steps = int(state["steps"])
        for name, lane in lanes.items():
            lane.load_state_dict(state["lanes"].get(name, {}))

    # What `HookedStage` asks for, in the order of a step.

    @property
    def wire(self) -> torch.device:
        return self._transport.device

    def step_begins(self) -> None:
        if self._board is None:
            self._identity.check(self._stage_names())
            self._board = FailureBoard(self._group, self._name, self._ranks, self.limit)
        if self._last_pass != self.has_backward:
            self._last_pass = self.has_backward
            self._compare("kind of pass", "training" if self.has_backward else "evaluation")
        self._transport.begin(self._board, self._passes)
        self._passes += 1
        self._told = ("" if self.has_backward else "evaluation before ") + f"step {self._steps}"
        self._step = Step.numbered(self._steps, self.warmup_steps, training=self.has_backward)
        self._steps += self.has_backward
        self._posted = False
        # PyTorch exchanges shapes again, later in this step, when training and evaluation alternate.
        if self._prepared_for == self.has_backward:
            self._ready()

    def shapes_wanted(self) -> None:
        self._compare("micro-batches", str(self.micro_batches))

    def shapes_known(self) -> None:
        faults, facts = [], {}
        for (direction, outgoing), lane in self._lanes.items():
            used = direction == "forward" or self.has_backward
            try:
                lane.prepare(self.slots(direction, outgoing) if used else [], self._step)
                lane.warm_up()  # before anybody waits for a message
                facts |= lane.facts()
            except (TypeError, ValueError) as error:
                faults.append(f"{lane.name}: {error}")
        self._fault = "; ".join(faults)  # to be raised where all ranks know of it
        self._prepared_for = self.has_backward
        topic = f"{self._name}/shapes/{self._shape_rounds}"
        self._shapes = Agreement(self._group, topic, self.limit)
        self._shape_rounds += 1
        self._shapes.state(self.stage_index, self._step_facts() | facts)

    def send(
        self, direction: Direction, micro_batch: int, tensors: list[Tensor]
    ) -> list[dist.P2POp]:
        self._ready()
        lane, ops = self._lanes[direction, True], []
        for index, tensor in enumerate(tensors):
            with self._transport.leaving(tensor):
                room = self._transport.room
                message = lane.encode(index, self._step, micro_batch, tensor, room=room)
                if message.numel():
                    route = self._route(direction, True, micro_batch, index)
                    ops += self._transport.send(route, message)
        return ops

    def receive(self, direction: Direction, micro_batch: int) -> list[dist.P2POp]:
        self._ready()
        messages = self._messages(direction, micro_batch)
        return [op for route, nbytes in messages for op in self._transport.receive(route, nbytes)]

    def take(self, direction: Direction, micro_batch: int, buffers: list[Tensor]) -> None:
        self._ready()
        lane = self._lanes[direction, False]
        for index, buffer in enumerate(buffers):
            if nbytes := lane.nbytes(index, self._step, micro_batch):
                route = self._route(direction, False, micro_batch, index)
                with self._transport.arriving():
                    payload = self._transport.take(route, nbytes)
                    lane.decode(index, self._step, micro_batch, payload, buffer)

    def step_ends(self) -> None:
        self._transport.drain()

    def _compare(self, what: str, value: str) -> None:
        """All ranks compare what PyTorch's exchange of shapes would stumble over; one stage of each speaks for it."""
        if self.stage_index != self.stages_of(self.group_rank)[0]:
            return
        last, number = self._compared.get(what, (None, -1))
        now = Agreement(self._group, f"{self._name}/{what}/{number + 1}", self.limit)
        now.state(self.group_rank, {what: value})
        now.check(self._ranks)
        if last is not None:
            last.forget(self.group_rank)
        self._compared[what] = now, number + 1

    def _ready(self) -> None:
        """Once in a step, as soon as shapes are known: agree on them if they are new, and post all receives."""
        if self._posted:
            return
        self._posted = True
        if self._shapes is not None:
            self._shapes.check(self._stage_names())
            if self._settled is not None:
                self._settled.forget(self.stage_index)
            self._settled, self._shapes = self._shapes, None
            if self._fault:  # word for word the same on all ranks
                raise ValueError(self._fault)
        self._take_samples()
        for direction, outgoing in self._lanes:
            if not outgoing and (direction == "forward" or self.has_backward):
                for micro_batch in range(self.micro_batches):
                    for route, nbytes in self._messages(direction, micro_batch):
                        self._transport.post(route, nbytes)

    def _take_samples(self) -> None:
        """Attach this step's sample ids, if a codec needs them now."""
        samples, self._samples = (
            (self._samples, None) if self.has_backward else (None, self._samples)
        )
        keyed = [lane for lane in self._lanes.values() if lane.codec.needs_key and lane.slots]
        if not keyed or not self._step.training or self._step.full_precision:
            return
        if samples is None:
            raise ValueError(f"{keyed[0].codec} needs set_samples(ids) before every training step")
        self._step = replace(self._step, keys=keys_of(samples, self.micro_batches))

    def _messages(self, direction: Direction, micro_batch: int) -> list[tuple[Route, int]]:
        """Where the messages of a micro-batch come from, and their sizes."""
        lane = self._lanes[direction, False]
        sizes = [lane.nbytes(index, self._step, micro_batch) for index in range(len(lane.slots))]
        return [
            (self._route(direction, False, micro_batch, index), nbytes)
            for index, nbytes in enumerate(sizes)
            if nbytes
        ]

    def _route(self, direction: Direction, outgoing: bool, micro_batch: int, index: int) -> Route:
        upward = (direction == "forward") == outgoing
        boundary = self.stage_index if upward else self.stage_index - 1
        if index >= _MOST_TENSORS or micro_batch >= _MOST_MICRO_BATCHES:
            raise ValueError(
                f"tensor {index} of micro-batch {micro_batch} at boundary {boundary}; allowed: "
                f"{_MOST_TENSORS} tensors, {_MOST_MICRO_BATCHES} micro-batches"
            )
        number = (boundary * 2 + (direction == "backward")) * _MOST_MICRO_BATCHES + micro_batch
        peer = self.rank_of(self.stage_index + 1 if upward else self.stage_index - 1)
        about = (
            f"boundary {boundary} {direction}, micro-batch {micro_batch}, tensor {index}, {self._told}: "
            f"the message from {self._ranks[self.group_rank if outgoing else peer]}"
        )
        return Route(peer, _TAG_BASE + number * _MOST_TENSORS + index, about)

    def _forward_lane(self, outgoing: bool) -> Lane:
        if ("forward", outgoing) not in self._lanes:
            raise ValueError(
                f"outgoing is {outgoing}; stage {self.stage_index} ends the pipeline there"
            )
        return self._lanes["forward", outgoing]

    def _open_lanes(
        self, forward: Codec | Mapping[int, Codec], backward: Codec | Mapping[int, Codec]
    ) -> dict[tuple[Direction, bool], Lane]:
        """The up to four ways in and out of this stage, by direction and whether they lead out."""
        below, above = self.stage_index - 1, self.stage_index
        ways: list[tuple[Direction, bool, int]] = []
        if not self.is_first:
            ways.append(("forward", False, below))
            ways.append(("backward", True, below))
        if not self.is_last:
            ways.append(("forward", True, above))
            ways.append(("backward", False, above))
        codecs = {"forward": forward, "backward": backward}
        return {
            (direction, outgoing): Lane(
                boundary,
                direction,
                codec_at(direction, codecs[direction], boundary, self.num_stages - 1),
                self.device,
                self.traffic,
                self._checksums.room,
            )
            for direction, outgoing, boundary in ways
        }

    def _identity_facts(self) -> dict[str, str]:
        formats = {
            f"{lane.name} codec": f"{lane.codec} [{lane.codec.fingerprint()}]"
            for lane in self._lanes.values()
        }
        return {
            "lowbit version": __version__,
            # Before the first step, PyTorch exchanges shapes in a way of its own that differs between versions.
            "torch version": ".".join(torch.__version__.split(".")[:2]),
            "number of stages": str(self.num_stages),
            "ranks": str(self.group_size),
            "transport": self._transport.name,
            "warm-up steps": str(self.warmup_steps),
            **agreed_facts(self._checksums.enabled),
            **formats,
        }

    def _step_facts(self) -> dict[str, str]:
        return {
            "training steps so far": str(self._steps - self.has_backward),
            "stages by rank": str([self.stages_of(rank) for rank in range(self.group_size)]),
            "codecs": self._fault or "fit what crosses",
        }

    def _stage_names(self) -> list[str]:
        ranks = dist.get_process_group_ranks(self._group)  # as the whole job counts them
        return [
            f"rank {ranks[self.rank_of(stage)]} (stage {stage})" for stage in range(self.num_stages)
        ]


def _check_numbers(warmup_steps: object, timeout: object) -> None:
    check_int("warmup_steps", warmup_steps, 0, sys.maxsize)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {timeout!r}; allowed: a number of seconds above 0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; allowed: a number of seconds above 0")
