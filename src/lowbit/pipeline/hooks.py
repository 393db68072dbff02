"""All use of what is only half public in `torch.distributed.pipelining`, translated to an interface without it.

The schedules call methods of their stages to learn what to send and where to receive. `HookedStage` overrides those and
calls methods of its own that a subclass implements; it works alike with PyTorch 2.11 to 2.13. What else differs
between these versions is the exchange of shapes before the first step. PyTorch pickles what it exchanges there; here it
travels as JSON (`lowbit.pipeline.shapes`), so that no rank runs what a peer sends.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, _utils
from torch.utils._pytree import tree_map_only

from lowbit.collectives.failure import PeerError
from lowbit.pipeline import shapes
from lowbit.pipeline.boundary import Direction, Slot

_REQUIRED = (
    "clear_runtime_states",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "forward_one_chunk",
    "perform_reduce_grad",
    "_get_init_p2p_neighbors_ops",
    "_prepare_forward_infra",
    "_prepare_backward_infra",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)


def check_torch() -> None:
    """Check that this PyTorch has what `HookedStage` builds on.

    Raises:
        RuntimeError: it has not; the text names what is missing.
    """
    missing = [name for name in _REQUIRED if not hasattr(PipelineStage, name)]
    if missing:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no PipelineStage.{', PipelineStage.'.join(missing)}, "
            "on which lowbit.pipeline builds; known to work: 2.11 to 2.13"
        )


class HookedStage(PipelineStage):
    """A `PipelineStage` whose communication is up to the subclass. Takes the arguments of `PipelineStage`."""

    limit: float
    """Seconds to wait for a neighbour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_torch()
        super().__init__(*args, **kwargs)
        self._micro_batches = 0

    @property
    @abstractmethod
    def wire(self) -> torch.device:
        """Where tensors must be for the process group to carry them: the CPU for Gloo."""

    @abstractmethod
    def step_begins(self) -> None:
        """A step (training or evaluation, see `has_backward`) starts; shapes may not be known yet."""

    @abstractmethod
    def shapes_wanted(self) -> None:
        """PyTorch is about to exchange shapes; the micro-batches of a step are known."""

    @abstractmethod
    def shapes_known(self) -> None:
        """Shapes have been exchanged, before the first step and again whenever PyTorch does so."""

    @abstractmethod
    def step_ends(self) -> None:
        """All stages of this rank have handed over what they send in this step."""

    @abstractmethod
    def send(
        self, direction: Direction, micro_batch: int, tensors: list[Tensor]
    ) -> list[dist.P2POp]:
        """Send tensors to the neighbour; returns operations that the schedule shall run."""

    @abstractmethod
    def receive(self, direction: Direction, micro_batch: int) -> list[dist.P2POp]:
        """Prepare to receive; returns operations that the schedule shall run and wait for."""

    @abstractmethod
    def take(self, direction: Direction, micro_batch: int, buffers: list[Tensor]) -> None:
        """Fill the buffers, in place, with what the neighbour sent."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step; 0 before shapes are wanted."""
        return self._micro_batches

    def rank_of(self, stage: int) -> int:
        """Rank, within the group, that holds a stage."""
        return self.stage_index_to_group_rank[stage]

    def stages_of(self, rank: int) -> list[int]:
        """Stages that a rank of the group holds, ascending."""
        return sorted(s for s, r in self.stage_index_to_group_rank.items() if r == rank)

    def slots(self, direction: Direction, outgoing: bool) -> list[Slot]:
        """Shapes and dtypes of the tensors that cross on one side of this stage; none for a neighbour on this rank."""
        upward = (direction == "forward") == outgoing  # between this stage and the next one
        neighbour = self.stage_index + 1 if upward else self.stage_index - 1
        if not 0 <= neighbour < self.num_stages or not self._is_remote(neighbour):
            return []
        if outgoing:
            found = self._outputs() if upward else self._input_grads()
        else:
            found = self._buffers((self.grad_recv_info if upward else self.args_recv_info)[0])
        return [(torch.Size(meta.shape), meta.dtype) for meta in found]

    # What follows overrides PyTorch's hooks, in the order of a step.

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.step_begins()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # PyTorch 2.11 opens connections with this, in V schedules even to the rank itself, which Gloo cannot.
        with self._on_wire():
            ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        # PyTorch 2.11: a trial run, and exchanges before and after it, which it pickles.
        if not self.is_first and self._is_remote(self.stage_index - 1):
            args = tuple(self._layouts_from(self.stage_index - 1))
        self.inputs_meta = tree_map_only(Tensor, lambda x: x.to("meta"), tuple(args))
        inputs = tree_map_only(
            Tensor, lambda x: torch.zeros_like(x, device=self.device), self.inputs_meta
        )
        with torch.no_grad():
            outputs = self.submod(*inputs, **(kwargs or {}))
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        metas = tree_map_only(Tensor, lambda x: x.to("meta"), outputs)
        getattr(self, "_configure_outputs_meta")(metas)  # noqa: B009 (pyright)
        if self.is_last or not self._is_remote(self.stage_index + 1):
            return metas
        self._layouts_to(self.stage_index + 1, metas)
        return ()

    # PyTorch 2.13 exchanges shapes with these.

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_wire():
            return super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_wire():
            return super()._warmup_backward_result(*args, **kwargs)

    def _recv_meta(self, src_stage: int) -> Any:
        metas = tuple(
            None if layout is None else _utils._TensorMeta.from_tensor(layout)
            for layout in self._layouts_from(src_stage)
        )
        if src_stage < self.stage_index:
            return _utils._StageForwardMeta(metas)  # pyright: ignore[reportArgumentType]
        return _utils._StageBackwardMeta(metas)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        upward = dst_stage > self.stage_index
        self._layouts_to(dst_stage, meta.forward_metas if upward else meta.backward_metas)

    def _layouts_to(self, stage: int, layouts: Sequence[Any]) -> None:
        shapes.send(layouts, self.group, self.rank_of(stage), self.wire, self.limit)

    def _layouts_from(self, stage: int) -> list[Tensor | None]:
        """What a neighbour sends: every activation, but no gradient of what needs none.

        Raises:
            PeerError: something else came.
        """
        layouts = shapes.receive(self.group, self.rank_of(stage), self.wire, self.limit)
        if stage < self.stage_index and any(layout is None for layout in layouts):
            peer = self.rank_of(stage)
            raise PeerError(f"rank {peer} sent no layout of an output of stage {stage}", peer)
        return layouts

    @contextlib.contextmanager
    def _on_wire(self) -> Iterator[None]:
        """PyTorch puts what it exchanges before the first step on the stage's device, from where Gloo cannot send."""
        before, self.device = self.device, self.wire
        try:
            yield
        finally:
            self.device = before

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self._micro_batches = num_microbatches
        self.shapes_wanted()
        result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        if not self.has_backward:
            self.shapes_known()
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        self.shapes_known()
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self._is_remote(self.stage_index - 1):
            return []
        return self.receive("forward", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last or not self._is_remote(self.stage_index + 1):
            return []
        return self.receive("backward", bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        if self._is_remote(self.stage_index - 1):
            buffers = self._buffers(self.args_recv_info[fwd_chunk_id])
            self.take("forward", fwd_chunk_id, buffers)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        if self._is_remote(self.stage_index + 1):
            buffers = self._buffers(self.grad_recv_info[bwd_chunk_id])
            self.take("backward", bwd_chunk_id, buffers)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:
            self._end_of_evaluation(fwd_chunk_id)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        tensors = [op.tensor for op in super().get_fwd_send_ops(fwd_chunk_id)]
        ops = self.send("forward", fwd_chunk_id, tensors) if tensors else []
        self._end_of_evaluation(fwd_chunk_id)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        tensors = [op.tensor for op in super().get_bwd_send_ops(bwd_chunk_id)]
        return self.send("backward", bwd_chunk_id, tensors) if tensors else []

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # V schedules pass gradients between stages of a rank in evaluation too, where stock stages raise.
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        # Gradients flow down, so the lowest stage of a rank is the last to send any.
        if self.stage_index == self.stages_of(self.group_rank)[0]:
            self.step_ends()

    def _end_of_evaluation(self, micro_batch: int) -> None:
        """Activations flow up: without backward, the highest stage of a rank is the last to send."""
        last = micro_batch == self._micro_batches - 1
        if (
            not self.has_backward
            and last
            and self.stage_index == self.stages_of(self.group_rank)[-1]
        ):
            self.step_ends()

    def _is_remote(self, stage: int) -> bool:
        return self.rank_of(stage) != self.group_rank

    @staticmethod
    def _buffers(infos: Any) -> list[Tensor]:
        """Receive buffers, in the order in which the neighbour sends; inputs without gradient have none."""
        return [info.buffer for info in infos if getattr(info, "buffer", None) is not None]

    def _outputs(self) -> list[Any]:
        meta = getattr(self, "_stage_meta", None)
        if meta is not None:
            return list(meta.outputs or ())
        return list(getattr(self, "get_outputs_meta")())  # noqa: B009 (pyright) PyTorch 2.11

    def _input_grads(self) -> list[Any]:
        meta_of = getattr(self, "_get_grad_send_meta", None)
        if meta_of is not None:
            metas = [meta_of(i) for i in range(len(self.args_recv_info[0]))]
            return [meta for meta in metas if meta is not None]
        return self._buffers(self.args_recv_info[0])  # PyTorch 2.11: of every input
