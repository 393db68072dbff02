"""`LowBitStage`: a pipeline stage whose activations and gradients cross to its neighbours in few bits.

`HookedStage` replaces the communication of PyTorch's stage, `Passes` has all ranks agree on each kind of pass, `Lanes`
codes the tensors, and a `Transport` moves the payloads. None of these calls the stage back.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit import escape
from lowbit.codecs.base import Codec, Session
from lowbit.codecs.checks import check_int
from lowbit.codecs.defaults import RECOMMENDED
from lowbit.escape import printable, shown
from lowbit.pipeline import arguments
from lowbit.pipeline.anchors import TokenAnchor
from lowbit.pipeline.arguments import Codecs
from lowbit.pipeline.boundary import Slot
from lowbit.pipeline.hooks import HookedStage
from lowbit.pipeline.lanes import Lanes
from lowbit.pipeline.layouts import Batch, pipeline_number
from lowbit.pipeline.passes import Passes
from lowbit.pipeline.transport import choose
from lowbit.wire.checksum import Checksums, check_checksums
from lowbit.wire.connections import gloo_of
from lowbit.wire.pytorch import check_torch, default_group
from lowbit.wire.traffic import Traffic

log = escape.logger(__name__)


class LowBitStage(HookedStage):
    """Drop-in for `torch.distributed.pipelining.PipelineStage` that sends few bits, under every schedule of PyTorch.

    Between this stage and each neighbour on another rank, floating tensors travel as payloads of a codec; integer and
    boolean tensors travel as they are, and so do constants: floating tensors that would need no gradient if all
    parameters were trained, such as additive masks and tables of cosines. Evaluation (`schedule.eval`) does the same,
    except that codecs that know only the samples they are trained on (AQSGD) evaluate at full precision. A neighbour on
    the same rank (V schedules) gets the tensor itself: no bytes travel there, so no codec is applied.

    If `input_args` and `output_args` are given, floating ones without `requires_grad` are constants (in PyTorch 2.11
    only if another has it).

    Messages go over Gloo. Next to a group without it, such as NCCL's, the first stage of each rank makes a Gloo group,
    once all ranks have come. Receives are posted ahead and sends are not waited for before the step ends, so that the
    link carries both directions while the ranks compute. From and to a GPU, payloads pass through pinned host memory,
    coded and copied in parallel with the computation. A stage's output is still read after `forward` has returned:
    nothing may write to its memory before the step ends, as replaying a CUDA graph would.

    Before the first byte of each new kind of batch, all ranks compare codecs, versions, shapes and payload sizes.

    Args:
        submodule: as for `PipelineStage`.
        stage_index: as for `PipelineStage`.
        num_stages: as for `PipelineStage`.
        device: as for `PipelineStage`.
        *args: further arguments of `PipelineStage`, positional.
        forward: format of activations: one codec, or a mapping from boundary index (i: between stages i and i + 1).
        backward: format of gradients, likewise; None: the default for the format of activations (for `TransformQuant`
            the same with one step for all tokens).
        warmup_steps: number of calls of `schedule.step`, from the first, that send everything in its own dtype.
        timeout: seconds after which a rank that does not join or answer is an error.
        checksums: whether a checksum of 8 bytes behind each payload detects damage; the same on all ranks.
        code_constants: whether constants are coded, too; the same on all ranks.
        anchor: code only what the token ids do not already say about activations (`set_tokens`); None: code all of it.
        **kwargs: further arguments of `PipelineStage` (`input_args`, `output_args`, `group`, `dw_builder`).

    Raises:
        TypeError, ValueError: an invalid argument; the message names it.
        ValueError: (in any step) a batch that the schedule cannot split or a codec cannot take; raised on every rank.
        AgreementError: (in any step, and with a Gloo group to make) ranks that contradict each other or are missing.
        DamagedError: (in any step) a neighbour's message was damaged on the way.
        PeerError: (in any step) a peer that ended or does not answer.
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
        code_constants: bool = False,
        anchor: TokenAnchor | None = None,
        **kwargs: Any,
    ) -> None:
        arguments.check_numbers(warmup_steps, timeout)
        arguments.check_anchor(anchor, warmup_steps)
        check_checksums(checksums)
        if not isinstance(code_constants, bool):
            raise TypeError(f"code_constants is {shown(code_constants)}; allowed: True or False")
        backward = arguments.default_backward(forward) if backward is None else backward
        if not isinstance(submodule, torch.nn.Module):
            raise TypeError(f"submodule is {shown(submodule)}; allowed: a torch.nn.Module")
        check_int("num_stages", num_stages, 1, sys.maxsize)
        check_int("stage_index", stage_index, 0, num_stages - 1)
        check_torch()
        super().__init__(submodule, stage_index, num_stages, torch.device(device), *args, **kwargs)
        self.traffic = Traffic()
        self.warmup_steps = warmup_steps
        self.looks_ahead = True  # whether receives of the next pass are posted at the end of one
        group = self.group or default_group()
        for boundary in range(max(0, stage_index - 1), min(stage_index, num_stages - 2) + 1):
            arguments.codec_at("forward", forward, boundary, num_stages - 1)
            arguments.codec_at("backward", backward, boundary, num_stages - 1)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device}; allowed: cpu or cuda")
        carrier = gloo_of(group, float(timeout))
        # After everything that can be refused: a stage that fails must not have a number.
        number = pipeline_number(group, stage_index, num_stages, self.group_size)
        sums = Checksums(f"pipeline {number}", enabled=checksums)
        transport = choose(carrier, self.device, self.traffic, sums)
        self.lanes = Lanes(
            stage_index, num_stages, forward, backward, self.device, transport, warmup_steps, code_constants, anchor
        )
        self._passes: Passes | None = None  # shared by the stages of this rank, once all of them are made
        self._new_passes = partial(Passes, group=group, number=number, limit=float(timeout), checksums=sums)

    def set_samples(self, ids: Tensor | Sequence[int]) -> None:
        """Set the sample ids of the next training step's batch, for codecs that keep something per sample.

        Call it before every training step after the warm-up, with the same ids on every rank. Other codecs ignore it.

        Args:
            ids: int64 (batch,), split into micro-batches like the batch itself.

        Raises:
            TypeError, ValueError: not integers, not one dimension, or not all different.
        """
        self.lanes.samples = arguments.checked_samples(ids)

    def set_tokens(self, ids: Tensor) -> None:
        """Set the token ids of the next pass's batch, for token anchors; a pass without them is coded without anchors.

        Call it before `schedule.step` and `schedule.eval`, with the same ids on every stage. Without an `anchor`, it
        does nothing.

        Args:
            ids: int64 (batch, sequence), split into micro-batches like the batch itself.

        Raises:
            TypeError, ValueError: not integers, another number of dimensions, or ids that the embedding does not have.
        """
        if self.lanes.anchor is not None:
            self.lanes.tokens = self.lanes.anchor.checked(ids)

    def set_codecs(self, forward: Codecs, backward: Codecs, *, keep_state: bool = False) -> None:
        """Change the formats from the next step on; call it with the same on every stage of the pipeline.

        Token anchors stay.

        Set `looks_ahead` to False on every stage before the last step with the old formats: otherwise, the receives
        that are posted at its end take memory for good.

        Args:
            forward, backward: see the constructor.
            keep_state: the new codecs continue with the states of the old ones, as those that differ only in a rate
                can; otherwise they start without state.

        Raises:
            TypeError, ValueError: an invalid argument.
        """
        self.lanes.set_codecs(forward, backward, keep_state=keep_state)

    @property
    def in_warmup(self) -> bool:
        """Whether the next training step sends everything at full precision; the same on all ranks."""
        return self.lanes.steps < self.warmup_steps

    def state_bytes(self) -> int:
        """Return the bytes that codecs and token anchors keep on this stage between steps."""
        lanes = self.lanes.by_name().values()
        return sum(lane.states.nbytes() + (lane.anchors.nbytes() if lane.anchors else 0) for lane in lanes)

    def forward_session(self, *, outgoing: bool, shape: Sequence[int], dtype: torch.dtype) -> Session:
        """Open a session for activations of any shape that shares the state of training, if the codec allows that.

        Use it for evaluation passes outside the schedule, with `training=False`, once the warm-up is over. With token
        anchors, code what `predicted` leaves.

        Args:
            outgoing: to the next stage, which opens the same with False; both must be on different ranks.
            shape: of the activations.
            dtype: of the activations.

        Raises:
            ValueError: no stage is on that side.
        """
        states = self.lanes.forward(outgoing).states
        if outgoing:
            states.end_step()  # as the next pass would, so that nothing depends on a checkpoint before, which does it
        return states.session(0, Slot(torch.Size(shape), dtype))

    def predicted(self, ids: Tensor, *, outgoing: bool, width: int) -> Tensor | None:
        """Return what the token anchor predicts for activations of an evaluation pass outside the schedule.

        The sender subtracts it before the session of `forward_session` codes, and the receiver adds it.

        Args:
            ids: of the tokens, int64 (batch, sequence), the same at both ends. outgoing: as for `forward_session`.
            width: of the activations.

        Returns:
            float32 (batch, sequence, width) on the device of the stage, the same at both ends but for last
            bits; None in the warm-up, without an anchor, and where the anchor is off.

        Raises:
            TypeError, ValueError: as `set_tokens` and `forward_session`.
        """
        lane = self.lanes.forward(outgoing)
        if lane.anchors is None or self.lanes.anchor is None or self.in_warmup:
            return None
        return lane.anchors.fit(0, width).predict(self.lanes.anchor.checked(ids))

    def forward_codec(self, *, outgoing: bool) -> Codec:
        """Return the format of activations to the next stage, or from the one before, as it was given.

        Raises:
            ValueError: the pipeline has no stage on that side.
        """
        return self.lanes.forward(outgoing).codec

    def codec_state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: training steps so far, and the states of codecs and token anchors.

        "formats" has the format of each boundary and direction as text, which `lowbit.codecs.parse` reads; "stage" the
        index of the stage.
        """
        lanes = self.lanes.by_name()
        parts = {name: lane.state_dict() for name, lane in lanes.items()}
        states = {name: states for name, (states, _) in parts.items() if states}
        anchors = {name: anchor for name, (_, anchor) in parts.items() if lanes[name].anchors is not None}
        formats = {name: repr(lane.codec) for name, lane in lanes.items()}
        state = {"steps": self.lanes.steps, "stage": self.stage_index, "lanes": states, "formats": formats}
        return state | ({"anchors": anchors} if anchors else {})

    def load_codec_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `codec_state_dict`, before the next step.

        The stage keeps its own formats. If the state was saved with others, a warning names both; states that the new
        ones cannot use are an error, now or in the next step.

        Raises:
            TypeError, ValueError: not a state, or one of another stage.
        """
        parts = [state.get(name, {}) for name in ("lanes", "anchors", "formats")] if isinstance(state, Mapping) else []
        if not parts or "steps" not in state or not all(isinstance(part, Mapping) for part in parts):
            raise TypeError(f"state is {shown(state)}; allowed: what codec_state_dict returns")
        check_int("steps", steps := int(state["steps"]), 0, sys.maxsize)
        if state.get("stage", self.stage_index) != self.stage_index:  # the two ends of a boundary keep different states
            raise ValueError(f"state is of stage {shown(state['stage'])}; this is stage {self.stage_index}")
        lanes, anchors, formats = parts
        own = {name: repr(lane.codec) for name, lane in self.lanes.by_name().items()}
        if formats and formats.keys() != own.keys():
            raise ValueError(f"state has {printable(', '.join(formats))}; this stage has {', '.join(own)}")
        for name, saved in formats.items():
            if saved != own[name]:
                log.warning("%s: the saved state is of %s, but this stage uses %s", name, printable(saved), own[name])
        self.lanes.load_state(steps, lanes, anchors)

    def _run_pass(self, stages: Sequence[HookedStage], batch: Batch, body: Callable[[], None]) -> None:
        own = [stage for stage in stages if isinstance(stage, LowBitStage)]
        passes = self._passes or self._new_passes(own)
        for stage in own:
            stage._passes = passes
        passes.run(own, batch, body, ahead=self.looks_ahead)
