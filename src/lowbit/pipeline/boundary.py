"""A lane: one direction of one boundary, at one of its ends. Tensors go in and bytes come out, or the other way round.

Nothing here depends on processes, so a pipeline and its emulation in one process run this same code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from lowbit.codecs.base import Codec, Session
from lowbit.codecs.checks import FLOATS
from lowbit.codecs.foreign import check_ends, is_own, open_session
from lowbit.pipeline.arguments import StepKind
from lowbit.pipeline.states import Look, Slot, States, described
from lowbit.wire.traffic import Traffic

Direction = Literal["forward", "backward"]

_CHOICE_BYTES = 16
_CODED = StepKind()


class Lane:
    """One direction of one boundary, at one end: encodes or decodes each tensor that crosses there.

    Floating tensors go through a session of the codec, one for each tensor and shape. Everything else travels as it is:
    integers and booleans, all tensors during the warm-up, and evaluation passes of a codec that knows only the samples
    it is trained on (`needs_key`).

    If a codec leaves a parameter open (`Codec.settled`), the sender chooses it for each tensor, from its first message
    in the last step of the warm-up. All messages of that step carry the choice, since they may arrive in any order: 16
    bytes behind the tensor's, an int64 and zeros. A codec with a goal in loss chooses one step earlier (`Look`).

    `overhead`: bytes that travel with every payload, to be counted. `look`: shared by both directions at this end of
    the boundary; None: no codec has a goal in loss.
    """

    def __init__(
        self,
        boundary: int,
        direction: Direction,
        codec: Codec,
        device: torch.device | str,
        traffic: Traffic,
        overhead: int = 0,
        look: Look | None = None,
    ) -> None:
        self.name = f"boundary {boundary} {direction}"
        self.boundary, self.direction, self.codec = boundary, direction, codec
        self._device = torch.device(device)
        self.states = States(self.name, codec, self._device)
        self._slots: Sequence[Sequence[Slot]] = ()  # by micro-batch
        self._traffic, self._overhead = traffic, overhead
        self._look = look
        if look is not None:
            look.add(codec, self.states, backward=direction == "backward")

    def prepare(self, slots: Sequence[Slot], step: StepKind = _CODED) -> None:
        """Get ready for tensors that will cross together; TypeError: a dtype of no codec; else as `States.session`."""
        for index, slot in enumerate(slots):
            dtype = slot[1]
            if dtype.is_floating_point and dtype not in FLOATS:
                raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, FLOATS))}")
            if dtype.is_floating_point and (not step.full_precision or self.states.is_settled(index, slot)):
                self.states.session(index, slot)

    def use(self, slots: Sequence[Sequence[Slot]]) -> None:
        """From now on, these tensors cross with each micro-batch; all have been prepared."""
        self._slots = slots

    def warm_up(self, slots: Sequence[Slot]) -> None:
        """Compile the codec's kernels for tensors that will cross; sessions stay as they are."""
        for index, slot in enumerate(slots):
            if slot[1].is_floating_point and self.states.is_settled(index, slot):
                warm_up(self.states.session(index, slot).codec, *slot, self._device)

    def messages(self, micro_batch: int) -> int:
        return len(self._slots[micro_batch]) if self._slots else 0

    def nbytes(self, index: int, step: StepKind, micro_batch: int) -> int:
        return self._coding(index, step, micro_batch)[1]

    def encode(
        self, index: int, step: StepKind, micro_batch: int, x: Tensor, *, room: int = 0, note: Tensor | None = None
    ) -> Tensor:
        """Return the bytes of tensor `index`: uint8, one dimension, in new memory; empty if there is nothing to send.

        Args:
            room: bytes to leave free behind its own.
            note: what `observe` returned for the activations whose gradient this is.

        Raises:
            ValueError: shape or dtype differ from what the boundary was prepared for.
        """
        slot = self._slots[micro_batch][index]
        if (x.shape, x.dtype) != slot:
            raise ValueError(
                f"{self.name}: tensor {index} is {described((x.shape, x.dtype))}; both ends expect {described(slot)}"
            )
        with self._isolated("encode", micro_batch):
            session, size = self._coding(index, step, micro_batch)
            message = torch.empty(size + room * bool(size), dtype=torch.uint8, device=x.device)
            payload = message[:size]
            if session is not None:
                session.encode(x, training=step.training, out=payload, note=note)
            else:
                # Copied, because the model may reuse the memory of its output while the bytes are in flight.
                plain, rest = payload.tensor_split([_plain_bytes(slot)])
                plain.view(x.dtype).view(x.shape).copy_(x.detach())
                self._look_at(index, step, micro_batch, x)
                if self._carries_choice(slot, step):
                    choice = self.states.choose(index, slot, x)
                    warm_up(self.states.session(index, slot).codec, *slot, self._device)
                    rest.copy_(torch.tensor([choice, 0], dtype=torch.int64).view(torch.uint8))
        self._traffic.count(self.direction, size + self._overhead * bool(size), x.numel())
        return message

    def decode(self, index: int, step: StepKind, micro_batch: int, payload: Tensor, out: Tensor) -> None:
        """Write the tensor in `payload` to `out`, which has the shape and dtype of this slot."""
        with self._isolated("decode", micro_batch):
            out, slot = out.detach(), self._slots[micro_batch][index]
            session, _ = self._coding(index, step, micro_batch)
            if session is not None:
                session.decode(payload, out=out, training=step.training)
            else:
                plain, rest = payload.tensor_split([_plain_bytes(slot)])
                if self._carries_choice(slot, step):
                    self.states.adopt(index, slot, int(rest.clone().view(torch.int64)[0]))
                    warm_up(self.states.session(index, slot).codec, *slot, self._device)
                out.copy_(plain.view(out.dtype).view(out.shape))
                self._look_at(index, step, micro_batch, out)

    def observe(self, index: int, micro_batch: int, x: Tensor) -> Tensor | None:
        """Show this sender the tensor that crossed the other way: a gradient of its activations, or activations.

        For activations, returns a note to pass to `encode` with their gradient, if the codec wants one.
        """
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self.states.observe(index, self._slots[micro_batch][index], x.detach())

    def facts(self, slots: Sequence[Slot]) -> dict[str, str]:
        """Facts that both ends must share before the first message with these tensors."""
        sessions = [
            self.states.session(index, slot) if self.states.is_settled(index, slot) else None
            for index, slot in enumerate(slots)
            if slot[1].is_floating_point
        ]
        return {
            f"{self.name} tensors": _listed(map(described, slots)),
            f"{self.name} payload bytes": _listed(s.max_nbytes() if s else "open" for s in sessions),
            f"{self.name} state bytes": _listed(s.state_bytes() if s else "open" for s in sessions),
            f"{self.name} state": self.states.digest(),
        }

    def _coding(self, index: int, step: StepKind, micro_batch: int) -> tuple[Session | None, int]:
        """The session that codes the next message of a tensor (None: the tensor travels as it is), and its bytes."""
        slot = self._slots[micro_batch][index]
        unknown = self.codec.needs_key and not step.training  # the codec only knows the samples it is trained on
        if step.full_precision or unknown or not slot[1].is_floating_point:
            return None, _plain_bytes(slot) + _CHOICE_BYTES * self._carries_choice(slot, step)
        session = self.states.session(index, slot)
        if step.samples:
            session.samples = step.samples[micro_batch]
        return session, session.nbytes()

    def _look_at(self, index: int, step: StepKind, micro_batch: int, x: Tensor) -> None:
        if step.looking and self._look is not None and x.is_floating_point():
            note = self._look.activations if self.direction == "forward" else self._look.gradient
            note(index, micro_batch, x)

    def _carries_choice(self, slot: Slot, step: StepKind) -> bool:
        """Whether the sender's choice follows the tensor in a message at full precision."""
        return step.settling and not self.codec.settled and slot[1].is_floating_point

    @contextlib.contextmanager
    def _isolated(self, span: str, micro_batch: int) -> Iterator[None]:
        """Run a timed block apart from the model: without a graph, and without autocast, which would round in it."""
        timed = self._traffic.timing("codec_seconds", span, at=self.name, micro_batch=micro_batch)
        with timed, torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            yield


@functools.cache
def warm_up(codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Code zeros both ways, once in a process, so that the codec's kernels are compiled before a rank waits."""
    sender, receiver = (open_session(codec, shape=shape, dtype=dtype, device=device) for _ in range(2))
    if codec.needs_key:
        sender.samples = receiver.samples = range(shape[0])
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = torch.zeros(shape, dtype=dtype, device=device)
        if not is_own(codec):  # zeros would leave many states as they were
            x.copy_(torch.linspace(-1, 1, x.numel(), device=device).view(shape))
        for _ in range(2 if codec.needs_key else 1):  # a sample that returns is coded differently
            receiver.decode(sender.encode(x))
    check_ends(sender, receiver)


def _plain_bytes(slot: Slot) -> int:
    shape, dtype = slot
    return shape.numel() * dtype.itemsize


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
