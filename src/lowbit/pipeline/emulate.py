"""A pipeline's codecs in a model of one process, to try their accuracy before any cluster is rented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowbit.codecs.base import Codec, check_int
from lowbit.pipeline.arguments import check_warm_up, checked_samples, codec_at, keys_of
from lowbit.pipeline.boundary import CHOICE, Direction, Lane, Step
from lowbit.pipeline.traffic import Traffic
from lowbit.ranks.checksum import CHECKSUM_BYTES

_ENDS = ("sender", "receiver")


def emulate_(
    model: nn.Module,
    *,
    at: Sequence[str],
    forward: Codec | Mapping[int, Codec],
    backward: Codec | Mapping[int, Codec],
    warmup_steps: int = 0,
    in_evaluation: bool = True,
) -> Emulation:
    """Put a pipeline's codecs after some modules of a model, in place.

    What these modules return then passes through the same sessions, on the way forward and back, as between the ranks
    of a pipeline that is cut there: the numbers are the same, bit for bit, if the micro-batches are, and come in the
    same order, which matters to codecs that keep something between messages.

    Activation checkpointing runs modules again during backward. That is no second message: it is coded as the first one
    was and not counted. Codecs that keep something between messages have moved on by then, and refuse it; a pipeline
    has its boundaries outside of what is computed again, so leave these modules out of it.

    Args:
        model: any module.
        at: names of its submodules (`model.named_modules()`) that end a stage, in the order of the stages. Each returns
            a floating tensor, or a tuple, list or mapping (such as a Hugging Face `ModelOutput`) whose first entry is
            one; only that entry is coded.
        forward: format of activations: one codec, or a mapping from the position in `at`.
        backward: format of gradients, likewise.
        warmup_steps: so many training steps go uncoded; `Emulation.step` counts them, as `LowBitStage` counts calls of
            `schedule.step`. At least 1 for a codec that leaves something to choose, such as
            `SubspaceQuant(rank="auto")`: it is settled in the last.
        in_evaluation: code modules in evaluation mode (`model.eval()`) too, as `LowBitStage` does; codecs that know
            only the samples they are trained on never are.

    Raises:
        ValueError, TypeError: a name that the model does not have, or a codec or number that cannot be.
    """
    check_int("warmup_steps", warmup_steps, 0, 2**63 - 1)
    modules = dict(model.named_modules())
    if isinstance(at, str) or not at:
        raise ValueError(f"at is {at!r}; allowed: a list of names of submodules, such as {_some(modules)}")
    if unknown := [name for name in at if name not in modules or not name]:
        raise ValueError(f"at has {unknown}, which the model has not; it has names such as {_some(modules)}")
    if len(set(at)) != len(at):
        raise ValueError(f"at is {list(at)}; a name must not occur twice")
    codecs = [
        (codec_at("forward", forward, i, len(at)), codec_at("backward", backward, i, len(at))) for i in range(len(at))
    ]
    check_warm_up("forward", forward, warmup_steps)
    check_warm_up("backward", backward, warmup_steps)
    emulation = Emulation(warmup_steps, in_evaluation)
    for boundary, (name, pair) in enumerate(zip(at, codecs, strict=True)):
        emulation._insert(modules[name], boundary, *pair)
    return emulation


class Emulation:
    """Codecs inside a model; made by `emulate_`.

    Attributes:
        traffic: what the stages of the pipeline would send together, with checksums, as they do by default.
    """

    def __init__(self, warmup_steps: int, in_evaluation: bool) -> None:
        self.traffic = Traffic()
        self._warmup_steps = warmup_steps
        self._in_evaluation = in_evaluation
        self._steps = 0
        self._samples: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._wires: list[_Wire] = []

    def step(self) -> None:
        """Count a training step: what one call of a pipeline's `schedule.step` does.

        Call it after the backward of each batch that the pipeline would take at once: of its last micro-batch, and
        before the optimizer's step or without one. Where gradients of several batches add up for a step of the
        optimizer, it is called for each of these batches, as `schedule.step` is.
        """
        self._steps += 1

    def set_samples(self, ids: Tensor | Sequence[int]) -> None:
        """Tell which samples the next forward passes hold: int64 (micro-batch,), for codecs that need it.

        Raises:
            TypeError, ValueError: not integers, or not one dimension.
        """
        self._samples = checked_samples(ids)

    def state_bytes(self) -> int:
        """Bytes that the codecs of both ends of all boundaries keep between steps."""
        return sum(wire.state_bytes() for wire in self._wires)

    def chosen(self) -> dict[str, Codec]:
        """What was settled at the end of the warm-up, by boundary, direction and tensor, as `LowBitStage.chosen`."""
        return {name: codec for wire in self._wires for name, codec in wire.chosen().items()}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the model: training steps so far, and what codecs keep at both ends.

        Integers, strings and tensors in dictionaries, which `torch.load(..., weights_only=True)` reads. `traffic` and
        the ids of `set_samples` are not among them.

        Raises:
            RuntimeError: a module in `at` has run on several devices.
        """
        wires = {wire.name: wire.state_dict() for wire in self._wires}
        return {"steps": self._steps, "warmup_steps": self._warmup_steps, "boundaries": wires}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, of an emulation with the same boundaries, codecs and warm-up.

        Raises:
            ValueError: a state of another emulation, or none at all; nothing has changed then. What does not fit the
                model's shapes is refused at once by modules that have run, and by others when they run.
            RuntimeError: a module in `at` has run on several devices.
        """
        wires = {wire.name: wire for wire in self._wires}
        _check_keys("state", state, {"steps", "warmup_steps", "boundaries"})
        steps, warmup_steps = state["steps"], state["warmup_steps"]
        if type(steps) is not int or steps < 0:
            raise ValueError(f"state has steps {steps!r}; allowed: an integer of at least 0")
        if type(warmup_steps) is not int or warmup_steps != self._warmup_steps:
            raise ValueError(f"state has warmup_steps {warmup_steps!r}; this emulation has {self._warmup_steps}")
        _check_keys("state", state["boundaries"], set(wires))
        for name, wire in wires.items():
            wire.check_state(state["boundaries"][name])
        for name, wire in wires.items():
            wire.load_state_dict(state["boundaries"][name])
        self._steps = steps

    def remove(self) -> None:
        """Take the codecs out of the model again."""
        while self._handles:
            self._handles.pop().remove()

    def _insert(self, module: nn.Module, boundary: int, forward: Codec, backward: Codec) -> None:
        there = _Wire(boundary, "forward", forward, self.traffic)
        back = _Wire(boundary, "backward", backward, self.traffic)
        again = _Wire(boundary, "forward", forward, Traffic())
        self._wires += [there, back]

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if not module.training and not self._in_evaluation:
                return output
            step = self._now(module.training, forward.needs_key or backward.needs_key)
            way = there
            if _in_backward():
                if forward.stateful and not step.full_precision:
                    raise RuntimeError(
                        f"boundary {boundary} is computed again during backward (activation checkpointing), and "
                        f"{forward} has coded that message already; allowed: checkpointing that leaves the modules in "
                        "`at` out, or a codec without state"
                    )
                way = again
            return _map_first(output, lambda x: _Crossing.apply(x, way, back, step))

        self._handles.append(module.register_forward_hook(hook))

    def _now(self, training: bool, keyed: bool) -> Step:
        step = Step.numbered(self._steps, self._warmup_steps, training=training)
        if not keyed or not training or step.full_precision:
            return step
        if self._samples is None:
            raise ValueError("a codec that keeps something per sample needs set_samples(ids) first")
        return replace(step, keys=keys_of(self._samples, 1))


class _Wire:
    """Both ends of one direction of a boundary: what one encodes the other decodes."""

    def __init__(self, boundary: int, direction: Direction, codec: Codec, traffic: Traffic) -> None:
        self.name = f"boundary {boundary} {direction}"
        self._args = boundary, direction, codec
        self._codec, self._traffic = codec, traffic
        self._ends: dict[torch.device, tuple[Lane, Lane]] = {}
        self._restored: dict[str, Any] = {}  # for both ends, until they are there

    def carry(self, x: Tensor, step: Step) -> Tensor:
        """`x` as it arrives."""
        sender, receiver = self._ends_on(x.device)
        slots = [(x.shape, x.dtype)]
        for lane in (sender, receiver):
            lane.prepare(slots, step)
            lane.use([slots])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        receiver.decode(0, step, 0, sender.encode(0, step, 0, x), out)
        return out

    def state_bytes(self) -> int:
        return sum(lane.state_bytes() for lanes in self._ends.values() for lane in lanes)

    def chosen(self) -> dict[str, Codec]:
        return {
            f"{sender.name}, {tensor}": codec
            for sender, _ in self._ends.values()
            for tensor, codec in sender.chosen().items()
        }

    def state_dict(self) -> dict[str, Any]:
        ends = self._only_ends()
        kept = {end: lane.state_dict() for end, lane in ends.items()} or self._restored
        return {"codec": self._identity(), **(kept or {end: {} for end in _ENDS})}

    def check_state(self, state: Any) -> None:
        """Raise a ValueError unless `state` may be one of this codec."""
        _check_keys(self.name, state, {"codec", *_ENDS})
        if state["codec"] != self._identity():
            raise ValueError(f"{self.name}: state is of {state['codec']!r}; this emulation has {self._identity()}")
        choices = []
        for end in _ENDS:
            if not _is_state(state[end]):
                raise ValueError(f"{self.name}: state of the {end} is none; allowed: what state_dict gave")
            choices.append({name: s[CHOICE] for name, s in state[end].items() if CHOICE in s})
        for choice in choices[0].values():
            self._codec.settle(choice)
        if choices[0] != choices[1]:
            raise ValueError(f"{self.name}: state has {choices}; both ends have the same choices")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ends = self._only_ends()
        for end, lane in ends.items():
            lane.load_state_dict(state[end])
        self._restored = {} if ends else {end: dict(state[end]) for end in _ENDS}

    def _identity(self) -> str:
        return f"{self._codec} [{self._codec.fingerprint()}]"

    def _only_ends(self) -> dict[str, Lane]:
        """Both ends by name; none before the first message."""
        if len(self._ends) > 1:
            devices = ", ".join(map(str, self._ends))
            raise RuntimeError(f"{self.name} has been on {devices}; allowed for states: one device")
        return {e: lane for lanes in self._ends.values() for e, lane in zip(_ENDS, lanes, strict=True)}

    def _ends_on(self, device: torch.device) -> tuple[Lane, Lane]:
        if device not in self._ends:
            sender, receiver = (Lane(*self._args, device, self._traffic, CHECKSUM_BYTES) for _ in range(2))
            if self._restored:
                sender.load_state_dict(self._restored["sender"])
                receiver.load_state_dict(self._restored["receiver"])
                self._restored = {}
            self._ends[device] = sender, receiver
        return self._ends[device]


class _Crossing(torch.autograd.Function):
    """To the next stage and, as a gradient, back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Wire, back: _Wire, step: Step) -> Tensor:
        ctx.back, ctx.step = back, step
        return there.carry(x, step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back.carry(grads[0], ctx.step), None, None, None


def _check_keys(what: str, state: Any, keys: set[str]) -> None:
    """Raise a ValueError unless `state` is a dictionary with these keys."""
    found = set(state) if isinstance(state, Mapping) else None
    if found != keys:
        held = type(state).__name__ if found is None else ", ".join(sorted(map(str, found))) or "nothing"
        raise ValueError(f"{what} has {held}; allowed: {', '.join(sorted(keys))}")


def _is_state(lane: Any) -> bool:
    """Whether this is shaped like what `Lane.state_dict` gives: what sessions keep, by name."""
    return isinstance(lane, Mapping) and all(
        isinstance(name, str)
        and isinstance(kept, Mapping)
        and all(
            isinstance(k, str) and (type(v) is int or (isinstance(v, Tensor) and k != CHOICE)) for k, v in kept.items()
        )
        for name, kept in lane.items()
    )


def _in_backward() -> bool:
    """Whether autograd is computing gradients in this thread: what runs forward now has run before."""
    return torch._C._current_graph_task_id() != -1


def _map_first(output: Any, change: Any) -> Any:
    """`output` with its first entry changed; a tensor is its own first entry.

    Raises:
        TypeError: the entry is not a floating tensor.
    """
    if isinstance(output, Mapping) and output:
        name = next(iter(output))
        return type(output)(**{**output, name: _map_first(output[name], change)})
    if isinstance(output, tuple | list) and output:
        make = getattr(type(output), "_make", type(output))  # a named tuple takes its fields apart
        return make([_map_first(output[0], change), *output[1:]])
    if not isinstance(output, Tensor) or not output.is_floating_point():
        found = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(f"a module in `at` returned {found}; allowed: a floating tensor (first)")
    return change(output)


def _some(modules: Mapping[str, nn.Module]) -> str:
    names = [name for name in modules if name]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
