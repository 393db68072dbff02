"""The only place that uses private parts of `torch.distributed.pipelining`; it hides them behind its own interface.

PyTorch's preparation of stages differs by version and pickles what peers send. `HookedStage` skips it: every pass calls
`_run_pass` instead, and all methods that would need what is prepared there are overridden.
"""

import contextlib
import inspect
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining.schedules import _PipelineSchedule

from lowbit.pipeline.boundary import Direction
from lowbit.pipeline.lanes import Lanes
from lowbit.pipeline.layouts import Batch, Constant, Layouts, layout_of, mark_constants
from lowbit.wire.errors import described


class HookedStage(PipelineStage):
    """A `PipelineStage` whose subclass does the communication, through `lanes`, which it creates.

    `declared`: layouts of `input_args` and `output_args`; None where one of them was not given.
    """

    lanes: Lanes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = inspect.signature(PipelineStage.__init__).bind(self, *args, **kwargs).arguments
        inputs, outputs = given.get("input_args"), given.get("output_args")
        self.declared: Layouts | None = None
        if inputs is not None and outputs is not None:
            own = tuple(map(layout_of, _as_tuple(inputs)))
            assume = not hasattr(self, "_stage_meta")  # PyTorch 2.11 assumes that all of them need gradients
            received = own if self.is_first else _declared(inputs, assume)
            self.declared = Layouts(received, _declared(outputs, assume))
        self._runtime_validate = False  # PyTorch would compare with its own preparation, which never runs
        self._layouts: Sequence[Layouts] = ()  # by micro-batch
        self._handed_over: dict[tuple[Direction, int], tuple[Tensor | None, ...]] = {}
        self._whole: set[int] = set()  # micro-batches whose backward pass must not be split

    @abstractmethod
    def _run_pass(self, stages: "Sequence[HookedStage]", batch: Batch, body: Callable[[], None]) -> None:
        """Run a pass of all stages of this rank, ascending: `use` layouts, then call `body`, the schedule's part."""

    def use(self, layouts: Sequence[Layouts]) -> None:
        """Expect tensors of these layouts with each micro-batch from now on."""
        self._layouts, self.chunks = layouts, len(layouts)
        self.act_send_info = {i: [self.stage_index + 1] for i in range(len(layouts[0].outputs))}
        # Since 2.12, `backward_one_chunk` reads the number of inputs.
        if hasattr(self, "_stage_meta"):
            self._stage_meta.inputs = _utils.extract_tensor_metas(layouts[0].inputs)

    # Overrides of PyTorch's methods, in the order of a step.

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._handed_over.clear()
        self._whole.clear()
        # No version of PyTorch gives a stage its schedule: the constructor of a schedule only sets `has_backward`, and
        # `step` calls methods without itself. Only this frame has the schedule and its whole target.
        frame = sys._getframe(1)
        while not isinstance((step := frame.f_locals).get("self"), _PipelineSchedule):
            if (frame := frame.f_back) is None:
                raise RuntimeError("a LowBitStage can only be run by `step` or `eval` of a schedule of PyTorch's")
        schedule, target = step["self"], step.get("target")
        _take_over(schedule)
        # Raise the error of too few targets, or of no tensor, within a pass, so that all ranks learn of it; PyTorch
        # raises it before one.
        rows = len(target) if isinstance(target, Tensor) and target.dim() else 0
        if target is not None and rows < schedule._n_microbatches:
            targets = list(target) if rows else []
            schedule._step_microbatches(*schedule._split_inputs(step["args"], step["kwargs"]), targets)

    # The schedule gets no operations to run: `lanes` sends, and has posted its receives.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        layouts = self._layouts[fwd_chunk_id].inputs
        if self.stage_index - 1 in self.lanes.peers:
            inputs = self.lanes.take("forward", fwd_chunk_id, layouts)
        else:
            inputs = self._handed_over.pop(("forward", fwd_chunk_id))
        learn = self.has_backward and torch.is_grad_enabled()
        return tuple(
            x.requires_grad_(learn and layout.requires_grad)
            for x, layout in zip(inputs, layouts, strict=True)
            if x is not None
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        layouts = self._layouts[fwd_chunk_id].outputs
        if self.has_backward and not self.is_last:
            for x, layout in zip(_as_tuple(output), layouts, strict=False):  # `Lanes.send` checks the rest
                if isinstance(x, Tensor) and x.requires_grad and not layout.requires_grad:
                    raise ValueError(
                        f"an output of stage {self.stage_index} requires a gradient, which it did not when the ranks "
                        "agreed on this kind of batch; after unfreezing parameters, create new stages"
                    )
        return output

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        layouts = self._layouts[bwd_chunk_id].outputs
        if self.stage_index + 1 not in self.lanes.peers:
            grads = self._handed_over.pop(("backward", bwd_chunk_id))
            return tuple(self._or_zeros(*pair) for pair in zip(grads, layouts, strict=True))
        learned = [layout for layout in layouts if layout.requires_grad]
        grads = iter(self.lanes.take("backward", bwd_chunk_id, learned))
        return tuple(next(grads) if layout.requires_grad else None for layout in layouts)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **named: Any) -> None:
        # PyTorch's split loses gradients of parameters that no input with a gradient leads to, such as all parameters
        # after frozen stages. Its own first stage is never split; nor is a stage with its own `dw_builder`.
        if not (full_backward or self.is_first or self.dw_builder) and self.has_backward:
            outputs, inputs = self.fwd_cache[bwd_chunk_id]
            if not _can_be_split((loss,) if self.is_last else outputs, inputs):
                self._whole.add(bwd_chunk_id)
        whole = full_backward or bwd_chunk_id in self._whole
        super().backward_one_chunk(bwd_chunk_id, loss, whole, **named)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, **named: Any) -> None:
        if bwd_chunk_id not in self._whole:
            super().backward_weight_one_chunk(bwd_chunk_id, **named)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.stage_index + 1 in self.lanes.peers:
            self.lanes.send("forward", fwd_chunk_id, [op.tensor for op in super().get_fwd_send_ops(fwd_chunk_id)])
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            layouts = self._layouts[bwd_chunk_id].inputs
            grads = self.bwd_cache.pop(bwd_chunk_id)[: len(layouts)]
            tensors = [self._or_zeros(*pair) for pair in zip(grads, layouts, strict=True)]
            self.lanes.send("backward", bwd_chunk_id, [x for x in tensors if x is not None])
        return []

    # V schedules: between stages of one rank.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._handed_over["forward", mb_index] = tuple(x.detach() for x in _as_tuple(prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # V schedules ask for gradients in evaluation too, where PyTorch's own method raises.
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            self._handed_over["backward", mb_index] = next_stage_bwd_outputs

    # PyTorch 2.11 would compare inputs and outputs with its own preparation.

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        pass

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        pass

    def _real(self, x: Any, *, all_trained: bool) -> Any:
        """Return an input of a trial run, which the module may change in place; zeros in the place of a layout."""
        if not isinstance(x, Tensor):
            return x
        if not x.is_meta:  # of the first stage
            real, learns = x.detach().clone(), x.requires_grad
        else:
            real = torch.zeros_like(x, device=self.device)
            learns = x.requires_grad or (all_trained and x.is_floating_point() and not isinstance(x, Constant))
        real.requires_grad_(learns)
        return real.clone() if all_trained else real  # leaves that require gradients cannot be changed

    def _or_zeros(self, grad: Tensor | None, layout: Tensor) -> Tensor | None:
        if grad is not None or not layout.requires_grad:
            return grad
        return torch.zeros(layout.shape, dtype=layout.dtype, device=self.device)

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore, after the block, random number generators, buffers, and parameters that FSDP has gathered."""
        buffers = [
            (module, name, buffer, buffer.clone(), buffer.requires_grad)
            for module in self.submod.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        device = torch.device(self.device)
        devices = [] if device.type in ("cpu", "meta") else [device]
        try:
            with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
                yield
        finally:
            getattr(self, "_post_metadata_inference_cleanup", lambda: None)()
            with torch.no_grad():
                for module, name, buffer, before, learned in buffers:
                    if buffer.requires_grad and not learned:  # written to in place, by a trial with gradients
                        buffer.detach_()
                    buffer.copy_(before)
                    setattr(module, name, buffer)  # modules may have put another in its place


def trial(stage: HookedStage, inputs: Sequence[Any], kwargs: dict[str, Any], *, training: bool) -> tuple[Tensor, ...]:
    """Run the module with inputs like these (tensors or layouts); return its outputs' layouts.

    Run it a second time if floating ones need no gradient: some may be constants, others come from frozen parameters or
    from an evaluation.
    """
    layouts = _run_once(stage, inputs, kwargs, training=training)
    if all(x.requires_grad or not x.is_floating_point() for x in layouts):
        return layouts
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_all_trained(stage.submod))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # no graph is compiled for this run alone
        run = partial(_run_once, stage, inputs, kwargs, training=True, all_trained=True)
        try:
            # Nothing is kept for a backward pass: an evaluation may have no memory for that.
            with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
                return mark_constants(layouts, run())
        except (RuntimeError, TypeError):  # as of a module that differentiates, which needs what is kept
            return mark_constants(layouts, run())


def _can_be_split(outputs: Sequence[Tensor], inputs: Sequence[Any]) -> bool:
    """Whether each output with a gradient depends on an input with one."""
    targets = {get_gradient_edge(x).node for x in inputs if isinstance(x, Tensor) and x.requires_grad}
    for output in outputs:
        if not output.requires_grad:
            continue
        ahead = [get_gradient_edge(output).node]
        seen = set(ahead)
        while ahead and ahead[-1] not in targets:
            new = {node for node, _ in ahead.pop().next_functions if node is not None} - seen
            seen |= new
            ahead += new
        if not ahead:
            return False
    return True


def _run_once(
    stage: HookedStage, inputs: Sequence[Any], kwargs: dict[str, Any], *, training: bool, all_trained: bool = False
) -> tuple[Tensor, ...]:
    with stage._restored(), torch.set_grad_enabled(training):
        real = [stage._real(x, all_trained=all_trained) for x in inputs]
        named = {name: stage._real(x, all_trained=all_trained) for name, x in kwargs.items()}
        return tuple(map(layout_of, _as_tuple(stage.submod(*real, **named))))


@contextlib.contextmanager
def _all_trained(module: torch.nn.Module) -> Iterator[None]:
    """Let all floating parameters require gradients within the block."""
    frozen = [p for p in module.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_()
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _declared(values: Any, assume: bool) -> tuple[Tensor, ...]:
    """Return the layouts of declared tensors; `assume`: if none requires a gradient, all floating ones do."""
    layouts = tuple(map(layout_of, _as_tuple(values)))
    if assume and not any(x.requires_grad for x in layouts):
        for layout in layouts:
            layout.requires_grad_(layout.is_floating_point())
    return mark_constants(layouts, layouts)


# This relies on two things, which hold for PyTorch 2.11 to 2.15. `clear_runtime_states` is the first method of a stage
# that `schedule.step` calls, `_split_inputs` follows, and `_step_microbatches` does all after the batch is split.
# A schedule prepares its stages unless `_stage(s)_forward_initialized` and `_stage(s)_backward_initialized` are set.
def _take_over(schedule: _PipelineSchedule) -> None:
    """Make the schedule run its micro-batches within `HookedStage._run_pass`, without preparing stages."""
    if getattr(schedule, "_runs_hooked", False):
        return
    kind, this = type(schedule), weakref.ref(schedule)

    def run_pass(args: Any, kwargs: Any, body: Callable[[_PipelineSchedule], Any], fault: str = "") -> None:
        schedule = this()
        assert schedule is not None  # one of its methods is running
        held = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        stages = sorted((stage for stage in held if isinstance(stage, HookedStage)), key=lambda s: s.stage_index)
        if len(stages) < len(held):
            kinds = ", ".join(sorted({type(stage).__name__ for stage in held}))
            raise TypeError(f"stages of this rank are {kinds}; allowed: only lowbit's, or only PyTorch's")
        count, training = schedule._n_microbatches, schedule._has_backward
        for prefix in ("_stage", "_stages"):
            setattr(schedule, f"{prefix}_forward_initialized", True)
            setattr(schedule, f"{prefix}_backward_initialized", training)
        batch = Batch(training, count, args or [()] * count, kwargs or [{}] * count, fault)
        stages[0]._run_pass(stages, batch, lambda: body(schedule))

    def run_hooked(arg_mbs: Any = None, kwarg_mbs: Any = None, *rest: Any, **named: Any) -> None:
        run_pass(arg_mbs, kwarg_mbs, lambda its: kind._step_microbatches(its, arg_mbs, kwarg_mbs, *rest, **named))

    def split_hooked(args: Any, kwargs: Any = None) -> Any:
        schedule = this()
        assert schedule is not None
        try:
            return kind._split_inputs(schedule, args, kwargs)
        except Exception as error:  # raise it within a pass, so that all ranks learn of it
            run_pass(None, None, partial(_raise, error), described(error))

    setattr(schedule, "_step_microbatches", run_hooked)  # noqa: B010 (pyright)
    setattr(schedule, "_split_inputs", split_hooked)  # noqa: B010
    setattr(schedule, "_runs_hooked", True)  # noqa: B010


def _raise(error: Exception, schedule: _PipelineSchedule) -> Never:
    raise error


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)
