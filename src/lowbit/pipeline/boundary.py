"""A lane: one direction of one boundary, at one of its ends. Tensors go in and bytes come out, or the other way round.

Its `States` last between messages. Nothing here depends on processes, so a pipeline and its emulation in one process
run this same code.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import Tensor

from lowbit import escape
from lowbit.codecs.base import Codec, Session, StatefulCodec, saturating_cast
from lowbit.codecs.checks import FLOATS
from lowbit.codecs.foreign import call, check_ends, compared, open_session
from lowbit.pipeline.anchors import Anchors, Fit, TokenAnchor
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
    (`StatefulCodec.shared_by`).
    """

    def __init__(self, lane: str, codec: Codec, device: torch.device) -> None:
        self._lane, self._codec, self._device = lane, codec, device
        self._sessions: dict[tuple[int, Slot], Session] = {}
        self._shared: dict[str, Session] = {}  # by state, one of the sessions that share it
        self._restored: dict[str, dict[str, Any]] = {}  # for sessions that are not open yet

    def session(self, index: int, slot: Slot) -> Session:
        """Return the session of a tensor; both ends open the same.

        ValueError: a shape that the codec does not take, or a restored state of another format.
        """
        if (index, slot) not in self._sessions:
            shape, dtype, name = slot.shape, slot.dtype, self._name(index, slot)
            if name in self._shared:
                session = self._shared[name].sharing_state(shape=shape, dtype=dtype)
            else:
                session = open_session(self._codec, shape=shape, dtype=dtype, device=self._device, about=self._lane)
                if name in self._restored:
                    session.load_state_dict(self._restored[name])
                    del self._restored[name]
                self._shared[name] = session
            self._sessions[index, slot] = session
        return self._sessions[index, slot]

    def observe(self, index: int, slot: Slot, x: Tensor) -> Tensor | None:
        return self.session(index, slot).observe(x) if slot.coded else None

    def end_step(self) -> None:
        for session in self._shared.values():
            session.end_step()

    def nbytes(self) -> int:
        return sum(session.state_bytes() for session in self._shared.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        states = {name: session.state_dict() for name, session in self._shared.items()}
        return self._restored | {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore a `state_dict`, for sessions that are open and those that will be opened later."""
        self._restored = {name: state for name, state in states.items() if state}
        # A session without a saved state is dropped and starts empty: `state_dict` leaves empty states out.
        self._sessions = {key: session for key, session in self._sessions.items() if self._name(*key) in self._restored}
        self._shared = {name: session for name, session in self._shared.items() if name in self._restored}
        for name, session in self._shared.items():
            session.load_state_dict(self._restored.pop(name))

    def digest(self) -> str:
        digest = xxhash.xxh3_64()
        for name, state in sorted(self.state_dict().items()):
            for key, value in sorted(compared(self._codec, state).items()):
                digest.update(f"{name}/{key}".encode())
                if isinstance(value, Tensor):
                    digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                else:
                    digest.update(str(value).encode())
        return digest.hexdigest()

    def _name(self, index: int, slot: Slot) -> str:
        shared = None
        if isinstance(self._codec, StatefulCodec):
            shared = call(self._codec, "shared_by", self._codec.shared_by, slot.shape, about=self._lane)
        return f"tensor {index}, {described(slot) if shared is None else f'width {shared}'}"


def described(slot: Slot) -> str:
    """Return dtype and shape as text."""
    return f"{str(slot.dtype).removeprefix('torch.')} {tuple(slot.shape)}{', exact' if slot.exact else ''}"


Direction = Literal["forward", "backward"]


class Lane:
    """One direction of one boundary, at one end: encodes or decodes each tensor that crosses there.

    Floating tensors go through a session of the codec, one for each tensor and shape. Everything else travels as it is:
    constants (`Slot.exact`), integers and booleans, all tensors during the warm-up, and evaluation passes of a codec
    that knows only the samples it is trained on (`needs_key`).

    `overhead`: bytes that travel with every payload, to be counted.
    """

    def __init__(
        self,
        boundary: int,
        direction: Direction,
        codec: Codec,
        device: torch.device | str,
        traffic: Traffic,
        overhead: int = 0,
        anchor: TokenAnchor | None = None,
    ) -> None:
        self.name = f"boundary {boundary} {direction}"
        self.boundary, self.direction, self.codec = boundary, direction, codec
        self._device = torch.device(device)
        self.states = States(self.name, codec, self._device)
        self.anchors = Anchors(anchor, self.name, self._device) if anchor and direction == "forward" else None
        self._slots: Sequence[Sequence[Slot]] = ()  # by micro-batch
        self._traffic, self._overhead = traffic, overhead

    def state_dict(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Return the states of the codec's sessions and of the token anchors, which are empty without any."""
        return self.states.state_dict(), {} if self.anchors is None else self.anchors.state_dict()

    def load_state_dict(self, states: Mapping[str, dict[str, Any]], anchors: Mapping[str, Any]) -> None:
        self.states.load_state_dict(states)
        if self.anchors is not None:
            self.anchors.load_state_dict(anchors)

    def prepare(self, slots: Sequence[Slot]) -> None:
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
            if slot.coded:
                self.states.session(index, slot)

    def check_tokens(self, slots: Iterable[Slot], tokens: Iterable[Tensor]) -> None:
        """Raise a ValueError unless all token ids are those of a coded tensor among these."""
        shapes = {slot.shape[:-1] for slot in slots if slot.coded}
        if self.anchors is None or not shapes:
            return
        for ids in tokens:
            if ids.shape not in shapes:
                raise ValueError(
                    f"ids of a micro-batch have shape {tuple(ids.shape)}; allowed: (batch, sequence) of tensors that "
                    f"cross, {_listed(map(tuple, shapes))}"
                )

    def check_samples(self, slots: Iterable[Slot], samples: Iterable[Sequence[int]]) -> None:
        """Raise a ValueError unless a micro-batch has as many sample ids as entries, for codecs that need them."""
        if not self.codec.needs_key:
            return
        rows = {slot.shape[0] for slot in slots if slot.coded and slot.shape}
        for ids in samples if rows else ():
            if len(ids) not in rows:
                raise ValueError(
                    f"the sample ids of a micro-batch are {len(ids)}; allowed: {_listed(sorted(rows))}, one for each "
                    "entry: give them to set_samples"
                )

    def use(self, slots: Sequence[Sequence[Slot]]) -> None:
        self._slots = slots

    def warm_up(self, slots: Sequence[Slot]) -> None:
        """Compile the codec's kernels for tensors that will cross; sessions stay as they are."""
        for index, slot in enumerate(slots):
            if slot.coded:
                warm_up(self.states.session(index, slot).codec, slot.shape, slot.dtype, self._device)

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
                if (predicted := self._predicted(session, index, step, micro_batch)) is not None:
                    x = torch.sub(x, predicted, out=predicted)
                session.encode(x, training=step.training, out=payload, note=note)
            else:
                # Copied, because the model may reuse the memory of its output while the bytes are in flight.
                payload.view(x.dtype).view(x.shape).copy_(x.detach())
                self._learn(index, step, micro_batch, x)
        self._traffic.count(self.direction, size + self._overhead * bool(size), x.numel())
        return message

    def decode(self, index: int, step: StepKind, micro_batch: int, payload: Tensor, out: Tensor) -> None:
        with self._isolated("decode", micro_batch):
            out = out.detach()
            session, _ = self._coding(index, step, micro_batch)
            if session is None:
                out.copy_(payload.view(out.dtype).view(out.shape))
                self._learn(index, step, micro_batch, out)
            elif (predicted := self._predicted(session, index, step, micro_batch)) is None:
                session.decode(payload, out=out, training=step.training)
            else:
                rest = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
                session.decode(payload, out=rest, training=step.training).add_(predicted)
                out.copy_(saturating_cast(rest, out.dtype))

    def observe(self, index: int, micro_batch: int, x: Tensor) -> Tensor | None:
        """Show this sender the tensor that crossed the other way; return a note for `encode`, if the codec has one."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self.states.observe(index, self._slots[micro_batch][index], x.detach())

    def facts(self, slots: Sequence[Slot]) -> dict[str, str]:
        sessions = [self.states.session(index, slot) for index, slot in enumerate(slots) if slot.coded]
        return {
            f"{self.name} tensors": _listed(map(described, slots)),
            f"{self.name} payload bytes": _listed(s.max_nbytes() for s in sessions),
            f"{self.name} state bytes": _listed(s.state_bytes() for s in sessions),
            f"{self.name} state": self.states.digest(),
            **({f"{self.name} token anchor": self.anchors.digest()} if self.anchors else {}),
        }

    def _coding(self, index: int, step: StepKind, micro_batch: int) -> tuple[Session | None, int]:
        """The session that codes the next message of a tensor (None: the tensor travels as it is), and its bytes."""
        slot = self._slots[micro_batch][index]
        unknown = self.codec.needs_key and not step.training  # the codec only knows the samples it is trained on
        renewing = step.renewing and micro_batch == 0 and self.anchors is not None
        if step.full_precision or renewing or unknown or not slot.coded:
            return None, slot.shape.numel() * slot.dtype.itemsize
        session = self.states.session(index, slot)
        if step.samples:
            session.samples = step.samples[micro_batch]
        return session, session.nbytes()

    def _fit(self, index: int, step: StepKind, micro_batch: int) -> Fit | None:
        """The fit of a tensor's token anchor, if it has one in this step."""
        slot = self._slots[micro_batch][index]
        if self.anchors is None or not slot.coded:
            return None
        if not step.tokens:
            return self.anchors.say_without_ids()
        fits = step.tokens[micro_batch].shape == slot.shape[:-1]
        return self.anchors.fit(index, slot.shape[-1]) if fits else None

    def _learn(self, index: int, step: StepKind, micro_batch: int, x: Tensor) -> None:
        if step.training and (fit := self._fit(index, step, micro_batch)) is not None:
            fit.learn(step.tokens[micro_batch], x)

    def _predicted(self, session: Session, index: int, step: StepKind, micro_batch: int) -> Tensor | None:
        if (session.is_plain and not step.tokens) or (fit := self._fit(index, step, micro_batch)) is None:
            return None
        if session.is_plain:  # another format may follow, for which the fit is enough
            return fit.settle()
        return fit.predict(step.tokens[micro_batch])

    @contextlib.contextmanager
    def _isolated(self, span: str, micro_batch: int) -> Iterator[None]:
        """Run a timed block apart from the model: without a graph, and without autocast, which would round in it."""
        timed = self._traffic.timing("codec_seconds", span, at=self.name, micro_batch=micro_batch)
        with timed, torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            yield


@functools.cache
def warm_up(codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Code a message both ways, once in a process, so that the codec's kernels are compiled before a rank waits."""
    sender, receiver = (open_session(codec, shape=shape, dtype=dtype, device=device) for _ in range(2))
    if codec.needs_key:
        sender.samples = receiver.samples = range(shape[0])
    # Stochastic rounding draws numbers here that a process which resumes a run would draw at another place.
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, torch.no_grad(), torch.autocast(device.type, enabled=False):
        # Neither zeros nor of mean 0: kernels for directions would not run, and many codecs' states would not change.
        x = torch.linspace(-1, 2, shape.numel(), device=device).view(shape).to(dtype)
        for _ in range(2 if codec.needs_key else 1):  # a sample that returns is coded differently
            receiver.decode(sender.encode(x))
    check_ends(sender, receiver)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
