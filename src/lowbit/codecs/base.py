"""The codec interface: a frozen, keyword-only dataclass that turns tensors into bytes, and back.

Its fields are its whole configuration. Two kinds of codecs can do more: a `StatefulCodec` keeps state between the
messages of a `Session`, and payloads of a `Summable` can be summed.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lowbit.codecs.checks import (
    check_dtype,
    check_float,
    check_int,
    check_out,
    check_payload,
    check_written,
    readable,
)


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A format of tensors. Thread-safe; equal configurations are equal objects.

    Subclasses implement `format_nbytes`, `_encode` and `_decode`. If the format takes more bytes than plain numbers, as
    it may for few elements, plain numbers are sent instead, bit-exact. Both ends derive this from the shape.

    Attributes:
        payload_version: changes whenever the bytes of the same configuration change.
        is_plain: whether numbers are sent unchanged. Gradients are then sent the same way by default.
        stateful: whether it works only through sessions, which keep state between messages.
        needs_key: whether sessions need the ids of the samples (`Session.samples`).
    """

    payload_version: ClassVar[int] = 1
    is_plain: ClassVar[bool] = False
    stateful: ClassVar[bool] = False
    needs_key: ClassVar[bool] = False

    @abstractmethod
    def format_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the format for a tensor of this shape, with any dtype and content.

        Formats with sections take them from the `Layout` that their `reference.py` makes.
        """

    @abstractmethod
    def _encode(self, x: Tensor, payload: Tensor) -> None:
        """Fill `payload` (uint8, `format_nbytes(x.shape)` long) from `x` (contiguous, not empty)."""

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """Write the tensor in `payload` to `out` (contiguous, not empty), or add it to `out`."""

    def for_gradients(self) -> "Codec | None":
        """Return the gradients' format for this format of activations; None: the default of `backward_codec`."""
        return None

    def sized(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[int, bool]:
        """Return the bytes of a payload, and whether it is plain numbers because the format would take more."""
        own, plainly = self.format_nbytes(shape), math.prod(shape) * dtype.itemsize
        return min(own, plainly), own > plainly

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of a payload: at most those of plain numbers (float32, or a session's `dtype`)."""
        return self.sized(shape, dtype)[0]

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
        """Return the bits per element of a payload, every byte counted (0 for an empty tensor)."""
        return 8 * self.nbytes(shape, dtype) / max(1, math.prod(shape))

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Encode a tensor. The payload is uint8, one dimension, contiguous, on the device of `x`.

        Args:
            x: float32, bfloat16 or float16, any shape and strides; not changed.
            out: uint8 buffer of exactly `nbytes(x.shape)` bytes to fill; allocated if omitted.

        Raises:
            TypeError: `x` is not a tensor of one of these dtypes.
            ValueError: `out` has another length, dtype or device.
        """
        check_float("x", x)
        x = readable("x", x)
        if out is None:
            out = torch.empty(self.nbytes(x.shape), dtype=torch.uint8, device=x.device)
        check_payload("out", out, self.nbytes(x.shape), x.device)
        check_written("out", out)
        if x.numel():
            if self._sends_plain(x.shape):
                write_plain(x.contiguous(), torch.float32, out)
            else:
                self._fill(x, out)
        return out

    def decode(
        self, payload: Tensor, *, shape: Sequence[int], dtype: torch.dtype = torch.float32,
        out: Tensor | None = None, accumulate: bool = False,
    ) -> Tensor:  # fmt: skip
        """Decode a payload that `encode` made from a tensor of this shape.

        Args:
            payload: uint8, `nbytes(shape)` long. Damaged bytes give other numbers, NaN or Inf; nothing else is touched.
            shape: of the tensor; dtype: of the result.
            out: tensor of this shape to write to; its dtype is used, and `dtype` is ignored.
            accumulate: add into `out` (the sum in float32, rounded once) instead of overwriting it.

        Raises:
            TypeError: a dtype other than float32, bfloat16 or float16.
            ValueError: a payload of another length or dtype, `out` of another shape or device, or `accumulate` alone.
        """
        shape = torch.Size(shape)
        check_payload("payload", payload, self.nbytes(shape), payload.device)
        if out is None:
            if accumulate:
                raise ValueError("accumulate=True needs out=, the tensor to add into; out is None")
            check_dtype(dtype)
            out = torch.empty(shape, dtype=dtype, device=payload.device)
        check_out(out, shape, payload.device)
        if out.numel():
            if self._sends_plain(shape):
                read_plain(payload.contiguous(), torch.float32, out, accumulate)
            else:
                self._restore(payload, out, accumulate)
        return out

    def round_trip(self, x: Tensor) -> Tensor:
        """Encode and decode `x`: return what the receiver gets, in the same shape and dtype."""
        return self.decode(self.encode(x), shape=x.shape, dtype=x.dtype)

    def fingerprint(self) -> str:
        """Return a digest of format, version and configuration that peers compare: 16 hexadecimal digits."""
        settings = [getattr(self, field.name) for field in fields(self)]
        inner = "".join("/" + each.fingerprint() for each in settings if isinstance(each, Codec))
        text = f"{type(self).__name__}/{self.payload_version}/{self!r}{inner}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> "Session":
        """Start a session for messages of one shape and dtype, in one direction of one boundary."""
        return Session(self, torch.Size(shape), dtype, torch.device(device))

    def _fill(self, x: Tensor, payload: Tensor) -> None:
        """Make the input contiguous, then call `_encode`."""
        target = payload.contiguous()
        self._encode(x.contiguous(), target)
        if target is not payload:
            payload.copy_(target)

    def _restore(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """Call `_decode`, and copy its result to `out` if that is not contiguous."""
        target = out.contiguous()
        self._decode(payload.contiguous(), target, accumulate)
        if target is not out:
            out.copy_(target)

    def _sends_plain(self, shape: Sequence[int]) -> bool:
        """Whether `encode` sends plain numbers; a stateful codec encodes nothing without a session."""
        return not self.stateful and self.sized(shape)[1]


class Session:
    """Code messages of one shape in one direction of one boundary; sessions of stateless formats keep no state.

    Both ends open the same session and process the same messages in the same order, so that their states stay equal.
    If the format takes more bytes than the tensor in its own dtype, the tensor is sent unchanged and no state is
    kept. Subclasses implement `_encode` and `_decode` for all other tensors.

    Attributes:
        samples: ids of the next message's samples, one for each entry of its first dimension. If the codec needs them
            (`Codec.needs_key`), the caller sets them before each call; other codecs ignore them.
    """

    samples: Sequence[int] | None = None

    def __init__(self, codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        check_dtype(dtype)
        self.codec = codec
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._note: Tensor | None = None  # `note` of the message that is being encoded
        self._nbytes, self._plain = codec.sized(shape, dtype)

    @property
    def is_plain(self) -> bool:
        """Whether all tensors are sent as plain numbers."""
        return self._plain or self.codec.is_plain

    def nbytes(self) -> int:
        """Bytes of the next message."""
        return self._nbytes

    def max_nbytes(self) -> int:
        """Upper bound of the bytes of any message of this session."""
        return self._nbytes

    def sharing_state(self, *, shape: Sequence[int], dtype: torch.dtype) -> "Session":
        """Return a session for another shape that shares the state of this one; see `StatefulCodec.shared_by`."""
        return self.codec.open(shape=shape, dtype=dtype, device=self.device)

    def encode(
        self, x: Tensor, *, training: bool = True, out: Tensor | None = None, note: Tensor | None = None
    ) -> Tensor:
        """Encode `x`, whose shape must be the session's.

        Args:
            x: the tensor. training: False in an evaluation pass: the state is used, but not changed. out: uint8
                (nbytes(),) to fill; allocated if omitted. note: result of `observe` for the activations whose
                gradient is `x`.

        Raises:
            TypeError: `x` is not a tensor of float32, bfloat16 or float16.
            ValueError: another shape or device, or an `out` of another length, dtype or device.
        """
        check_float("x", x)
        if x.shape != self.shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; this session is for {tuple(self.shape)}")
        x, size = readable("x", x), self.nbytes()
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=x.device)
        check_payload("out", out, size, x.device)
        check_written("out", out)
        self._note = note
        if x.numel():
            if self._plain:
                write_plain(x.contiguous(), self.dtype, out)
            else:
                self._encode(x, out, training)
        self._note = None
        return out

    def decode(self, payload: Tensor, *, out: Tensor | None = None, training: bool = True) -> Tensor:
        """Decode a payload to the session's shape and dtype (or into `out`); arguments as for `encode`.

        Raises:
            TypeError: `out` is not a tensor of float32, bfloat16 or float16.
            ValueError: a payload of another length, dtype or device, or an `out` of another shape or device; with
                formats that number their messages, one that is not the sender's next.
        """
        check_payload("payload", payload, self.nbytes(), payload.device)
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=payload.device)
        check_out(out, self.shape, payload.device)
        if out.numel():
            if self._plain:
                read_plain(payload.contiguous(), self.dtype, out, False)
            else:
                self._decode(payload, out, training)
        return out

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        """Fill `payload` (uint8, `nbytes()` long) from `x` (not empty)."""
        self.codec._fill(x, payload)  # `Codec.encode` would check again what `encode` has checked

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        """Write the tensor in `payload` to `out` (not empty)."""
        self.codec._restore(payload, out, False)

    def observe(self, x: Tensor) -> Tensor | None:
        """Learn from a tensor of the other direction, as it arrived at this sender: finite or not, (..., C).

        A sender of activations gets their gradients. A sender of gradients gets activations, and the result is passed
        to `encode` with their gradient. Messages must contain all that the receiver needs. Most formats do nothing.
        """
        return None

    def end_step(self) -> None:
        """End a training step: tensors observed in it may affect messages from the next one on."""

    def state_bytes(self) -> int:
        """Bytes kept between messages."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this end needs to continue after a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: the state belongs to another format.
        """
        if state:
            raise ValueError(f"state has {sorted(state)}; a session of {self.codec} keeps no state")


@dataclass(frozen=True, kw_only=True)
class StatefulCodec(Codec):
    """A codec whose sessions keep state between messages; its own `encode` and `decode` raise a ValueError.

    Attributes:
        compared: entries of a session's state that must be equal at both ends of a boundary; empty: all entries, or
            "messages" and "digest" if it has a "digest".
    """

    stateful: ClassVar[bool] = True
    compared: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session: ...

    def shared_by(self, shape: Sequence[int]) -> int | None:
        """Return a key: sessions of shapes with equal keys share state. None: only equal shapes do."""
        return None

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        raise ValueError(f"{type(self).__name__} keeps state between messages: use open()")


@dataclass(frozen=True, kw_only=True)
class Summable(Codec):
    """A stateless codec whose payloads can be added to and summed.

    In a sum over ranks, `part(r)` is the codec of rank r's tensor, and `whole()` that of the sum. Both are this codec
    itself, unless the format distinguishes ranks, as `FeatureInt` does.

    Attributes:
        shaped: whether the format depends on the tensor's shape: then it cannot code flat pieces or sums over ranks.
        grain: elements that must stay together when a tensor is cut, such as the features of a token; 1: none.
        unit: a payload can be cut at multiples of this many elements (`copy_units`); 0: it cannot.
        ranks: number of ranks whose tensors it can code in a sum; None: any number.
    """

    shaped: ClassVar[bool] = False

    @property
    def grain(self) -> int:
        return 1

    @property
    def unit(self) -> int:
        return 0

    @property
    def ranks(self) -> int | None:
        return None

    def part(self, rank: int) -> Self:
        """Return the codec of the tensor that a rank adds to a sum."""
        return self

    def whole(self) -> Self:
        """Return the codec of a sum over all ranks."""
        return self

    def nearest(self) -> Self:
        """Return the same codec, rounding to nearest."""
        return self

    def identity(self) -> str:
        """Return what ranks compare before a sum: the same for all parts of a codec."""
        return f"{self} [{self.fingerprint()}]"

    def layer(self) -> str:
        """Return a name that distinguishes codecs with the same `identity`; empty if there is only one."""
        return ""

    def sections(self, numel: int) -> list[tuple[int, int]]:
        """Return first byte and length in bytes of each section of a payload, if there is a `unit`.

        In a section each unit of elements has equally many bytes; a shorter last unit has the first of them.

        Raises:
            TypeError: the format has no `unit`.
        """
        raise TypeError(f"codec is {self}; allowed: one whose payloads can be cut into parts, such as BlockFloat8()")

    def copy_units(
        self, source: Tensor, start: int, target: Tensor, at: int, count: int, *, numel: Sequence[int]
    ) -> None:
        """Copy encoded elements from a payload to another.

        Args:
            source, target: payloads in the format, not plain numbers.
            start, at: the first element in each, multiples of `unit`. count: of elements; what follows in the last unit
                is padding.
            numel: elements of each payload.
        """
        of_both = zip(*(self.sections(n) for n in (*numel, self.unit, count)), strict=True)
        for (from_byte, _), (to_byte, _), (_, width), (_, size) in of_both:
            part = source[from_byte + start // self.unit * width :][:size]
            target[to_byte + at // self.unit * width :][:size].copy_(part)

    def add(self, payload: Tensor, x: Tensor) -> Tensor:
        """Add a tensor to the one in a payload: decode, add in float32, code again.

        Args:
            payload: uint8, `nbytes(x.shape)` long, contiguous; changed in place.
            x: float32, bfloat16 or float16, any shape and strides; not changed.

        Returns:
            The payload.

        Raises:
            TypeError: `x` is not a tensor of one of these dtypes.
            ValueError: a payload of another length, dtype or device.
        """
        check_float("x", x)
        check_payload("payload", payload, self.nbytes(x.shape), x.device)
        check_written("payload", payload)
        if x.numel():
            target = payload.contiguous()
            add = partial(Summable._add, self) if self._sends_plain(x.shape) else self._add
            add(target, readable("x", x).contiguous())
            if target is not payload:
                payload.copy_(target)
        return payload

    def sum(
        self, payloads: Iterable[Tensor], *, out: Tensor, divisor: int = 1, scratch: Tensor | None = None
    ) -> Tensor:
        """Sum the payloads of all ranks: decode, sum in float32 in the order of the ranks, divide, round once.

        Args:
            payloads: of rank 0, 1, ..., each made by its `part(rank).encode`; taken one after the other.
            out: tensor to overwrite: float32, bfloat16 or float16, contiguous; its shape is that of what was coded.
            divisor: what the sum is divided by, at least 1.
            scratch: float32, contiguous, as many elements as `out`: partial sums may go there; allocated if omitted.

        Returns:
            `out`.

        Raises:
            TypeError: a dtype of `out` that is not allowed.
            ValueError: an `out` or `scratch` that is not contiguous, another `scratch` or `divisor`, or payloads of
                another number or length.
        """
        check_int("divisor", divisor, 1, 1 << 30)
        check_float("out", out)
        check_written("out", out)
        if not out.is_contiguous() or (scratch is not None and not scratch.is_contiguous()):
            raise ValueError("out or scratch is not contiguous; allowed: contiguous tensors")
        if scratch is not None and (scratch.dtype, scratch.numel()) != (torch.float32, out.numel()):
            raise ValueError(f"scratch has {scratch.numel()} of {scratch.dtype}; allowed: {out.numel()} of float32")
        if out.numel():
            add_up = partial(Summable._sum, self) if self._sends_plain(out.shape) else self._sum
            add_up(payloads, out, divisor, scratch)
        return out

    def _add(self, payload: Tensor, x: Tensor) -> None:
        """Implement `add` for a contiguous tensor; formats override it to avoid a float32 copy."""
        total = x.float() if x.dtype != torch.float32 else x.clone()
        self.decode(payload, shape=x.shape, out=total, accumulate=True)
        self.encode(total, out=payload)

    def _sum(self, payloads: Iterable[Tensor], out: Tensor, divisor: int, scratch: Tensor | None) -> None:
        """Implement `sum` for a tensor that is not empty; formats override it to avoid a float32 copy."""
        total = out if out.dtype == torch.float32 else scratch
        if total is None:
            total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        total, count = total.view(out.shape), 0
        for rank, payload in enumerate(payloads):
            self.part(rank).decode(payload, shape=out.shape, out=total, accumulate=rank > 0)
            count += 1
        if count != (self.ranks or max(count, 1)):
            raise ValueError(f"payloads are {count}; allowed: {self.ranks or 'at least 1'}, one for each rank")
        if divisor > 1:
            total.div_(total.new_full((), divisor))  # CUDA multiplies by the inverse of a number
        if total is not out:
            out.copy_(total)


def write_plain(x: Tensor, dtype: torch.dtype, payload: Tensor) -> None:
    """Fill `payload` (uint8) with the numbers of `x` (contiguous), rounded to `dtype`."""
    y = saturating_cast(x, dtype)
    # Not a view: a single element counts as contiguous with any stride, but cannot then be viewed as bytes.
    payload.copy_(y.as_strided((y.numel(),), (1,)).view(torch.uint8))


def read_plain(payload: Tensor, dtype: torch.dtype, out: Tensor, accumulate: bool) -> None:
    """Write the numbers in `payload` (contiguous) to `out`, or add them to it."""
    if not torch.compiler.is_compiling() and payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()  # a slice of a larger buffer may be unaligned
    y = payload.view(dtype).view(out.shape)
    if accumulate:
        y = out.float() + y.float()
    out.copy_(saturating_cast(y, out.dtype))


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, except that finite values stay finite: they saturate at the largest number of `dtype`."""
    y, limit = x.to(dtype), torch.finfo(dtype).max
    if x.dtype == dtype or dtype == torch.float32:
        return y
    if x.device.type == "cpu" and x.numel():  # one cheap pass; on a GPU the host would wait
        low, high = x.aminmax()
        if -limit <= float(low) and float(high) <= limit:
            return y
    return torch.where(y.isinf() & x.isfinite(), y.sign() * limit, y)
