"""A pipeline's codecs within one process, to measure their accuracy without a cluster."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_int
from lowbit.codecs.defaults import RECOMMENDED
from lowbit.escape import shown
from lowbit.pipeline import arguments
from lowbit.pipeline.anchors import TokenAnchor
from lowbit.pipeline.arguments import Codecs, StepKind, codec_at
from lowbit.pipeline.boundary import Direction, Lane, Slot
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit.wire.traffic import Traffic


def emulate_(
    model: nn.Module,
    *,
    at: Sequence[str],
    forward: Codecs = RECOMMENDED,
    backward: Codecs | None = None,
    warmup_steps: int = 0,
    in_evaluation: bool = True,
    anchor: TokenAnchor | None = None,
) -> "Emulation":
    """Put a pipeline's codecs after some modules of a model, in place.

    The outputs of these modules, and their gradients, then pass through the same sessions as between the ranks of a
    pipeline that is cut there. The numbers are the same, bit for bit, if the micro-batches are the same and, for codecs
    that keep something between messages, come in the same order.

    Activation checkpointing runs modules again during backward. The output is then coded as the first time, and not
    counted as a second message. Codecs that keep something between messages cannot repeat one and raise an error; leave
    these modules out of checkpointing, as a pipeline does.

    Args:
        model: any module.
        at: names of its submodules (`model.named_modules()`) that end a stage, in the order of the stages. Each returns
            a floating tensor, or a tuple, list or mapping (such as a Hugging Face `ModelOutput`) with one. Only one is
            coded: the first that requires a gradient; where none does, the one in the same place as in the last
            training pass, or else the first. So constants, such as masks, stay exact, as in a pipeline.
        forward: format of activations: one codec, or a mapping from the position in `at`.
        backward: format of gradients, likewise; None: the default for the format of activations.
        warmup_steps: number of training steps that are not coded; `Emulation.step` counts them, as `LowBitStage` counts
            calls of `schedule.step`.
        in_evaluation: code modules in evaluation mode (`model.eval()`) too, as `LowBitStage` does; codecs that know
            only the samples they are trained on never are.
        anchor: code only what the token ids do not already say about activations (`Emulation.set_tokens`); modules in
            `at` must then not be checkpointed, as for codecs that keep something.

    Raises:
        ValueError, TypeError: a name that the model does not have, or an invalid codec or number.
    """
    check_int("warmup_steps", warmup_steps, 0, 2**63 - 1)
    arguments.check_anchor(anchor, warmup_steps)
    modules = dict(model.named_modules())
    if isinstance(at, str) or not at:
        raise ValueError(f"at is {shown(at)}; allowed: a list of names of submodules, such as {_some(modules)}")
    if unknown := [name for name in at if name not in modules or not name]:
        raise ValueError(
            f"at has {shown(unknown)}, which the model does not have; it has names such as {_some(modules)}"
        )
    if len(set(at)) != len(at):
        raise ValueError(f"at is {shown(list(at))}; a name must not occur twice")
    backward = arguments.default_backward(forward) if backward is None else backward
    codecs = [
        (codec_at("forward", forward, i, len(at)), codec_at("backward", backward, i, len(at))) for i in range(len(at))
    ]
    emulation = Emulation(warmup_steps, in_evaluation, anchor)
    for boundary, (name, pair) in enumerate(zip(at, codecs, strict=True)):
        emulation._insert(modules[name], boundary, *pair)
    return emulation


class Emulation:
    """The codecs that `emulate_` put into a model.

    Attributes:
        traffic: what all stages of the pipeline together would send, including the checksums that are sent by default.
    """

    def __init__(self, warmup_steps: int, in_evaluation: bool, anchor: TokenAnchor | None) -> None:
        self.traffic = Traffic()
        self._steps, self._warmup_steps, self._in_evaluation = 0, warmup_steps, in_evaluation
        self._samples: Sequence[int] | None = None
        self._anchor = anchor
        self._tokens: Tensor | None = None
        self._renewed: set[int] = set()  # boundaries that a first micro-batch of this step has crossed
        self._handles: list[RemovableHandle] = []
        self._pairs: list[_LanePair] = []

    def step(self) -> None:
        """Count a training step, as one call of a pipeline's `schedule.step` does.

        Call it after the last backward of each batch that the pipeline would take in one step. Where gradients of
        several batches add up for a step of the optimizer, call it for each of these batches.
        """
        self._steps += 1
        self._renewed.clear()
        for pair in self._pairs:
            for sender, _ in pair.lanes.values():
                sender.states.end_step()

    def set_samples(self, ids: Tensor | Sequence[int]) -> None:
        """Set the sample ids of all forward passes from now on, int64 (micro-batch,), for codecs that need them.

        Raises:
            TypeError, ValueError: not integers, not one dimension, or not all different.
        """
        self._samples = arguments.checked_samples(ids).tolist()

    def set_tokens(self, ids: Tensor | None) -> None:
        """Set the token ids of all forward passes from now on, int64 (micro-batch, sequence), for token anchors.

        Args:
            ids: of the micro-batch; None: it has none, and is coded without token anchors.

        Raises:
            TypeError, ValueError: not integers, another number of dimensions, or ids that the embedding does not have.
        """
        if self._anchor is not None:
            self._tokens = None if ids is None else self._anchor.checked(ids)

    def state_bytes(self) -> int:
        """Bytes that codecs and token anchors of both ends of all boundaries keep between steps."""
        ends = [lane for pair in self._pairs for lanes in pair.lanes.values() for lane in lanes]
        return sum(lane.states.nbytes() + (lane.anchors.nbytes() if lane.anchors else 0) for lane in ends)

    def remove(self) -> None:
        """Take the codecs out of the model again."""
        while self._handles:
            self._handles.pop().remove()

    def _insert(self, module: nn.Module, boundary: int, forward: Codec, backward: Codec) -> None:
        activations = _LanePair(boundary, "forward", forward, self.traffic, self._anchor)
        gradients = _LanePair(boundary, "backward", backward, self.traffic)
        recomputed = _LanePair(boundary, "forward", forward, Traffic())
        self._pairs += [activations, gradients]

        place: _Path = ()

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal place
            if not module.training and not self._in_evaluation:
                return output
            step = StepKind(module.training, self._steps < self._warmup_steps)
            if self._samples is not None:
                step = replace(step, samples=[self._samples])
            recomputing = torch._C._current_graph_task_id() != -1  # autograd runs in this thread
            if self._tokens is not None:
                step = replace(step, tokens=[self._tokens])
            if self._anchor is not None and module.training and boundary not in self._renewed and not recomputing:
                self._renewed.add(boundary)
                step = replace(step, renewing=self._anchor.renews(self._steps, self._warmup_steps))
            keeps = forward.stateful or self._anchor is not None
            if recomputing and keeps and not step.full_precision:
                raise RuntimeError(
                    f"boundary {boundary} is computed again during backward (activation checkpointing), and {forward} "
                    "has already coded that message; allowed: checkpointing without the modules in `at`, or a codec "
                    "without state"
                )
            pair = recomputed if recomputing else activations
            place = _place_of_activation(output, place)
            return _changed(output, place, lambda x: _Crossing.apply(x, pair, gradients, step))

        self._handles.append(module.register_forward_hook(hook))


class _LanePair:
    """Both ends of one direction of a boundary, on each device that uses it."""

    def __init__(
        self, boundary: int, direction: Direction, codec: Codec, traffic: Traffic, anchor: TokenAnchor | None = None
    ) -> None:
        self._args: tuple[int, Direction, Codec] = boundary, direction, codec
        self._traffic, self._anchor = traffic, anchor
        self.lanes: dict[torch.device, list[Lane]] = {}  # sender and receiver, by device

    def carry(self, x: Tensor, step: StepKind, note: Tensor | None = None) -> Tensor:
        """Return `x` as it arrives at the other end. note: see `Lane.encode`."""
        sender, receiver = self._ends(x)
        sender.check_tokens([Slot(x.shape, x.dtype)], step.tokens)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        receiver.decode(0, step, 0, sender.encode(0, step, 0, x, note=note), out)
        return out

    def observe(self, x: Tensor) -> Tensor | None:
        return self._ends(x)[0].observe(0, 0, x)

    def _ends(self, x: Tensor) -> list[Lane]:
        if x.device not in self.lanes:
            self.lanes[x.device] = [
                Lane(*self._args, x.device, self._traffic, CHECKSUM_BYTES, self._anchor) for _ in range(2)
            ]
        ends, slots = self.lanes[x.device], [Slot(x.shape, x.dtype)]
        for lane in ends:
            lane.prepare(slots)
            lane.use([slots])
        return ends


class _Crossing(torch.autograd.Function):
    """Passes a tensor to the next stage, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: _LanePair, gradients: _LanePair, step: StepKind) -> Any:
        ctx.activations, ctx.gradients, ctx.step = activations, gradients, step
        arrived = activations.carry(x, step)
        ctx.note = gradients.observe(arrived) if step.training and ctx.needs_input_grad[0] else None
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        arrived = ctx.gradients.carry(grads[0], ctx.step, ctx.note)
        if ctx.step.training:
            ctx.activations.observe(arrived)
        return arrived, None, None, None


_Path = tuple[Any, ...]
"""Keys and positions that lead to an entry of nested containers."""


def _place_of_activation(output: Any, before: _Path) -> _Path:
    """Find the tensor to code; `before`: the one of an earlier pass, where nothing requires a gradient."""
    floating = dict(_floating(output))
    if not floating:
        kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(f"a module in `at` returned {kind}; allowed: a floating tensor, or a container with one")
    learned = [path for path, x in floating.items() if x.requires_grad]
    return next(iter(learned), before if before in floating else next(iter(floating)))


def _floating(output: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield path, output
    elif isinstance(output, Mapping | tuple | list):
        for key, entry in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _floating(entry, (*path, key))


def _changed(output: Any, path: _Path, change: Callable[[Tensor], Any]) -> Any:
    """Return `output` with the entry at `path` changed."""
    if not path:
        return change(output)
    key, *rest = path
    entry = _changed(output[key], tuple(rest), change)
    if isinstance(output, Mapping):
        return type(output)(**{**output, key: entry})
    construct = getattr(type(output), "_make", type(output))  # a named tuple takes its fields one by one
    return construct([*output[:key], entry, *output[key + 1 :]])


def _some(modules: Mapping[str, nn.Module]) -> str:
    names = [name for name in modules if name]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
