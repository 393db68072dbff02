"""State of one end of a boundary between messages: sessions, and the parameters that the sender chose."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from lowbit.codecs.base import Codec, Session, StatefulCodec
from lowbit.codecs.foreign import CHOICE, COMPARED, DIGEST, PROPOSAL, call, open_session

log = logging.getLogger(__name__)

Slot = tuple[torch.Size, torch.dtype]
"""Shape and dtype of one of the tensors that cross a boundary together."""


class States:
    """Sessions of a codec at one end of one direction of a boundary; `lane` is its name in errors and the log.

    Each tensor has a state for each of its shapes and dtypes, or one for all shapes that share it
    (`StatefulCodec.shared_by`). If the codec leaves a parameter open (`Codec.settled`), each state has its own choice.
    """

    def __init__(self, lane: str, codec: Codec, device: torch.device) -> None:
        self._lane, self._codec, self._device = lane, codec, device
        self._sessions: dict[tuple[int, Slot], Session] = {}
        self._shared: dict[str, Session] = {}  # by state, one of the sessions that share it
        self._restored: dict[str, dict[str, Any]] = {}  # for sessions that are not open yet
        self._choices: dict[str, int] = {}  # by state
        self._proposals: dict[str, int] = {}  # by state: choices that have not been sent yet

    def session(self, index: int, slot: Slot) -> Session:
        """Return the session of a tensor; both ends open the same.

        ValueError: a shape that the codec does not take, a restored state of another format, or an open parameter that
        the warm-up has not settled. CodecError: a codec of another package failed.
        """
        if (index, slot) not in self._sessions:
            (shape, dtype), name = slot, self._name(index, slot)
            if name in self._shared:
                session = self._shared[name].sharing_state(shape=shape, dtype=dtype)
            else:
                codec = self._settled(name)
                session = open_session(codec, shape=shape, dtype=dtype, device=self._device, about=self._lane)
                if name in self._restored:
                    session.load_state_dict(self._restored[name])
                    del self._restored[name]
                self._shared[name] = session
            self._sessions[index, slot] = session
        return self._sessions[index, slot]

    def is_settled(self, index: int, slot: Slot) -> bool:
        """Whether a session for this tensor can be opened: the codec leaves nothing open, or the sender has chosen."""
        return self._codec.settled or self._name(index, slot) in self._choices

    def choose(self, index: int, slot: Slot, x: Tensor) -> int:
        """Return the sender's choice for tensors like `x`: proposed earlier, or made from the first of them."""
        name = self._name(index, slot)
        if name not in self._choices:
            choice = self._proposals.pop(name, None)
            self._choices[name] = self._chosen(x) if choice is None else choice
            log.info("%s: %s: %s", self._lane, name, self._settled(name))
        return self._choices[name]

    def propose(self, index: int, slot: Slot, x: Tensor, gradient: Tensor, part: float, *, backward: bool) -> None:
        """Propose a choice for a tensor from activations and their gradient, unless it already has one."""
        name = self._name(index, slot)
        if name not in self._choices and name not in self._proposals:
            self._proposals[name] = self._chosen(x, gradient, part, backward=backward)

    def raise_rates(self, bits: float) -> None:
        """Raise the chosen rates by `bits` per element; sessions keep their state."""
        if self._codec.settled or not isinstance(self._codec, StatefulCodec):
            return
        states = self.state_dict()
        for name, choice in self._choices.items():
            states[name][CHOICE] = call(self._codec, "raised", self._codec.raised, choice, bits, about=self._lane)
        self.load_state_dict(states)

    def observe(self, index: int, slot: Slot, x: Tensor) -> Tensor | None:
        """Show a sender's session the tensor that crossed the other way; see `Session.observe`."""
        if x.is_floating_point() and self.is_settled(index, slot):
            return self.session(index, slot).observe(x)
        return None

    def end_step(self) -> None:
        for session in self._shared.values():
            session.end_step()

    def adopt(self, index: int, slot: Slot, choice: int) -> None:
        """Take over the sender's choice; ValueError if it differs from an earlier one."""
        name = self._name(index, slot)
        self._proposals.pop(name, None)
        earlier = self._choices.setdefault(name, choice)
        if earlier != choice:
            raise ValueError(f"{self._lane}: {name} was set to {earlier} before, and the sender now states {choice}")

    def chosen(self) -> dict[str, Codec]:
        """Return the settled codecs by state ("tensor 0, width 256"), if the codec leaves a parameter open."""
        return {name: self._settled(name) for name in self._choices}

    def nbytes(self) -> int:
        return sum(session.state_bytes() for session in self._shared.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return all states that are not empty, by name."""
        states = {name: session.state_dict() for name, session in self._shared.items()}
        states = self._restored | {name: state for name, state in states.items() if state}
        for name, choice in self._choices.items():
            states[name] = states.get(name, {}) | {CHOICE: choice}
        for name, choice in self._proposals.items():
            states[name] = states.get(name, {}) | {PROPOSAL: choice}
        return states

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore a `state_dict`, for sessions that are open and those that will be opened later."""
        self._restored = {name: state for name, state in states.items() if state}
        if not self._codec.settled:
            self._choices = {name: int(state[CHOICE]) for name, state in states.items() if CHOICE in state}
            self._proposals = {name: int(state[PROPOSAL]) for name, state in states.items() if PROPOSAL in state}
            without = {name: _own(state) for name, state in states.items()}
            self._restored = {name: state for name, state in without.items() if state}
            self._sessions.clear()  # of other choices
            self._shared.clear()
        # A session without a saved state is dropped and starts empty: `state_dict` leaves empty states out.
        self._sessions = {key: session for key, session in self._sessions.items() if self._name(*key) in self._restored}
        self._shared = {name: session for name, session in self._shared.items() if name in self._restored}
        for name, session in self._shared.items():
            session.load_state_dict(self._restored.pop(name))

    def digest(self) -> str:
        """Return a digest of all states, which is the same at both ends if they belong together."""
        digest = xxhash.xxh3_64()
        for name, state in sorted(self.state_dict().items()):
            # A state with a digest of its messages is compared by that: computed numbers may differ in the last bits.
            keys = {*COMPARED, CHOICE} if DIGEST in state else state
            for key in sorted((state.keys() & keys) - {PROPOSAL}):  # proposals differ between the ends until sent
                value = state[key]
                digest.update(f"{name}/{key}".encode())
                if isinstance(value, Tensor):
                    digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                else:
                    digest.update(str(value).encode())
        return digest.hexdigest()

    def _chosen(self, *args: Any, **kwargs: Any) -> int:
        assert isinstance(self._codec, StatefulCodec)  # others leave nothing open
        return call(self._codec, "choose", self._codec.choose, *args, about=self._lane, **kwargs)

    def _name(self, index: int, slot: Slot) -> str:
        shared = None
        if isinstance(self._codec, StatefulCodec):
            shared = call(self._codec, "shared_by", self._codec.shared_by, slot[0], about=self._lane)
        return f"tensor {index}, {described(slot) if shared is None else f'width {shared}'}"

    def _settled(self, name: str) -> Codec:
        if self._codec.settled or not isinstance(self._codec, StatefulCodec):
            return self._codec
        if name not in self._choices:
            raise ValueError(
                f"{name}: {self._codec} chooses a parameter in the last step of the warm-up, and has not done so here; "
                "allowed: warmup_steps of at least 1, and states that were saved after the warm-up"
            )
        return call(self._codec, "settle", self._codec.settle, self._choices[name], about=self._lane)


def described(slot: Slot) -> str:
    """Return dtype and shape as text."""
    return f"{str(slot[1]).removeprefix('torch.')} {tuple(slot[0])}"


def _own(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in (CHOICE, PROPOSAL)}


class Look:
    """Collects activations and gradients for the two directions of a boundary, at one end.

    For each tensor that gets a gradient, it keeps the activations of the first micro-batch until their gradient has
    crossed. Each of the pipeline's `boundaries` gets an equal part of the goal.
    """

    def __init__(self, boundaries: int) -> None:
        self._boundaries = boundaries
        self._states: list[tuple[States, bool]] = []
        self._learned: Sequence[Sequence[int]] = ()  # by micro-batch
        # By tensor and width: a micro-batch, and its activations until their gradient has crossed.
        self._kept: dict[tuple[int, int], tuple[int, Tensor | None]] = {}

    def add(self, codec: object, states: States, *, backward: bool) -> None:
        """Add a direction if its codec has a goal in loss."""
        if isinstance(codec, StatefulCodec) and not codec.settled and codec.wanted_nats is not None:
            self._states.append((states, backward))

    def use(self, learned: Sequence[Sequence[int]]) -> None:
        """Set which of the tensors that cross with each micro-batch get gradients, in this order."""
        self._learned = learned

    def activations(self, index: int, micro_batch: int, x: Tensor) -> None:
        """Look at activations that cross: tensor `index` of their micro-batch."""
        if self._states and index in self._learned[micro_batch]:
            key = index, x.shape[-1] if x.dim() else 1
            if key not in self._kept:
                self._kept[key] = micro_batch, x.detach().clone()

    def gradient(self, index: int, micro_batch: int, gradient: Tensor) -> None:
        """Look at a gradient that crosses: number `index` of those of its micro-batch."""
        if not self._states:
            return
        tensor = self._learned[micro_batch][index]
        key = tensor, gradient.shape[-1] if gradient.dim() else 1
        kept_from, x = self._kept.get(key, (None, None))
        if x is None or kept_from != micro_batch:
            return
        self._kept[key] = micro_batch, None
        slot = x.shape, x.dtype
        part = 1 / (self._boundaries * len(self._learned[micro_batch]))
        for states, backward in self._states:
            states.propose(index if backward else tensor, slot, x, gradient, part, backward=backward)
