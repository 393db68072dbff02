"""Guard codecs of other packages: errors name the codec, and return values are checked before they are used."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.sessions import Session

T = TypeVar("T")

CHOICE = "choice"
"""Key, in a saved state, of a parameter that was chosen from data; a session's own state must not have it."""
PROPOSAL = "proposal"
"""Key of such a parameter that the sender has not announced yet."""

DIGEST = "digest"
COMPARED = "messages", DIGEST
"""If a state has a digest, the two ends of a boundary compare only these keys."""

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
    session = call(codec, "open", codec.open, shape=shape, dtype=dtype, device=device, about=about)
    return _Guarded(session, codec, torch.Size(shape), dtype, device, about)


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


def check_state(state: object) -> str:
    """Describe what is wrong with the state of a session; empty if it is valid."""
    if not isinstance(state, Mapping):
        return f"{type(state).__name__}; allowed: a dictionary"
    for key, value in state.items():
        if not isinstance(key, str) or not key or "/" in key or key in (CHOICE, PROPOSAL):
            return f"the key {key!r}; allowed: texts without '/', other than {CHOICE!r} and {PROPOSAL!r}"
        if not isinstance(value, _VALUES) or (isinstance(value, Tensor) and value.layout != torch.strided):
            return f"{type(value).__name__} under {key!r}; allowed: tensors, numbers and texts"
    return ""


def check_ends(sender: Session, receiver: Session) -> None:
    """Check the states of two sessions after their first messages, so that errors do not wait for a checkpoint.

    Raises:
        CodecError: the two ends of a codec of another package have different states, or cannot restore them.
    """
    if not isinstance(sender, _Guarded) or not isinstance(receiver, _Guarded):
        return
    states = [session.state_dict() for session in (sender, receiver)]
    compared = [{k: v for k, v in state.items() if DIGEST not in state or k in COMPARED} for state in states]
    if unlike := sorted(key for key in {*compared[0], *compared[1]} if not _equal(*(c.get(key) for c in compared))):
        raise sender.error(
            f"state_dict returned other values of {', '.join(unlike)} at the sender than at the receiver, after the "
            f"same message; allowed: equal ones, or {DIGEST!r}, an integer that is equal"
        )
    for session, state in zip((sender, receiver), states, strict=True):
        if state:
            codec = session.codec
            restored = open_session(codec, shape=session.shape, dtype=session.dtype, device=session.device)
            restored.load_state_dict(state)


class _Guarded(Session):
    """Wraps a session of another package's codec, and checks what it returns."""

    def __init__(
        self, inner: Session, codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device, about: str
    ) -> None:
        self._inner, self._about = inner, about
        self.codec, self.shape, self.dtype, self.device = codec, shape, dtype, device
        if not isinstance(inner, Session):
            raise self.error(f"open returned {type(inner).__name__}; allowed: a lowbit.codecs.Session")
        self._nbytes = self._size("max_nbytes")

    def nbytes(self) -> int:
        size = self._size("nbytes")
        # Receives are posted ahead, before the messages in between have changed the state.
        if size > self._nbytes or (size != self._nbytes and not self.codec.needs_key):
            at_most = "at most " * self.codec.needs_key
            raise self.error(f"nbytes returned {size}; allowed: {at_most}{self._nbytes}, the result of `max_nbytes`")
        return size

    def sharing_state(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
        inner = self._call("sharing_state", shape=shape, dtype=dtype)
        return _Guarded(inner, self.codec, torch.Size(shape), dtype, self.device, self._about)

    def encode(
        self,
        x: Tensor,
        *,
        training: bool = True,
        out: Tensor | None = None,
        note: Tensor | None = None,  # always None: other packages do not see tensors of the other direction
    ) -> Tensor:
        payload = torch.empty(self.nbytes(), dtype=torch.uint8, device=x.device) if out is None else out
        before = None if x.is_inference() else x._version  # autograd does not notice if nothing saved `x`
        returned = self._call("encode", x, training=training, out=payload)
        if before is not None and x._version != before:
            raise self.error("encode changed the tensor that it was given; allowed: only to read it")
        return self._filled("encode", payload, returned)

    def decode(self, payload: Tensor, *, out: Tensor | None = None, training: bool = True) -> Tensor:
        target = torch.empty(self.shape, dtype=self.dtype, device=payload.device) if out is None else out
        return self._filled("decode", target, self._call("decode", payload, out=target, training=training))

    def state_bytes(self) -> int:
        return self._size("state_bytes")

    def state_dict(self) -> dict[str, Any]:
        """A copy: the session may change its own tensors in place."""
        state = self._call("state_dict")
        if problem := check_state(state):
            raise self.error(f"state_dict returned {problem}")
        return _copied(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", _copied(state))

    def error(self, text: str) -> CodecError:
        return _error(self.codec, self._about, text)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._inner.samples = self.samples
        return call(self.codec, method, getattr(self._inner, method), *args, about=self._about, **kwargs)

    def _filled(self, method: str, target: Tensor, returned: object) -> Tensor:
        """Return `target`, which the method has filled, or to which its return value is copied."""
        if returned is target:
            return target
        given, expected = _described(returned), _described(target)
        if given != expected or not isinstance(returned, Tensor):
            raise self.error(f"{method} returned {given}; allowed: {expected}")
        return target.copy_(returned)

    def _size(self, method: str) -> int:
        value = self._call(method)
        if type(value) is not int or value < 0:
            raise self.error(f"{method} returned {value!r}; allowed: a number of bytes, an integer")
        return value


def _error(codec: Codec, about: str, text: str) -> CodecError:
    return CodecError(" ".join(f"{about + ': ' if about else ''}{codec}: {text}".split()))


def _place(error: BaseException) -> str:
    """Locate the last line of the other package in the error's traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _described(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
