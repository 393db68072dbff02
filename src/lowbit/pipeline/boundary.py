"""A lane: one direction of one boundary, at one of its ends. Tensors go in and bytes come out, or the other way round.

Nothing here knows processes, so the pipeline and its emulation in one process share it, and with it their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import FLOATS
from lowbit.codecs.sessions import Key, Session
from lowbit.codecs.stateful import StatefulCodec
from lowbit.pipeline.arguments import Step
from lowbit.pipeline.traffic import Traffic

log = logging.getLogger(__name__)

Direction = Literal["forward", "backward"]

Slot = tuple[torch.Size, torch.dtype]
"""Shape and dtype of one of the tensors that cross a boundary together."""

_CHOICE_BYTES = 16
CHOICE = "choice"
"""Key of what a sender has chosen, in a state."""


_CODED = Step()


class Lane:
    """One direction of one boundary, at one end: which format each tensor has there, and what the format remembers.

    Floating tensors go through a session of the codec, one for each tensor (and shape, unless the codec says that
    shapes share what it keeps: an evaluation's batches are coded with what training's have taught). Everything else
    travels as it is: integers and booleans, all tensors during the warm-up, and evaluation passes of a codec that
    knows only the samples it is trained on (`needs_key`).

    Where a codec leaves a parameter open (`Codec.settled`), the sender chooses it for each tensor, from its first
    message in the last step of the warm-up. All messages of that step have 16 bytes behind the tensor's, since they may
    arrive in any order: the choice, int64, and zeros. From the next step on, both ends code with it.

    Args:
        boundary: i, between stages i and i + 1.
        direction: "forward" for activations, "backward" for gradients.
        codec: format of floating tensors.
        device: where the tensors live.
        traffic: where to count.
        overhead: bytes that travel beside every payload, to be counted.
    """

    def __init__(
        self,
        boundary: int,
        direction: Direction,
        codec: Codec,
        device: torch.device | str,
        traffic: Traffic,
        overhead: int = 0,
    ) -> None:
        self.name = f"boundary {boundary} {direction}"
        self.boundary, self.direction, self.codec = boundary, direction, codec
        self._slots: Sequence[Sequence[Slot]] = ()  # by micro-batch
        self._device = torch.device(device)
        self._traffic, self._overhead = traffic, overhead
        self._sessions: dict[str, Session] = {}
        self._states: dict[str, Session] = {}  # of each state, one of the sessions that share it
        self._restored: dict[str, dict[str, Any]] = {}
        self._choices: dict[str, int] = {}  # for each state, where the codec leaves something open

    def prepare(self, slots: Sequence[Slot], step: Step = _CODED) -> None:
        """Get ready for tensors that will cross together; sessions survive for shapes that come back.

        Raises:
            TypeError: a floating dtype that the codec does not take.
            ValueError: a shape that it does not take, a restored state of another format, or a parameter that it leaves
                open and the warm-up, which is over, has not settled.
        """
        for index, (shape, dtype) in enumerate(slots):
            if dtype.is_floating_point and dtype not in FLOATS:
                raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, FLOATS))}")
            if dtype.is_floating_point and (not step.full_precision or self._is_settled(index, (shape, dtype))):
                self.session(index, shape, dtype)

    def use(self, slots: Sequence[Sequence[Slot]]) -> None:
        """From now on, these tensors cross with each micro-batch; all have been prepared."""
        self._slots = slots

    def warm_up(self, slots: Sequence[Slot]) -> None:
        """Compile the codec's kernels for tensors that will cross; what sessions remember stays as it is."""
        for index, slot in enumerate(slots):
            if slot[1].is_floating_point and self._is_settled(index, slot):
                warm_up(self.session(index, *slot).codec, *slot, self._device)

    def messages(self, micro_batch: int) -> int:
        """How many tensors cross with a micro-batch."""
        return len(self._slots[micro_batch]) if self._slots else 0

    def nbytes(self, index: int, step: Step, micro_batch: int) -> int:
        """Bytes of the next message of a tensor."""
        slot = self._slots[micro_batch][index]
        if not self._coded(slot, step):
            return _plain_bytes(slot) + _CHOICE_BYTES * self._tells_choice(slot, step)
        return self.session(index, *slot).nbytes(self._key(step, micro_batch))

    def encode(self, index: int, step: Step, micro_batch: int, x: Tensor, *, room: int = 0) -> Tensor:
        """The bytes of a tensor: uint8, one dimension, memory of its own; empty if there is nothing to send.

        Args:
            index: of the tensor at this boundary; step, micro_batch: what it belongs to; x: the tensor.
            room: so many bytes are left free behind its own.

        Raises:
            ValueError: shape or dtype differ from what the boundary was prepared for.
        """
        slot = self._slots[micro_batch][index]
        if (x.shape, x.dtype) != slot:
            raise ValueError(
                f"{self.name}: tensor {index} is {_described((x.shape, x.dtype))}; both ends expect {_described(slot)}"
            )
        with self._aside():
            size = self.nbytes(index, step, micro_batch)
            message = torch.empty(size + room * bool(size), dtype=torch.uint8, device=x.device)
            payload = message[:size]
            if self._coded(slot, step):
                key, session = self._key(step, micro_batch), self.session(index, *slot)
                session.encode(x, key=key, training=step.training, out=payload)
            else:
                # A copy, because the model may reuse the memory of its output while the bytes are under way.
                plain, rest = payload.tensor_split([_plain_bytes(slot)])
                plain.view(x.dtype).view(x.shape).copy_(x.detach())
                if self._tells_choice(slot, step):
                    choice = torch.tensor([self._choose(index, slot, x), 0], dtype=torch.int64)
                    rest.copy_(choice.view(torch.uint8))
        self._traffic.count(self.direction, size + self._overhead * bool(size), x.numel())
        return message

    def decode(self, index: int, step: Step, micro_batch: int, payload: Tensor, out: Tensor) -> None:
        """Write the tensor in `payload` to `out`, which has the shape and dtype of this slot."""
        with self._aside():
            out, slot = out.detach(), self._slots[micro_batch][index]
            if self._coded(slot, step):
                key, session = self._key(step, micro_batch), self.session(index, *slot)
                session.decode(payload, key=key, out=out, training=step.training)
            else:
                plain, rest = payload.tensor_split([_plain_bytes(slot)])
                if self._tells_choice(slot, step):
                    self._adopt(index, slot, int(rest.clone().view(torch.int64)[0]))
                out.copy_(plain.view(out.dtype).view(out.shape))

    def facts(self, slots: Sequence[Slot]) -> dict[str, str]:
        """What both ends of the boundary must agree on before the first message with these tensors."""
        sessions = [
            self.session(index, *slot) if self._is_settled(index, slot) else None
            for index, slot in enumerate(slots)
            if slot[1].is_floating_point
        ]
        return {
            f"{self.name} tensors": _listed(map(_described, slots)),
            f"{self.name} payload bytes": _listed(s.max_nbytes() if s else "open" for s in sessions),
            f"{self.name} state bytes": _listed(s.state_bytes() if s else "open" for s in sessions),
            f"{self.name} state": self._digest(),
        }

    def chosen(self) -> dict[str, Codec]:
        """The settled codecs, by tensor ("tensor 0, width 256"), of a codec that left a parameter open."""
        return {name: self._settled(name) for name in self._choices}

    def state_bytes(self) -> int:
        """Bytes that the codec keeps between messages, at this end."""
        return sum(session.state_bytes() for session in self._states.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of every session that has any."""
        open_states = {name: session.state_dict() for name, session in self._states.items()}
        states = self._restored | {name: state for name, state in open_states.items() if state}
        for name, choice in self._choices.items():
            states[name] = states.get(name, {}) | {CHOICE: choice}
        return states

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Take over what `state_dict` gave, for sessions that are open and those that will be."""
        self._restored = dict(states)
        if not self.codec.settled:
            self._choices = {name: int(state[CHOICE]) for name, state in states.items() if CHOICE in state}
            kept = {name: {k: v for k, v in state.items() if k != CHOICE} for name, state in states.items()}
            self._restored = {name: state for name, state in kept.items() if state}
            self._sessions.clear()  # of other choices
            self._states.clear()
        for name, session in self._states.items():
            session.load_state_dict(self._restored.pop(name, {}))

    def _coded(self, slot: Slot, step: Step) -> bool:
        if step.full_precision or not slot[1].is_floating_point:
            return False
        return step.training or not self.codec.needs_key

    def _key(self, step: Step, micro_batch: int) -> Key | None:
        return step.keys[micro_batch] if self.codec.needs_key and step.keys else None

    def _tells_choice(self, slot: Slot, step: Step) -> bool:
        """Whether a message at full precision has the sender's choice behind it."""
        return step.settling and not self.codec.settled and slot[1].is_floating_point

    def _choose(self, index: int, slot: Slot, x: Tensor) -> int:
        state = self._state_of(index, slot)
        if state not in self._choices:
            assert isinstance(self.codec, StatefulCodec)
            self._adopt(index, slot, self.codec.choose(x))
            log.info("%s: %s: %s", self.name, state, self.session(index, *slot).codec)
        return self._choices[state]

    def _adopt(self, index: int, slot: Slot, choice: int) -> None:
        """Code a tensor with the parameter that its sender chose, from the next step on."""
        state = self._state_of(index, slot)
        known = self._choices.setdefault(state, choice)
        if known != choice:
            raise ValueError(f"{self.name}: {state} was settled as {known}, and now as {choice}")
        warm_up(self.session(index, *slot).codec, *slot, self._device)

    def _is_settled(self, index: int, slot: Slot) -> bool:
        return self.codec.settled or self._state_of(index, slot) in self._choices

    def _settled(self, state: str) -> Codec:
        if self.codec.settled or not isinstance(self.codec, StatefulCodec):
            return self.codec
        if state not in self._choices:
            raise ValueError(
                f"{state}: what {self.codec} leaves open is chosen in the last step of the warm-up, and nothing was "
                "chosen here; allowed: warmup_steps of at least 1, and states that were saved after the warm-up"
            )
        return self.codec.settle(self._choices[state])

    def _state_of(self, index: int, slot: Slot) -> str:
        """Name of the state that a codec keeps for a tensor, which several shapes may share."""
        shared = self.codec.shared_by(slot[0]) if isinstance(self.codec, StatefulCodec) else None
        return f"tensor {index}, {_described(slot) if shared is None else f'width {shared}'}"

    def session(self, index: int, shape: torch.Size, dtype: torch.dtype) -> Session:
        """The session of a tensor, for messages of any shape and dtype; both ends open the same."""
        name = f"tensor {index}, {_described((shape, dtype))}"
        if name not in self._sessions:
            state = self._state_of(index, (shape, dtype))
            if state in self._states:
                session = self._states[state].beside(shape=shape, dtype=dtype)
            else:
                session = self._settled(state).open(shape=shape, dtype=dtype, device=self._device)
                session.load_state_dict(self._restored.pop(state, {}))
                self._states[state] = session
            self._sessions[name] = session
        return self._sessions[name]

    def _digest(self) -> str:
        """Digest of what the lane keeps: the same at both ends, or their states do not belong together."""
        digest = xxhash.xxh3_64()
        for name, state in sorted(self.state_dict().items()):
            # A state that keeps count of its messages is known by them; computed numbers may differ in the last bits.
            counted = {"messages", "digest", CHOICE} if "digest" in state else state
            for key in sorted(state.keys() & counted):
                value = state[key]
                digest.update(f"{name}/{key}".encode())
                if isinstance(value, Tensor):
                    digest.update(value.cpu().contiguous().view(torch.uint8).numpy().data)
                else:
                    digest.update(str(value).encode())
        return digest.hexdigest()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Apart from the model's computation: no graph, no autocast (which would round inside the codec), timed."""
        timed = self._traffic.timing("codec_seconds")
        with timed, torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            yield


@functools.cache
def warm_up(codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Use a codec on zeros, both ways, once in a process, so that its kernels are compiled before anybody waits."""
    key = tuple(range(shape[0])) if codec.needs_key else None
    sender, receiver = (codec.open(shape=shape, dtype=dtype, device=device) for _ in range(2))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = torch.zeros(shape, dtype=dtype, device=device)
        for _ in range(2 if codec.needs_key else 1):  # a sample that comes back is coded otherwise
            receiver.decode(sender.encode(x, key=key), key=key)


def _plain_bytes(slot: Slot) -> int:
    shape, dtype = slot
    return shape.numel() * dtype.itemsize


def _described(slot: Slot) -> str:
    return f"{str(slot[1]).removeprefix('torch.')} {tuple(slot[0])}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
