"""One direction of one boundary, seen from one of its ends: tensors in and bytes out, or the other way round.

Nothing here knows processes, so the pipeline and its emulation in one process share it, and with it their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.codecs.base import Codec, Key, Session
from lowbit.pipeline.traffic import Traffic

Direction = Literal["forward", "backward"]

Slot = tuple[torch.Size, torch.dtype]
"""Shape and dtype of one of the tensors that cross a boundary together."""


@dataclass(frozen=True)
class Step:
    """What decides the format of a step's messages; known before the step, and the same on every rank.

    Attributes:
        training: False in an evaluation pass.
        full_precision: the warm-up is not over: everything travels in its own dtype.
        keys: sample ids of each micro-batch, for codecs that need them.
    """

    training: bool = True
    full_precision: bool = False
    keys: tuple[Key, ...] | None = None


class Lane:
    """One direction of one boundary, at one end: which format each tensor has there, and what the format remembers.

    Floating tensors go through a session of the codec, one for each tensor (and shape, unless the codec says that
    shapes share what it keeps: an evaluation's batches are coded by what training's have taught). Everything else
    travels as it is: integers and booleans, all tensors during the warm-up, and evaluation passes of a codec that
    knows only the samples it is trained on (`needs_key`).

    Args:
        boundary: i, between stages i and i + 1.
        direction: "forward" for activations, "backward" for gradients.
        codec: format of floating tensors.
        device: where the tensors live.
        traffic: where to count.
    """

    def __init__(
        self,
        boundary: int,
        direction: Direction,
        codec: Codec,
        device: torch.device | str,
        traffic: Traffic,
    ) -> None:
        self.name = f"boundary {boundary} {direction}"
        self.codec = codec
        self.slots: list[Slot] = []
        self._direction: Direction = direction
        self._device = torch.device(device)
        self._traffic = traffic
        self._sessions: dict[str, Session] = {}
        self._states: dict[str, Session] = {}  # of each state, one of the sessions that share it
        self._restored: dict[str, dict[str, Any]] = {}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Settle the tensors that cross. Sessions survive for shapes that come back.

        Raises:
            TypeError: a floating dtype that the codec does not take.
        """
        self.slots = list(slots)
        for index, (_, dtype) in enumerate(self.slots):
            if dtype.is_floating_point:
                self._session(index)

    def warm_up(self) -> None:
        """Have the codec's kernels compiled for the tensors that cross; what sessions remember stays as it is."""
        for shape, dtype in self.slots:
            if dtype.is_floating_point:
                warm_up(self.codec, shape, dtype, self._device)

    def nbytes(self, index: int, step: Step, micro_batch: int) -> int:
        """Bytes of the next message of a tensor."""
        if not self._coded(index, step):
            shape, dtype = self.slots[index]
            return shape.numel() * dtype.itemsize
        return self._session(index).nbytes(self._key(step, micro_batch))

    def encode(self, index: int, step: Step, micro_batch: int, x: Tensor) -> Tensor:
        """The bytes of a tensor: uint8, one dimension, memory of its own.

        Raises:
            ValueError: shape or dtype differ from what the boundary was prepared for.
        """
        if (x.shape, x.dtype) != self.slots[index]:
            raise ValueError(
                f"{self.name}: tensor {index} is {_described((x.shape, x.dtype))}; "
                f"both ends expect {_described(self.slots[index])}"
            )
        with self._aside():
            if self._coded(index, step):
                payload = self._session(index).encode(
                    x, key=self._key(step, micro_batch), training=step.training
                )
            else:
                # A copy, because the model may reuse the memory of its output while the bytes are under way.
                payload = x.detach().clone(memory_format=torch.contiguous_format)
                payload = payload.reshape(-1).view(torch.uint8)
        self._traffic.count(self._direction, payload.numel(), x.numel())
        return payload

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
                out.copy_(payload.view(out.dtype).view(out.shape))

    def facts(self) -> dict[str, str]:
        """What both ends of the boundary must agree on before the first message."""
        coded = [i for i, (_, dtype) in enumerate(self.slots) if dtype.is_floating_point]
        sessions = [self._session(i) for i in coded]
        return {
            f"{self.name} tensors": _listed(map(_described, self.slots)),
            f"{self.name} payload bytes": _listed(s.max_nbytes() for s in sessions),
            f"{self.name} state bytes": _listed(s.state_bytes() for s in sessions),
        }

    def state_bytes(self) -> int:
        """Bytes that the codec keeps between messages, at this end."""
        return sum(session.state_bytes() for session in self._states.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of every session that has any."""
        states = {name: session.state_dict() for name, session in self._states.items()}
        return self._restored | {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Take over what `state_dict` gave, for sessions that are open and those that will be."""
        self._restored = dict(states)
        for name, session in self._states.items():
            session.load_state_dict(self._restored.pop(name, {}))

    def _coded(self, index: int, step: Step) -> bool:
        if step.full_precision or not self.slots[index][1].is_floating_point:
            return False
        return step.training or not self.codec.needs_key

    def _key(self, step: Step, micro_batch: int) -> Key | None:
        return step.keys[micro_batch] if self.codec.needs_key and step.keys else None

    def _session(self, index: int) -> Session:
        return self.session(index, *self.slots[index])

    def session(self, index: int, shape: torch.Size, dtype: torch.dtype) -> Session:
        """The session of a tensor, for messages of any shape and dtype; both ends open the same."""
        name = f"tensor {index}, {_described((shape, dtype))}"
        if name not in self._sessions:
            shared = self.codec.shared_by(shape)
            state = name if shared is None else f"tensor {index}, width {shared}"
            if state in self._states:
                session = self._states[state].beside(shape=shape, dtype=dtype)
            else:
                session = self.codec.open(shape=shape, dtype=dtype, device=self._device)
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
