"""`LowBitStage`: a pipeline stage whose activations and gradients cross to its neighbours in few bits.

`HookedStage` (in `hooks`) replaces the communication of PyTorch's stage. `Passes` (in `passes`) has all ranks agree on
each kind of pass. `Lanes` (in `lanes`) codes the tensors, and a `Transport` (in `transport`) moves the payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit import __version__
from lowbit.codecs.base import Codec
from lowbit.codecs.defaults import RECOMMENDED
from lowbit.codecs.sessions import Session
from lowbit.pipeline.arguments import (
    Codecs,
    Step,
    backward_beside,
    check_numbers,
    check_raise,
    check_warm_up,
    checked_samples,
)
from lowbit.pipeline.hooks import HookedStage
from lowbit.pipeline.lanes import Lanes
from lowbit.pipeline.layouts import Batch, receive_layouts, send_layouts
from lowbit.pipeline.numbering import Configuration, pipeline_number
from lowbit.pipeline.passes import Passes, first_topic
from lowbit.pipeline.transport import choose
from lowbit.wire.agreement import Agreement
from lowbit.wire.checksum import Checksums, agreed_facts, check_checksums
from lowbit.wire.errors import described
from lowbit.wire.failure import FailureBoard
from lowbit.wire.groups import default_group, rank_names
from lowbit.wire.pytorch import TorchVersionError, check_torch
from lowbit.wire.traffic import Traffic


class LowBitStage(HookedStage):
    """Drop-in for `torch.distributed.pipelining.PipelineStage` that sends few bits, under every schedule of PyTorch.

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
        submodule: as for `PipelineStage`.
        stage_index: as for `PipelineStage`.
        num_stages: as for `PipelineStage`.
        device: as for `PipelineStage`.
        *args: further arguments of `PipelineStage`, positional.
        forward: format of activations: one codec, or a mapping from boundary index (i: between stages i and i + 1).
        backward: format of gradients, likewise; absent: the default beside the format of activations, of
            `TransformQuant` the same with one step for all tokens.
        warmup_steps: so many calls of `schedule.step`, from the first, send everything in its own dtype. At least 1 for
            a codec that leaves something to choose, such as `SubspaceQuant(directions="auto")`, which is settled in the
            last.
        timeout: seconds after which a rank that does not come or answer is an error.
        checksums: whether 8 bytes behind each payload tell if it arrived as it was sent; the same on all ranks.
        **kwargs: further arguments of `PipelineStage` by keyword (`input_args`, `output_args`, `group`, `dw_builder`).

    Raises:
        TypeError, ValueError: a wrong argument; the text names it.
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
        forward: Codecs = RECOMMENDED,
        backward: Codecs | None = None,
        warmup_steps: int = 0,
        timeout: float = 120.0,
        checksums: bool = True,
        **kwargs: Any,
    ) -> None:
        check_numbers(warmup_steps, timeout)
        check_checksums(checksums)
        backward = backward_beside(forward) if backward is None else backward
        check_warm_up("forward", forward, warmup_steps)
        check_warm_up("backward", backward, warmup_steps)
        self._check_torch(num_stages, timeout, *args, **kwargs)
        super().__init__(submodule, stage_index, num_stages, torch.device(device), *args, **kwargs)
        self.traffic = Traffic()
        self.warmup_steps = warmup_steps
        self.limit = float(timeout)
        self._group = self.group or default_group()
        self._number = pipeline_number(self._group, num_stages, self.group_size)
        self._checksums = Checksums(f"pipeline {self._number}", enabled=checksums)
        self.transport = choose(self._group, self.device, self.traffic, self._checksums)
        self.lanes = Lanes(stage_index, num_stages, forward, backward, self.device, self.transport)
        self.steps = 0
        self.looks_ahead = True  # whether receives of the next pass are posted at the end of one
        self._samples: Tensor | None = None
        self._passes: Passes | None = None  # shared by the stages of this rank

    @staticmethod
    def _check_torch(
        stages: int,
        timeout: float,
        input_args: Any = None,
        output_args: Any = None,
        group: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Raise a TorchVersionError if this PyTorch is not known to work, and tell the ranks that wait for this one."""
        try:
            check_torch()
        except TorchVersionError as error:
            group = group or default_group()
            topic = first_topic(pipeline_number(group, stages, group.size()))
            agreement = Agreement(group, topic, timeout)
            agreement.give_up(f"{rank_names(group)[group.rank()]} gave up: {described(error)}")
            agreement.linger()
            raise

    def set_samples(self, ids: Tensor | Sequence[int]) -> None:
        """Set the sample ids of the next training step's batch, for codecs that keep something per sample.

        Call it before every training step after the warm-up, with the same ids on every rank. Other codecs ignore it.

        Args:
            ids: int64 (batch,), split into micro-batches like the batch itself.

        Raises:
            TypeError, ValueError: not integers, not one dimension, or not all different.
        """
        self._samples = checked_samples(ids)

    def set_codecs(self, forward: Codecs, backward: Codecs) -> None:
        """Change the formats from the next step on; call it with the same on every stage of the pipeline.

        What codecs keep between steps starts empty. Set `looks_ahead` to False on every stage before the last step with
        the old formats: otherwise, the receives that are posted at its end take memory for good.

        Args:
            forward, backward: as of the constructor.

        Raises:
            TypeError, ValueError: a wrong argument.
        """
        for name, codecs in (("forward", forward), ("backward", backward)):
            check_warm_up(name, codecs, max(0, self.warmup_steps - self.steps))
        self.lanes = Lanes(self.stage_index, self.num_stages, forward, backward, self.device, self.transport)
        if self._passes is not None:
            self._passes.forget()

    def raise_rates(self, bits: float) -> None:
        """Raise the rates that the warm-up chose by `bits` per element, up to 16, from the next step on.

        Call it with the same number on every stage of the pipeline, which agrees anew in the next step. Formats with a
        set rate stay as they are. What codecs keep stays, too. A cost in loss falls to a quarter with each bit. Set
        `looks_ahead` to False before the last step with the old rates, as for `set_codecs`.

        Raises:
            ValueError: not a number above 0, or the warm-up is not over.
        """
        check_raise(bits, self.in_warmup)
        self.lanes.raise_rates(bits)
        if self._passes is not None:
            self._passes.forget()

    @property
    def in_warmup(self) -> bool:
        """Whether the next training step sends everything at full precision; the same on all ranks."""
        return self.steps < self.warmup_steps

    def chosen(self) -> dict[str, Codec]:
        """Return the codecs that the warm-up settled for what this stage sends, by boundary, direction and tensor."""
        lanes = self.lanes.by_name(outgoing_only=True)
        return {f"{name}, {x}": codec for name, lane in lanes.items() for x, codec in lane.states.chosen().items()}

    def state_bytes(self) -> int:
        """Return the bytes that the codecs keep on this stage between steps."""
        return sum(lane.states.nbytes() for lane in self.lanes.by_name().values())

    def forward_session(self, *, outgoing: bool, shape: Sequence[int], dtype: torch.dtype) -> Session:
        """Open a session for activations of any shape that shares the training's state, if the codec allows that.

        For evaluation passes outside the schedule: encode and decode with `training=False`, once the warm-up is over.

        Args:
            outgoing: to the next stage, which opens the same with False; both must be on different ranks.
            shape: of the activations.
            dtype: of the activations.

        Raises:
            ValueError: there is no stage on that side, or the codec has an open parameter and the warm-up is not over.
        """
        return self.lanes.forward(outgoing).states.session(0, (torch.Size(shape), dtype))

    def forward_codec(self, *, outgoing: bool) -> Codec:
        """Return the format of activations to the next stage, or from the one before, as it was given.

        Raises:
            ValueError: there is no stage on that side.
        """
        return self.lanes.forward(outgoing).codec

    def codec_state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: training steps so far, and what the codecs keep."""
        lanes = {name: lane.states.state_dict() for name, lane in self.lanes.by_name().items()}
        return {"steps": self.steps, "lanes": {name: s for name, s in lanes.items() if s}}

    def load_codec_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `codec_state_dict` gave, before the next step.

        Raises:
            ValueError: a state of another stage or codec.
        """
        lanes = self.lanes.by_name()
        if unknown := sorted(set(state["lanes"]) - set(lanes)):
            raise ValueError(f"state has {', '.join(unknown)}; this stage has {', '.join(lanes)}")
        self.steps = int(state["steps"])
        for name, lane in lanes.items():
            lane.states.load_state_dict(state["lanes"].get(name, {}))
        if self._passes is not None:
            self._passes.forget()

    # Called by `Passes`, in the order of a pass.

    def identity(self) -> dict[str, str]:
        """Facts that all stages must share, whatever crosses."""
        codecs = {name: lane.codec for name, lane in self.lanes.by_name().items()}
        return {
            "lowbit version": __version__,
            # Its schedules may order messages otherwise, which matters where they have no tags.
            "torch version": ".".join(torch.__version__.split(".")[:2]),
            "number of stages": str(self.num_stages),
            "stages by rank": str([self.stages_of(rank) for rank in range(self.group_size)]),
            "transport": self.transport.name,
            "warm-up steps": str(self.warmup_steps),
            **agreed_facts(self._checksums.enabled),
            **{f"{name} codec": f"{codec} [{codec.fingerprint()}]" for name, codec in codecs.items()},
        }

    def begin(self, board: FailureBoard, number: int, batch: Batch, ranks: Sequence[str]) -> None:
        """A pass begins; its configuration is not known yet. number: of the pass; ranks: their names in errors.

        Raises:
            ValueError: a codec needs sample ids, which are missing.
        """
        self.lanes.end_step()  # before other streams of a GPU wait for this one
        self.transport.begin(board, number)
        neighbours = (self.stage_index - 1, self.stage_index + 1)  # which a V schedule places after they are made
        self.lanes.place({stage: self.rank_of(stage) for stage in neighbours if self.is_remote(stage)})
        step, samples = Step.numbered(self.steps, self.warmup_steps, training=batch.training), self._samples
        if batch.training:
            self._samples = None
            if (codec := self.lanes.keyed()) and not step.full_precision:
                if samples is None:
                    raise ValueError(f"{codec} needs set_samples(ids) before every training step")
                parts = samples.tensor_split(batch.micro_batches)  # as the schedule splits the batch
                step = replace(step, samples=[part.tolist() for part in parts])
        name = f"step {self.steps + 1}" if batch.training else f"evaluation after step {self.steps}"
        self.lanes.begin(step, name, ranks)

    def use_configuration(self, configuration: Configuration) -> None:
        """This pass has that configuration."""
        self.use(configuration.layouts[self.stage_index])
        self.lanes.use(configuration)
        self.steps += configuration.training

    def await_next(self, configuration: Configuration) -> None:
        """Post receives for the next pass, which probably has that configuration, a whole round trip ahead."""
        step = Step.numbered(self.steps, self.warmup_steps, training=configuration.training)
        self.lanes.use(configuration, step)

    def layouts_from_below(self) -> list[Tensor]:
        """Receive the layouts of the outputs of the stage before.

        Raises:
            PeerError: the peer sent something else. RuntimeError: it sent nothing.
        """
        peer = self.rank_of(self.stage_index - 1)
        return receive_layouts(self._group, peer, self.transport.device, self.limit)

    def layouts_to_above(self, outputs: Sequence[Tensor]) -> None:
        """Send the layouts of this stage's outputs to the next one."""
        peer = self.rank_of(self.stage_index + 1)
        send_layouts(outputs, self._group, peer, self.transport.device, self.limit)

    def run_pass(self, stages: Sequence[HookedStage], batch: Batch, body: Callable[[], None]) -> None:
        own = [stage for stage in stages if isinstance(stage, LowBitStage)]
        passes = self._passes or Passes(own, self._group, self._number, self.limit, self._checksums)
        for stage in own:
            stage._passes = passes
        passes.run(own, batch, body)
