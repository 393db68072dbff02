"""One direction of one boundary, seen from one of its ends: tensors in and bytes out, or the other way round.

Nothing here knows processes, so the pipeline and its emulation in one process share it, and with it their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.codecs.base import FLOATS, Codec, Key, Session
from lowbit.pipeline.traffic import Traffic

log = logging.getLogger(__name__)

Direction = Literal["forward", "backward"]

Slot = tuple[torch.Size, torch.dtype]
"""Shape and dtype of one of the tensors that cross a boundary together."""

_CHOICE_BYTES = 16
CHOICE = "choice"
"""What a sender has chosen, among what a state holds."""


@dataclass(frozen=True)
class Step:
    """What decides the format of a step's messages; known before the step, and the same on every rank.

    Attributes:
        training: False in an evaluation pass.
        full_precision: the warm-up is not over: everything travels in its own dtype.
        keys: sample ids of each micro-batch, for codecs that need them.
        settling: the last step of the warm-up, in which senders choose what their codecs leave open.
    """

    training: bool = True
    full_precision: bool = False
    keys: tuple[Key, ...] | None = None
    settling: bool = False

    @classmethod
    def numbered(cls, step: int, warmup_steps: int, *, training: bool = True) -> Step:
        """A step, or an evaluation pass, after so many training steps."""
        settling = training and step == warmup_steps - 1
        return cls(training, step < warmup_steps, settling=settling)


_CODED = Step()


class Lane:
    """One direction of one boundary, at one end: which format each tensor has there, and what the format remembers.

    Floating tensors go through a session of the codec, one for each tensor (and shape, unless the codec says that
    shapes share what it keeps: an evaluation's batches are coded by what training's have taught). Everything else
    travels as it is: integers and booleans, all tensors during the warm-up, and evaluation passes of a codec that
    knows only the samples it is trained on (`needs_key`).

    What a codec leaves open (`Codec.settled`) is chosen by the sender for each tensor, from its first message of the
    last step of the warm-up. All messages of that step, which come in any order, have 16 bytes behind the tensor's: the
    choice, int64, and zeros. So the receiver computes nothing, and both ends code with the same from the next step on.

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
        self.codec = codec
        self.slots: list[Slot] = []
        self._direction: Direction = direction
        self._device = torch.device(device)
        self._traffic, self._overhead = traffic, overhead
        self._sessions: dict[str, Session] = {}
        self._states: dict[str, Session] = {}  # of each state, one of the sessions that share it
        self._restored: dict[str, dict[str, Any]] = {}
        self._choices: dict[str, int] = {}  # for each state, where the codec leaves something open

    def prepare(self, slots: Sequence[Slot], step: Step = _CODED) -> None:
        """Take note of the tensors that cross from this step on. Sessions survive for shapes that come back.

        Raises:
            TypeError: a floating dtype that the codec does not take.
            ValueError: a shape that it does not take, a restored state of another format, or something that it leaves
                open and the warm-up, which is over, has not settled.
        """
        self.slots = list(slots)
        for index, (shape, dtype) in enumerate(self.slots):
            if not dtype.is_floating_point:
                continue
            if dtype not in FLOATS:
                raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, FLOATS))}")
            if not step.full_precision or self._is_settled(index):
                self.session(index, shape, dtype)

    def warm_up(self) -> None:
        """Have the codec's kernels compiled for the tensors that cross; what sessions remember stays as it is."""
        for index, (shape, dtype) in enumerate(self.slots):
            if dtype.is_floating_point and self._is_settled(index):
                warm_up(self._session(index).codec, shape, dtype, self._device)

    def nbytes(self, index: int, step: Step, micro_batch: int) -> int:
        """Bytes of the next message of a tensor."""
        if not self._coded(index, step):
            return self._plain_bytes(index) + _CHOICE_BYTES * self._tells_choice(index, step)
        return self._session(index).nbytes(self._key(step, micro_batch))

    def encode(
        self, index: int, step: Step, micro_batch: int, x: Tensor, *, room: int = 0
    ) -> Tensor:
        """The bytes of a tensor: uint8, one dimension, memory of its own; empty if there is nothing to send.

        Args:
            index: of the tensor at this boundary; step, micro_batch: what it belongs to; x: the tensor.
            room: so many bytes are left free behind its own.

        Raises:
            ValueError: shape or dtype differ from what the boundary was prepared for.
        """
        if (x.shape, x.dtype) != self.slots[index]:
            raise ValueError(
                f"{self.name}: tensor {index} is {_described((x.shape, x.dtype))}; "
                f"both ends expect {_described(self.slots[index])}"
            )
        with self._aside():
            size = self.nbytes(index, step, micro_batch)
            message = torch.empty(size + room * bool(size), dtype=torch.uint8, device=x.device)
            payload = message[:size]
            if self._coded(index, step):
                key = self._key(step, micro_batch)
                self._session(index).encode(x, key=key, training=step.training, out=payload)
            else:
                # A copy, because the model may reuse the memory of its output while the bytes are under way.
                plain, told = payload.tensor_split([self._plain_bytes(index)])
                plain.view(x.dtype).view(x.shape).copy_(x.detach())
                if self._tells_choice(index, step):
                    choice = torch.tensor([self._choose(index, x), 0], dtype=torch.int64)
                    told.copy_(choice.view(torch.uint8))
        self._traffic.count(self._direction, size + self._overhead * bool(size), x.numel())
        return message

    def decode(
        self, index: int, step: Step, micro_batch: int, payload: Tensor, out: Tensor
    ) -> None:
        """Write the tensor in `payload` to `out`, which has the shape and dtype of this slot."""
        with self._aside():
            out = out.detach()
            if self._coded(index, step):
                key = self._key(step, micro_batch)
                self._session(index).decode(payload, key=key, out=out, training=step.training)
            else:
                plain, told = payload.tensor_split([self._plain_bytes(index)])
                if self._tells_choice(index, step):
                    self._adopt(index, int(told.clone().view(torch.int64)[0]))
                out.copy_(plain.view(out.dtype).view(out.shape))

    def facts(self) -> dict[str, str]:
        """What both ends of the boundary must agree on before the first message."""
        coded = [i for i, (_, dtype) in enumerate(self.slots) if dtype.is_floating_point]
        sessions = [self._session(i) if self._is_settled(i) else None for i in coded]
        return {
            f"{self.name} tensors": _listed(map(_described, self.slots)),
            f"{self.name} payload bytes": _listed(
                s.max_nbytes() if s else "open" for s in sessions
            ),
            f"{self.name} state bytes": _listed(s.state_bytes() if s else "open" for s in sessions),
        }

    def chosen(self) -> dict[str, Codec]:
        """What codes each tensor ("tensor 0, width 256") whose codec left something open, as far as that is settled."""
        return {name: self.codec.settle(choice) for name, choice in self._choices.items()}

    def state_bytes(self) -> int:
        """Bytes that the codec keeps between messages, at this end."""
        return sum(session.state_bytes() for session in self._states.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of every session that has any."""
        states = {name: session.state_dict() for name, session in self._states.items()}
        found = self._restored | {name: state for name, state in states.items() if state}
        for name, choice in self._choices.items():
            found[name] = found.get(name, {}) | {CHOICE: choice}
        return found

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Take over what `state_dict` gave, for sessions that are open and those that will be."""
        self._restored = dict(states)
        if not self.codec.settled:
            self._choices = {n: int(s[CHOICE]) for n, s in states.items() if CHOICE in s}
            rest = {n: {k: v for k, v in s.items() if k != CHOICE} for n, s in states.items()}
            self._restored = {name: state for name, state in rest.items() if state}
            self._sessions.clear()  # of other choices
            self._states.clear()
        for name, session in self._states.items():
            session.load_state_dict(self._restored.pop(name, {}))

    def _coded(self, index: int, step: Step) -> bool:
        if step.full_precision or not self.slots[index][1].is_floating_point:
            return False
        return step.training or not self.codec.needs_key

    def _key(self, step: Step, micro_batch: int) -> Key | None:
        return step.keys[micro_batch] if self.codec.needs_key and step.keys else None

    def _plain_bytes(self, index: int) -> int:
        shape, dtype = self.slots[index]
        return shape.numel() * dtype.itemsize

    def _tells_choice(self, index: int, step: Step) -> bool:
        """Whether a message at full precision has the sender's choice behind it."""
        open_yet = step.settling and not self.codec.settled
        return open_yet and self.slots[index][1].is_floating_point

    def _choose(self, index: int, x: Tensor) -> int:
        state = self._state_of(index, self.slots[index])
        if state not in self._choices:
            self._adopt(index, self.codec.choose(x))
            log.info("%s: %s: %s", self.name, state, self._session(index).codec)
        return self._choices[state]

    def _adopt(self, index: int, choice: int) -> None:
        """Code a tensor with what its sender chose, from the next step on."""
        shape, dtype = self.slots[index]
        state = self._state_of(index, self.slots[index])
        known = self._choices.setdefault(state, choice)
        if known != choice:
            raise ValueError(f"{self.name}: {state} was settled as {known}, and now as {choice}")
        warm_up(self._session(index).codec, shape, dtype, self._device)

    def _is_settled(self, index: int) -> bool:
        return self.codec.settled or self._state_of(index, self.slots[index]) in self._choices

    def _settled(self, state: str) -> Codec:
        if not self.codec.settled and state not in self._choices:
            raise ValueError(
                f"{state}: what {self.codec} leaves open is chosen in the last step of the warm-up, and nothing was "
                "chosen here; allowed: warmup_steps of at least 1, and states that were saved after the warm-up"
            )
        return self.codec.settle(self._choices.get(state, 0))

    def _session(self, index: int) -> Session:
        return self.session(index, *self.slots[index])

    def _state_of(self, index: int, slot: Slot) -> str:
        """Name of what the codec keeps for messages of a tensor, which several shapes may share."""
        shared = self.codec.shared_by(slot[0])
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

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Apart from the model's computation: no graph, no autocast (it would round inside the codec), timed."""
        start = time.perf_counter()
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            yield
        self._traffic.codec_seconds += time.perf_counter() - start


@functools.cache
def warm_up(codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Use a codec on zeros, both ways, once in a process, so that its kernels are compiled before anybody waits."""
    key = tuple(range(shape[0])) if codec.needs_key else None
    sender, receiver = (codec.open(shape=shape, dtype=dtype, device=device) for _ in range(2))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = torch.zeros(shape, dtype=dtype, device=device)
        for _ in range(2 if codec.needs_key else 1):  # a sample that comes back is coded otherwise
            receiver.decode(sender.encode(x, key=key), key=key)


def check_warm_up(
    argument: str, codecs: Codec | Mapping[int, Codec], warmup_steps: int, prefix: str = ""
) -> None:
    """Raise unless there is a warm-up, or nothing in these codecs that it would have to settle.

    Raises:
        ValueError: naming `prefix`warmup_steps.
    """
    for codec in codecs.values() if isinstance(codecs, Mapping) else (codecs,):
        if isinstance(codec, Codec) and not codec.settled and not warmup_steps:
            raise ValueError(
                f"{prefix}warmup_steps is 0, and {argument} has {codec}, which is settled in the last of these steps; "
                "allowed: at least 1"
            )


def codec_at(
    argument: str, codecs: Codec | Mapping[int, Codec], boundary: int, boundaries: int
) -> Codec:
    """The codec of one of so many boundaries, from one for all or a mapping.

    Raises:
        TypeError: not a codec.
        ValueError: the mapping has none for this boundary, or one for a boundary that does not exist.
    """
    if isinstance(codecs, Mapping):
        given = ", ".join(map(str, codecs)) or "none"
        if boundary not in codecs:
            raise ValueError(f"{argument} has no codec for boundary {boundary}; given: {given}")
        if not set(codecs) <= set(range(boundaries)):
            raise ValueError(
                f"{argument} has codecs for boundaries {given}; there are 0 to {boundaries - 1}"
            )
        codecs = codecs[boundary]
    if not isinstance(codecs, Codec):
        raise TypeError(
            f"{argument} is {codecs!r}; allowed: a codec such as lowbit.codecs.TAHQuant(), "
            "or a mapping from boundary index to codec"
        )
    return codecs


def checked_samples(ids: Tensor | Sequence[int]) -> Tensor:
    """Sample ids as an int64 tensor (batch,).

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional.
    """
    samples = torch.as_tensor(ids).cpu()
    if samples.is_floating_point() or samples.is_complex() or samples.dtype == torch.bool:
        raise TypeError(f"ids have dtype {samples.dtype}; allowed: integers")
    if samples.dim() != 1:
        raise ValueError(f"ids have shape {tuple(samples.shape)}; allowed: one dimension, (batch,)")
    return samples.long()


def keys_of(samples: Tensor, micro_batches: int) -> tuple[Key, ...]:
    """Sample ids of each micro-batch, split the way that a pipeline schedule splits the batch.

    Raises:
        ValueError: an id occurs twice. The size of a sample's second message depends on its first, which may still be
            under way when the second is expected.
    """
    if samples.unique().numel() != samples.numel():
        raise ValueError("ids has a sample twice; the ids of a batch must differ")
    return tuple(tuple(part.tolist()) for part in samples.tensor_split(micro_batches))


def _described(slot: Slot) -> str:
    return f"{str(slot[1]).removeprefix('torch.')} {tuple(slot[0])}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
