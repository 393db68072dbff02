"""Guard codecs of other packages: errors name the codec, and return values are checked before they are used."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.codecs.base import Codec, Session, StatefulCodec

T = TypeVar("T")

DIGEST = "digest"
_BY_DIGEST = "messages", DIGEST

_METHODS = (
    "nbytes", "max_nbytes", "encode", "decode", "observe", "end_step", "state_bytes", "state_dict", "load_state_dict",
    "sharing_state",
)  # fmt: skip
_VALUES = (Tensor, int, float, str)
_LIBRARIES = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)


class CodecError(ValueError):
    """Raised when a codec of another package fails or returns an invalid value; the text names codec and method."""


def open_session(
    codec: Codec, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device, about: str = ""
) -> Session:
    """Call `codec.open(...)`; guard the session if the codec belongs to another package.

    Args:
        about: purpose of the session, for errors.

    Raises:
        CodecError: a codec of another package failed, or did not open a session; all methods of its session raise this.
    """
    if is_own(codec):
        return codec.open(shape=shape, dtype=dtype, device=device)
    return _guarded(call(codec, "open", codec.open, shape=shape, dtype=dtype, device=device, about=about), codec, about)


def call(codec: Codec, method: str, function: Callable[..., T], *args: Any, about: str = "", **kwargs: Any) -> T:
    """Call a method of a codec.

    Raises:
        CodecError: a codec of another package failed; one line names the codec, the method and the place.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if is_own(codec) or isinstance(error, CodecError | MemoryError | torch.OutOfMemoryError):
            raise
        text = f"{type(error).__name__}: {error}{_place(error)}"
        raise _error(codec, about, f"{method} raised {text}").with_traceback(error.__traceback__) from None


def is_own(codec: Codec) -> bool:
    """Whether a codec and all codecs inside it belong to lowbit."""
    inner = (getattr(codec, field.name, None) for field in fields(codec))
    return type(codec).__module__.partition(".")[0] == "lowbit" and all(
        is_own(c) for c in inner if isinstance(c, Codec)
    )


def compared(codec: Codec, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a session's state that must be equal at both ends; see `StatefulCodec.compared`."""
    by_digest = _BY_DIGEST if DIGEST in state else ()
    keys = (codec.compared if isinstance(codec, StatefulCodec) else ()) or by_digest or state
    return {key: value for key, value in state.items() if key in keys}


def check_state(state: object) -> str:
    """Describe what is wrong with the state of a session; empty if it is valid."""
    if not isinstance(state, Mapping):
        return f"{type(state).__name__}; allowed: a dictionary"
    for key, value in state.items():
        if not isinstance(key, str) or not key or "/" in key:
            return f"the key {key!r}; allowed: texts without '/'"
        if not isinstance(value, _VALUES) or (isinstance(value, Tensor) and value.layout != torch.strided):
            return f"{type(value).__name__} under {key!r}; allowed: tensors, numbers and texts"
    return ""


def check_ends(sender: Session, receiver: Session) -> None:
    """Check two sessions after their first message, so that errors do not wait for a checkpoint.

    Raises:
        CodecError: the two ends of a codec of another package have different states, or do not restore them; evaluation
            changes them; or bytes of messages are not written.
    """
    if is_own(sender.codec):
        return
    states = [session.state_dict() for session in (sender, receiver)]
    ends = [compared(sender.codec, state) for state in states]
    if unlike := sorted(key for key in {*ends[0], *ends[1]} if not _equal(*(end.get(key) for end in ends))):
        raise _error(
            sender.codec,
            "",
            f"state_dict returned other values of {', '.join(unlike)} at the sender than at the receiver, after the "
            f"same message; allowed: equal ones, or {DIGEST!r}, an integer that is equal",
        )
    codec = sender.codec
    if codec.needs_key or not isinstance(codec, StatefulCodec):  # no message has training=False, or there is no state
        return
    first, second, filled = (_evaluated(sender, byte) for byte in (0, 0, 255))
    numbers = receiver.decode(first, training=False)
    for session, end in zip((sender, receiver), ends, strict=True):
        after = compared(codec, session.state_dict())
        if changed := sorted(key for key in {*end, *after} if not _equal(end.get(key), after.get(key))):
            raise _error(codec, "", f"a message with training=False changed {', '.join(changed)}; allowed: no change")
    repeats = torch.equal(first, second)  # without random numbers of its own
    if repeats and not torch.equal(first, filled):
        raise _error(codec, "", "encode leaves bytes of its payload unwritten; allowed: all are written")
    again = _restored(receiver, states[1]).decode(first, training=False)
    if not torch.equal(_bytes(numbers), _bytes(again)) or (
        repeats and not torch.equal(first, _evaluated(_restored(sender, states[0]), 0))
    ):
        raise _error(
            codec, "", "a session that load_state_dict has restored codes the same message in another way; allowed: "
            "alike, so state_dict must return all that coding depends on",
        )  # fmt: skip


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _restored(session: Session, state: Mapping[str, Any]) -> Session:
    """Open a session with the state of another."""
    restored = open_session(session.codec, shape=session.shape, dtype=session.dtype, device=session.device)
    restored.samples = session.samples
    if state:
        restored.load_state_dict(dict(state))
    return restored


def _evaluated(session: Session, filled: int) -> Tensor:
    """Encode a tensor to memory that held other bytes; random numbers are the same each time."""
    x = torch.linspace(1, -2, session.shape.numel(), device=session.device).view(session.shape).to(session.dtype)
    payload = torch.full((session.nbytes(),), filled, dtype=torch.uint8, device=session.device)
    with torch.random.fork_rng([session.device] if session.device.type == "cuda" else []):
        torch.default_generator.manual_seed(0)
        if session.device.type == "cuda":
            torch.cuda.manual_seed(0)
        return session.encode(x, training=False, out=payload)


def _guarded(session: object, codec: Codec, about: str) -> Session:
    """Make errors of a session name the codec and the method, and check and copy the states that cross."""
    if not isinstance(session, Session):
        raise _error(codec, about, f"open returned {type(session).__name__}; allowed: a lowbit.codecs.Session")
    guarded: Any = session
    own = {name: partial(call, codec, name, getattr(session, name), about=about) for name in _METHODS}

    def state_dict() -> dict[str, Any]:
        state = own["state_dict"]()
        if problem := check_state(state):
            raise _error(codec, about, f"state_dict returned {problem}")
        return _copied(state)  # the session may change its own tensors in place

    for name, method in own.items():
        setattr(guarded, name, method)
    guarded.state_dict = state_dict
    guarded.load_state_dict = lambda state: own["load_state_dict"](_copied(state))
    guarded.sharing_state = lambda **settings: _guarded(own["sharing_state"](**settings), codec, about)
    return session


def _error(codec: Codec, about: str, text: str) -> CodecError:
    return CodecError(" ".join(f"{about + ': ' if about else ''}{codec}: {text}".split()))


def _place(error: BaseException) -> str:
    """Locate the last line of the other package in the error's traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
