"""`LowBitStage`: a pipeline stage whose activations and gradients cross to its neighbours in few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import __version__
from lowbit.codecs.base import Codec, Key, Session
from lowbit.pipeline import shapes
from lowbit.pipeline.arguments import (
    check_numbers,
    check_warm_up,
    checked_samples,
    keys_of,
    open_lanes,
)
from lowbit.pipeline.boundary import Direction, Lane, Slot, Step
from lowbit.pipeline.hooks import Batch, HookedStage, Layouts
from lowbit.pipeline.numbering import pipeline_number
from lowbit.pipeline.passes import Configuration, Passes
from lowbit.pipeline.traffic import Traffic
from lowbit.pipeline.transport import Route, choose
from lowbit.ranks.checksum import Checksums, agreed_facts, check_checksums
from lowbit.ranks.failure import FailureBoard
from lowbit.ranks.groups import default_group


class LowBitStage(HookedStage):
    """Drop-in for `torch.distributed.pipelining.PipelineStage`, under every schedule of PyTorch.

    Between this stage and each neighbour on another rank, floating tensors travel as payloads of a codec; integer and
    boolean tensors travel as they are. A neighbour on the same rank (V schedules) gets the tensor itself: no bytes
    travel there, so no codec is applied. Evaluation (`schedule.eval`) uses the forward codec as training does, except
    for codecs that know only the samples they are trained on (AQSGD): those evaluate at full precision.

    With Gloo, receives are posted ahead and sends are not waited for before the step ends, so that the link carries
    both directions while the ranks compute; other backends keep the schedule's order (see `transport`).
    From and to a GPU, Gloo's payloads pass through pinned memory of the host, coded and copied beside the computation.
    A stage's output is read there after `forward` has returned: nothing may write to its memory before the step ends,
    as replaying a CUDA graph would.

    Before the first byte of each new kind of batch, all ranks compare codecs, versions, shapes and payload sizes.

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
        ValueError: (in any step) a batch that the schedule cannot cut or a codec cannot take, the same on every rank.
        AgreementError: (in any step) ranks that contradict each other or are missing.
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
        check_numbers(warmup_steps, timeout)
        check_checksums(checksums)
        check_warm_up("forward", forward, warmup_steps)
        check_warm_up("backward", backward, warmup_steps)
        super().__init__(submodule, stage_index, num_stages, torch.device(device), *args, **kwargs)
        self.traffic = Traffic()
        self.warmup_steps = warmup_steps
        self.limit = float(timeout)
        self._group = self.group or default_group()
        self._number = pipeline_number(self._group, num_stages, self.group_size)
        self._checksums = Checksums(f"pipeline {self._number}", enabled=checksums)
        self.transport = choose(self._group, self.device, self.traffic, self._checksums)
        self._lanes = open_lanes(
            stage_index,
            num_stages,
            forward,
            backward,
            self.device,
            self.traffic,
            self._checksums.room,
        )
        self.steps = 0
        self._step = Step()
        self._samples: Tensor | None = None
        self._passes: Passes | None = None  # shared by the stages of this rank
        self._configuration: Configuration | None = None  # of this pass
        self._ranks: Sequence[str] = ()
        self._told = ""
        self._expected: set[tuple[Direction, int, int]] = set()  # and not used yet

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
        return self.steps < self.warmup_steps

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

    def forward_session(self, *, outgoing: bool, shape: Sequence[int], dtype: torch.dtype) -> Session:
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
        return {"steps": self.steps, "lanes": {name: s for name, s in lanes.items() if s}}

    def load_codec_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `codec_state_dict` gave, before the next step.

        Raises:
            ValueError: a state of another stage or codec.
        """
        lanes = {lane.name: lane for lane in self._lanes.values()}
        if unknown := sorted(set(state["lanes"]) - set(lanes)):
            raise ValueError(f"state has {', '.join(unknown)}; this stage has {', '.join(lanes)}")
        self.steps = int(state["steps"])
        for name, lane in lanes.items():
            lane.load_state_dict(state["lanes"].get(name, {}))
        if self._passes is not None:
            self._passes.forget()

    # What `Passes` asks for, in the order of a pass.

    def identity(self) -> dict[str, str]:
        """What all stages must hold alike, whatever they carry."""
        formats = {f"{lane.name} codec": f"{lane.codec} [{lane.codec.fingerprint()}]" for lane in self._lanes.values()}
        return {
            "lowbit version": __version__,
            # Its schedules may order messages otherwise, which matters where they have no tags.
            "torch version": ".".join(torch.__version__.split(".")[:2]),
            "number of stages": str(self.num_stages),
            "stages by rank": str([self.stages_of(rank) for rank in range(self.group_size)]),
            "transport": self.transport.name,
            "warm-up steps": str(self.warmup_steps),
            **agreed_facts(self._checksums.enabled),
            **formats,
        }

    def begin(self, board: FailureBoard, number: int, batch: Batch, ranks: Sequence[str]) -> None:
        """A pass begins; its configuration is not known yet. number: as all ranks count; ranks: what they are called.

        Raises:
            ValueError: a codec needs sample ids, which are missing or not all different.
        """
        self.transport.begin(board, number)
        self._ranks = ranks
        self._told = ("" if batch.training else "evaluation before ") + f"step {self.steps}"
        self._step = Step.numbered(self.steps, self.warmup_steps, training=batch.training)
        self._step = replace(self._step, keys=self._keys(batch.micro_batches))

    def prepare(
        self, variants: Sequence[Layouts], micro_batches: Sequence[int], training: bool
    ) -> tuple[dict[str, str], str]:
        """Get ready for what will cross; returns facts that both ends of a boundary must hold alike, and faults.

        Args:
            variants: different layouts; micro_batches: the first that has each; training: whether gradients cross.
        """
        faults, facts = [], {}
        for (direction, outgoing), lane in self._lanes.items():
            for layouts, first in zip(variants, micro_batches, strict=True):
                slots = self._slots(direction, outgoing, layouts, training)
                try:
                    lane.prepare(slots, self._step)
                    lane.warm_up(slots)  # before anybody waits for a message
                    which = f" of micro-batch {first}" if len(variants) > 1 else ""
                    facts |= {f"{name}{which}": fact for name, fact in lane.facts(slots).items()}
                except (TypeError, ValueError) as error:
                    faults.append(f"{lane.name}: {error}")
        fault = "; ".join(dict.fromkeys(faults))
        return facts | {"codecs": fault or "fit what crosses"}, fault

    def await_next(self, configuration: Configuration) -> None:
        """Be ready, a whole round trip ahead, for the first messages of the next pass, if it is as this one.

        Gloo asks a receiver that is not ready before it sends. Where the next pass is another one, what was got ready
        waits for the next of this one: each configuration has tags of its own.
        """
        self._step = Step.numbered(self.steps, self.warmup_steps, training=configuration.training)
        self._adopt(configuration)
        self._expect(sure=False)

    def use_configuration(self, configuration: Configuration) -> None:
        """This pass has that configuration."""
        self._adopt(configuration)
        self._expect(sure=True)
        now = configuration.number, self._step.phase
        self._expected = {key for key in self._expected if key[1:] != now}
        self.steps += configuration.training

    def layouts_from_below(self) -> list[Tensor]:
        """What the stage before sends: the layouts of its outputs.

        Raises:
            PeerError: something else came. RuntimeError: nothing did.
        """
        peer = self.rank_of(self.stage_index - 1)
        return shapes.receive(self._group, peer, self.transport.device, self.limit)

    def layouts_to_above(self, layouts: Sequence[Tensor]) -> None:
        """Tell the next stage the layouts of this one's outputs."""
        peer = self.rank_of(self.stage_index + 1)
        shapes.send(layouts, self._group, peer, self.transport.device, self.limit)

    # What `HookedStage` asks for.

    def run_pass(self, stages: Sequence[HookedStage], batch: Batch, body: Callable[[], None]) -> None:
        held = [stage for stage in stages if isinstance(stage, LowBitStage)]
        passes = self._passes or Passes(held, self._group, self._number, self.limit, self._checksums)
        for stage in held:
            stage._passes = passes
        passes.run(held, batch, body)

    def send(self, direction: Direction, micro_batch: int, tensors: list[Tensor]) -> list[dist.P2POp]:
        lane, ops = self._lanes[direction, True], []
        for index, tensor in enumerate(tensors):
            with self.transport.leaving(tensor):
                room = self.transport.room
                message = lane.encode(index, self._step, micro_batch, tensor, room=room)
                if message.numel():
                    route = self._route(direction, True, micro_batch, index)
                    ops += self.transport.send(route, message)
        return ops

    def receive(self, direction: Direction, micro_batch: int) -> list[dist.P2POp]:
        messages = self._messages(direction, micro_batch)
        return [op for route, nbytes in messages for op in self.transport.receive(route, nbytes)]

    def take(self, direction: Direction, micro_batch: int, layouts: list[Tensor]) -> list[Tensor]:
        lane, tensors = self._lanes[direction, False], []
        for index, layout in enumerate(layouts):
            with self.transport.arriving():
                tensors.append(self.transport.landing(layout))
                if nbytes := lane.nbytes(index, self._step, micro_batch):
                    route = self._route(direction, False, micro_batch, index)
                    payload = self.transport.take(route, nbytes)
                    lane.decode(index, self._step, micro_batch, payload, tensors[-1])
        return tensors

    def _slots(self, direction: Direction, outgoing: bool, layouts: Layouts, training: bool) -> list[Slot]:
        """Shapes and dtypes of the tensors that cross on one side of this stage; none for a neighbour on this rank."""
        if not self._leads_away(direction, outgoing):
            return []
        both = layouts.outputs if (direction == "forward") == outgoing else layouts.inputs
        crossing = both if direction == "forward" else [x for x in both if x.requires_grad and training]
        return [(x.shape, x.dtype) for x in crossing]

    def _adopt(self, configuration: Configuration) -> None:
        self._configuration = configuration
        layouts, training = configuration.layouts[self.stage_index], configuration.training
        self.use(layouts)
        for (direction, outgoing), lane in self._lanes.items():
            lane.use([self._slots(direction, outgoing, each, training) for each in layouts])

    def _expect(self, *, sure: bool) -> None:
        """Have the transport get ready for what comes in, unless it is. sure: in this pass."""
        assert self._configuration is not None
        for (direction, outgoing), lane in self._lanes.items():
            key = direction, self._configuration.number, self._step.phase
            if outgoing or key in self._expected or (lane.codec.needs_key and not sure):
                continue  # samples that are not known yet decide sizes
            self._expected.add(key)
            micro_batches = range(self._configuration.micro_batches)
            messages = (message for i in micro_batches for message in self._messages(direction, i))
            self.transport.expect(messages, sure=sure)

    def _keys(self, micro_batches: int) -> tuple[Key, ...] | None:
        """This step's sample ids by micro-batch, if a codec needs them now."""
        if not self._step.training:
            return None
        samples, self._samples = self._samples, None
        keyed = [lane for way, lane in self._lanes.items() if lane.codec.needs_key and self._leads_away(*way)]
        if not keyed or self._step.full_precision:
            return None
        if samples is None:
            raise ValueError(f"{keyed[0].codec} needs set_samples(ids) before every training step")
        return keys_of(samples, micro_batches)

    def _messages(self, direction: Direction, micro_batch: int) -> list[tuple[Route, int]]:
        """Where the messages of a micro-batch come from, and their sizes."""
        lane = self._lanes[direction, False]
        sizes = [lane.nbytes(i, self._step, micro_batch) for i in range(lane.messages(micro_batch))]
        return [
            (self._route(direction, False, micro_batch, index), nbytes) for index, nbytes in enumerate(sizes) if nbytes
        ]

    def _route(self, direction: Direction, outgoing: bool, micro_batch: int, index: int) -> Route:
        assert self._configuration is not None  # within a pass
        upward = (direction == "forward") == outgoing
        boundary = self.stage_index if upward else self.stage_index - 1
        tag = self._configuration.tag(boundary, direction == "backward", self._step.phase, micro_batch, index)
        peer = self.rank_of(self.stage_index + 1 if upward else self.stage_index - 1)
        about = (
            f"boundary {boundary} {direction}, micro-batch {micro_batch}, tensor {index}, {self._told}: "
            f"the message from {self._ranks[self.group_rank if outgoing else peer]}"
        )
        return Route(peer, tag, about)

    def _leads_away(self, direction: Direction, outgoing: bool) -> bool:
        """Whether that lane is between this rank and another."""
        upward = (direction == "forward") == outgoing
        return self.is_remote(self.stage_index + 1 if upward else self.stage_index - 1)

    def _forward_lane(self, outgoing: bool) -> Lane:
        if ("forward", outgoing) not in self._lanes:
            raise ValueError(f"outgoing is {outgoing}; stage {self.stage_index} ends the pipeline there")
        return self._lanes["forward", outgoing]
