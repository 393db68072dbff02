"""A lane: one direction of one boundary, at one of its ends. Tensors go in and bytes come out, or the other way round.

Its `States` last between messages: sessions, and the parameters that the sender chose. Nothing here depends on
processes, so a pipeline and its emulation in one process run this same code.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from lowbit import escape
from lowbit.codecs.base import Codec, Session, StatefulCodec
from lowbit.codecs.checks import FLOATS
from lowbit.codecs.foreign import CHOICE, PROPOSAL, call, check_ends, compared, is_own, open_session
from lowbit.pipeline.arguments import StepKind
from lowbit.wire.traffic import Traffic

log = escape.logger(__name__)


class Slot(NamedTuple):
    """Shape and dtype of one of the tensors that cross a boundary together, and whether it is sent exactly."""

    shape: torch.Size
    dtype: torch.dtype
    exact: bool = False

    @property
    def coded(self) -> bool:
        """Whether a codec is applied to it, outside the warm-up."""
        return self.dtype.is_floating_point and not self.exact


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

        ValueError: a shape that the codec does not take, a restored state of another format, or an open parameter.
        """
        if (index, slot) not in self._sessions:
            shape, dtype, name = slot.shape, slot.dtype, self._name(index, slot)
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
        if self._codec.settled or not isinstance(self._codec, StatefulCodec):
            return
        states = self.state_dict()
        for name, choice in self._choices.items():
            states[name][CHOICE] = call(self._codec, "raised", self._codec.raised, choice, bits, about=self._lane)
        self.load_state_dict(states)

    def observe(self, index: int, slot: Slot, x: Tensor) -> Tensor | None:
        if slot.coded and self.is_settled(index, slot):
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
        return {name: self._settled(name) for name in self._choices}

    def nbytes(self) -> int:
        return sum(session.state_bytes() for session in self._shared.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        states = {name: session.state_dict() for name, session in self._shared.items()}
        states = self._restored | {name: state for name, state in states.items() if state}
        for name, choice in self._choices.items():
            states[name] = states.get(name, {}) | {CHOICE: choice}
        for name, choice in self._proposals.items():
            states[name] = states.get(name, {}) | {PROPOSAL: choice}
        return states

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore a `state_dict`, for sessions that are open and those that will be opened later."""
        if not self._codec.settled:
            self._choices = {name: int(state[CHOICE]) for name, state in states.items() if CHOICE in state}
            self._proposals = {name: int(state[PROPOSAL]) for name, state in states.items() if PROPOSAL in state}
            states = {name: {k: v for k, v in s.items() if k not in (CHOICE, PROPOSAL)} for name, s in states.items()}
            self._sessions.clear()  # of other choices
            self._shared.clear()
        self._restored = {name: state for name, state in states.items() if state}
        # A session without a saved state is dropped and starts empty: `state_dict` leaves empty states out.
        self._sessions = {key: session for key, session in self._sessions.items() if self._name(*key) in self._restored}
        self._shared = {name: session for name, session in self._shared.items() if name in self._restored}
        for name, session in self._shared.items():
            session.load_state_dict(self._restored.pop(name))

    def digest(self) -> str:
        digest = xxhash.xxh3_64()
        for name, state in sorted(self.state_dict().items()):
            # Proposals differ between the ends until they are sent.
            own = {key: value for key, value in state.items() if key not in (CHOICE, PROPOSAL)}
            both = compared(self._codec, own) | ({CHOICE: state[CHOICE]} if CHOICE in state else {})
            for key, value in sorted(both.items()):
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
            shared = call(self._codec, "shared_by", self._codec.shared_by, slot.shape, about=self._lane)
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
    return f"{str(slot.dtype).removeprefix('torch.')} {tuple(slot.shape)}{', exact' if slot.exact else ''}"


class Look:
    """Collects activations and gradients for the two directions of a boundary, at one end.

    For each tensor that gets a gradient, it keeps the activations of the first micro-batch until their gradient has
    crossed. Each of the pipeline's `boundaries` gets an equal part of the goal.
    """

    def __init__(self, boundaries: int) -> None:
        self._boundaries = boundaries
        self._states: list[tuple[States, bool]] = []
        self.learned: Sequence[Sequence[int]] = ()  # by micro-batch: tensors that get gradients, in their order
        # By tensor and width: a micro-batch, and its activations until their gradient has crossed.
        self._kept: dict[tuple[int, int], tuple[int, Tensor | None]] = {}

    def add(self, codec: object, states: States, *, backward: bool) -> None:
        """Add a direction if its codec has a goal in loss."""
        if isinstance(codec, StatefulCodec) and not codec.settled and codec.wanted_nats is not None:
            self._states.append((states, backward))

    def activations(self, index: int, micro_batch: int, x: Tensor) -> None:
        if self._states and index in self.learned[micro_batch]:
            key = index, x.shape[-1] if x.dim() else 1
            if key not in self._kept:
                self._kept[key] = micro_batch, x.detach().clone()

    def gradient(self, index: int, micro_batch: int, gradient: Tensor) -> None:
        if not self._states:
            return
        tensor = self.learned[micro_batch][index]
        key = tensor, gradient.shape[-1] if gradient.dim() else 1
        kept_from, x = self._kept.get(key, (None, None))
        if x is None or kept_from != micro_batch:
            return
        self._kept[key] = micro_batch, None
        part = 1 / (self._boundaries * len(self.learned[micro_batch]))
        for states, backward in self._states:
            states.propose(index if backward else tensor, Slot(x.shape, x.dtype), x, gradient, part, backward=backward)


Direction = Literal["forward", "backward"]

_CHOICE_BYTES = 16
_CODED = StepKind()


class Lane:
    """One direction of one boundary, at one end: encodes or decodes each tensor that crosses there.

    Floating tensors go through a session of the codec, one for each tensor and shape. Everything else travels as it is:
    constants (`Slot.exact`), integers and booleans, all tensors during the warm-up, and evaluation passes of a codec
    that knows only the samples it is trained on (`needs_key`).

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
        if any(slot.exact for slot in slots):
            log.info("%s: constants are sent exactly: %s", self.name, _listed(map(described, slots)))
            if not any(slot.coded for slot in slots):
                log.warning(
                    "%s: nothing is coded, as no tensor would require a gradient if all parameters were trained, for "
                    "example under torch.no_grad in a module; LowBitStage(code_constants=True) codes them", self.name,
                )  # fmt: skip
        for index, slot in enumerate(slots):
            if slot.coded and slot.dtype not in FLOATS:
                raise TypeError(f"dtype is {slot.dtype}; allowed: {', '.join(map(str, FLOATS))}")
            if slot.coded and (not step.full_precision or self.states.is_settled(index, slot)):
                self.states.session(index, slot)

    def use(self, slots: Sequence[Sequence[Slot]]) -> None:
        self._slots = slots

    def warm_up(self, slots: Sequence[Slot]) -> None:
        """Compile the codec's kernels for tensors that will cross; sessions stay as they are."""
        for index, slot in enumerate(slots):
            if slot.coded and self.states.is_settled(index, slot):
                self._warm_up(index, slot)

    def messages(self, micro_batch: int) -> int:
        return len(self._slots[micro_batch]) if self._slots else 0

    def nbytes(self, index: int, step: StepKind, micro_batch: int) -> int:
        return self._coding(index, step, micro_batch)[1]

    def encode(
        self, index: int, step: StepKind, micro_batch: int, x: Tensor, *, room: int = 0, note: Tensor | None = None
    ) -> Tensor:
        """Return the bytes of tensor `index`: uint8, one dimension, in new memory; empty if there is nothing to send.

        `room`: bytes to leave free behind its own. `note`: what `observe` returned for the activations whose gradient
        this is. ValueError: shape or dtype differ from what the boundary was prepared for.
        """
        slot = self._slots[micro_batch][index]
        if (x.shape, x.dtype) != slot[:2]:
            raise ValueError(
                f"{self.name}: tensor {index} is {described(Slot(x.shape, x.dtype))}; "
                f"both ends expect {described(slot)}"
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
                    self._warm_up(index, slot)
                    rest.copy_(torch.tensor([choice, 0], dtype=torch.int64).view(torch.uint8))
        self._traffic.count(self.direction, size + self._overhead * bool(size), x.numel())
        return message

    def decode(self, index: int, step: StepKind, micro_batch: int, payload: Tensor, out: Tensor) -> None:
        with self._isolated("decode", micro_batch):
            out, slot = out.detach(), self._slots[micro_batch][index]
            session, _ = self._coding(index, step, micro_batch)
            if session is not None:
                session.decode(payload, out=out, training=step.training)
            else:
                plain, rest = payload.tensor_split([_plain_bytes(slot)])
                if self._carries_choice(slot, step):
                    self.states.adopt(index, slot, int(rest.clone().view(torch.int64)[0]))
                    self._warm_up(index, slot)
                out.copy_(plain.view(out.dtype).view(out.shape))
                self._look_at(index, step, micro_batch, out)

    def observe(self, index: int, micro_batch: int, x: Tensor) -> Tensor | None:
        """Show this sender the tensor that crossed the other way; return a note for `encode`, if the codec has one."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self.states.observe(index, self._slots[micro_batch][index], x.detach())

    def facts(self, slots: Sequence[Slot]) -> dict[str, str]:
        sessions = [
            self.states.session(index, slot) if self.states.is_settled(index, slot) else None
            for index, slot in enumerate(slots)
            if slot.coded
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
        if step.full_precision or unknown or not slot.coded:
            return None, _plain_bytes(slot) + _CHOICE_BYTES * self._carries_choice(slot, step)
        session = self.states.session(index, slot)
        if step.samples:
            session.samples = step.samples[micro_batch]
        return session, session.nbytes()

    def _warm_up(self, index: int, slot: Slot) -> None:
        warm_up(self.states.session(index, slot).codec, slot.shape, slot.dtype, self._device)

    def _look_at(self, index: int, step: StepKind, micro_batch: int, x: Tensor) -> None:
        if step.looking and self._look is not None and x.is_floating_point():
            note = self._look.activations if self.direction == "forward" else self._look.gradient
            note(index, micro_batch, x)

    def _carries_choice(self, slot: Slot, step: StepKind) -> bool:
        """Whether the sender's choice follows the tensor in a message at full precision."""
        return step.settling and not self.codec.settled and slot.coded

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
    return slot.shape.numel() * slot.dtype.itemsize


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
