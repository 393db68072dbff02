"""The codec protocol: configuration that turns tensors into bytes, and sessions that own what outlives a message.

A codec is a frozen, keyword-only dataclass whose fields are its whole configuration. Whatever a format keeps between
messages lives in a `Session` that the boundary opens, one for each of its directions; it talks to sessions only.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.codecs import plain
from lowbit.codecs.plain import FLOATS, check_float, check_out, check_payload
from lowbit.codecs.session import Key as Key
from lowbit.codecs.session import Session


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A format for tensors on the wire. Thread-safe and stateless; equal configurations are equal objects.

    Subclasses set `wire_version`, which changes whenever the bytes of the same configuration change, and implement
    `format_nbytes`, `_encode` and `_decode`. Where the format takes more bytes than plain numbers would, as it may for
    a few elements, plain numbers travel instead, bit-exact. Both ends see that from the shape alone (`sized`).
    """

    wire_version: ClassVar[int] = 1
    needs_key: ClassVar[bool] = False  # messages say which samples they hold
    stateful: ClassVar[bool] = False  # works through sessions only, which remember messages

    @property
    def grain(self) -> int:
        """Elements that must stay together where a tensor is cut, such as the features of a token; 1: none."""
        return 1

    @property
    def ranks(self) -> int | None:
        """How many ranks' tensors it can code in a sum; None: any number."""
        return None

    @property
    def device(self) -> torch.device | None:
        """Where the tensors must be that it codes; None: anywhere."""
        return None

    @property
    def settled(self) -> bool:
        """Whether payloads have a size; False: a number is left to choose by what a tensor carries, see `choose`."""
        return True

    def choose(self, x: Tensor) -> int:
        """What an unsettled codec takes for tensors like this one, whatever they hold; 0 from all others."""
        return 0

    def settle(self, choice: int) -> Codec:
        """The codec with that choice made; settled ones return themselves."""
        return self

    def part(self, rank: int) -> Codec:
        """What codes the tensor that a rank adds to a sum; this codec itself, unless ranks differ."""
        return self

    def whole(self) -> Codec:
        """What codes a sum over all ranks."""
        return self

    def identity(self) -> str:
        """What ranks compare before they sum with it: the same for all its parts."""
        return f"{self} [{self.fingerprint()}]"

    def layer(self) -> str:
        """Which of the codecs of one identity this is, the same for all its parts; empty: there is only one."""
        return ""

    @abstractmethod
    def format_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that the format takes for a tensor of this shape, any dtype and any content."""

    def sized(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[int, bool]:
        """Bytes of a payload, and whether it is plain numbers of this dtype, because the format would take more."""
        own, plainly = self.format_nbytes(shape), math.prod(shape) * dtype.itemsize
        return min(own, plainly), own > plainly

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of a tensor of this shape, any content; never more than plain numbers take.

        Args:
            dtype: of plain numbers: float32 for `encode`, which codes all dtypes alike, and holds them exactly; a
                session's own for its messages.
        """
        return self.sized(shape, dtype)[0]

    @abstractmethod
    def _encode(self, x: Tensor, payload: Tensor) -> None:
        """Fill `payload` (uint8, `format_nbytes(x.shape)` long) from `x` (contiguous, not empty)."""

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """Write the tensor in `payload` to `out` (contiguous, not empty), or add it to what is there."""

    def encode(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Code a tensor.

        Args:
            x: float32, bfloat16 or float16, any shape and strides; not changed.
            out: uint8 buffer of exactly `nbytes(x.shape)` bytes to fill; allocated if absent.

        Returns:
            The payload: uint8, one dimension, contiguous, on the device of `x`.

        Raises:
            TypeError: `x` is not a tensor of one of these dtypes.
            ValueError: `out` has another length, dtype or device.
        """
        check_float("x", x)
        size = self.nbytes(x.shape)
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=x.device)
        check_payload("out", out, size, x.device)
        if x.numel():
            target = out if out.is_contiguous() else torch.empty_like(out)
            self._write(x.detach().contiguous(), target)
            if target is not out:
                out.copy_(target)
        return out

    def decode(
        self,
        payload: Tensor,
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Decode a payload that `encode` made from a tensor of this shape.

        Args:
            payload: uint8, `nbytes(shape)` long. Changed bytes give other numbers, NaN or Inf; nothing else is touched.
            shape: of the tensor; dtype: what to return it in.
            out: tensor of this shape to write to (its dtype then counts, `dtype` is not used).
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
            if dtype not in FLOATS:
                raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, FLOATS))}")
            out = torch.empty(shape, dtype=dtype, device=payload.device)
        check_out(out, shape, payload.device)
        if out.numel():
            target = out if out.is_contiguous() else out.contiguous()
            self._read(payload.contiguous(), target, accumulate)
            if target is not out:
                out.copy_(target)
        return out

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
        if x.numel():
            target = payload.contiguous()
            add = partial(Codec._add, self) if self._sends_plain(x.shape) else self._add
            add(target, x.detach().contiguous())
            if target is not payload:
                payload.copy_(target)
        return payload

    def _add(self, payload: Tensor, x: Tensor) -> None:
        """`add` of a contiguous tensor; formats that need no float32 copy for it do better."""
        total = x.float() if x.dtype != torch.float32 else x.clone()
        self._read(payload, total, True)
        self._write(total, payload)

    def _sends_plain(self, shape: Sequence[int]) -> bool:
        """Whether `encode` makes plain numbers of it; what keeps something codes nothing without a session."""
        return not self.stateful and self.sized(shape)[1]

    def _write(self, x: Tensor, payload: Tensor) -> None:
        if self._sends_plain(x.shape):
            plain.write(x, torch.float32, payload)
        else:
            self._encode(x, payload)

    def _read(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        if self._sends_plain(out.shape):
            plain.read(payload, torch.float32, out, accumulate)
        else:
            self._decode(payload, out, accumulate)

    def sum(
        self,
        payloads: Iterable[Tensor],
        *,
        out: Tensor,
        divisor: int = 1,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """Add up what all ranks sent: decode, sum in float32 in the order of the ranks, divide, round once.

        Args:
            payloads: of rank 0, 1, ..., each made by its `part(rank).encode`; taken one after the other.
            out: tensor to overwrite: float32, bfloat16 or float16, contiguous; its shape is that of what was coded.
            divisor: what the sum is divided by.
            scratch: float32, contiguous, as many elements as `out`: partial sums may go there; allocated if absent.

        Returns:
            `out`.

        Raises:
            TypeError: a dtype of `out` that is not allowed.
            ValueError: an `out` or `scratch` that is not contiguous, or payloads of another number or length.
        """
        check_float("out", out)
        if not out.is_contiguous() or (scratch is not None and not scratch.is_contiguous()):
            raise ValueError("out or scratch is not contiguous; allowed: contiguous tensors")
        if out.numel():
            add_up = partial(Codec._sum, self) if self._sends_plain(out.shape) else self._sum
            add_up(payloads, out, divisor, scratch)
        return out

    def _sum(self, payloads: Iterable[Tensor], out: Tensor, divisor: int, scratch: Tensor | None) -> None:
        """`sum` into a tensor that is not empty; formats that need no float32 copy for it do better."""
        total = out if out.dtype == torch.float32 else scratch
        if total is None:
            total = torch.empty(out.shape, device=out.device)
        total = total.view(out.shape)
        for rank, payload in enumerate(payloads):
            self.part(rank).decode(payload, shape=out.shape, out=total, accumulate=rank > 0)
        if divisor > 1:
            total.div_(total.new_full((), divisor))  # CUDA multiplies by the inverse of a number
        if total is not out:
            out.copy_(total)

    def bits_per_element(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
        """Every byte of the payload (see `nbytes`), divided by the elements (0 for an empty tensor)."""
        numel = math.prod(shape)
        return 8 * self.nbytes(shape, dtype) / numel if numel else 0.0

    def round_trip(self, x: Tensor) -> Tensor:
        """What the other side will see of `x`, without a wire: same shape and dtype."""
        return self.decode(self.encode(x), shape=x.shape, dtype=x.dtype)

    def fingerprint(self) -> str:
        """16 hexadecimal digits that two peers compare before they talk: format, version and configuration."""
        parts = [getattr(self, field.name) for field in fields(self)]
        inner = "".join("/" + part.fingerprint() for part in parts if isinstance(part, Codec))
        text = f"{type(self).__name__}/{self.wire_version}/{self!r}{inner}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session:
        """Start a session for messages of one shape and dtype, in one direction of one boundary."""
        return Session(self, torch.Size(shape), dtype, torch.device(device))

    def shared_by(self, shape: Sequence[int]) -> int | None:
        """Messages for which this is the same number share what a lane's session keeps; None: those of one shape."""
        return None


def draw_seed(rounding: str, device: torch.device) -> int | None:
    """A seed for stochastic rounding, from PyTorch's default generator; None for any other.

    Raises:
        RuntimeError: a CUDA graph is being captured: all its replays would round with the same random numbers.
    """
    if rounding != "stochastic":
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rounding is 'stochastic', and a CUDA graph is being captured: its replays would all round alike; "
            "allowed there: 'nearest'"
        )
    return int(torch.randint(2**31, ()))


def check_int(name: str, value: object, low: int, high: int, multiple: int = 1) -> None:
    """Raise unless `value` is an int (no bool) in [low, high], and a multiple of `multiple`."""
    allowed = f"{low} to {high}" + (f", multiples of {multiple}" if multiple > 1 else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; allowed: an integer from {allowed}")
    if not low <= value <= high or value % multiple:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def check_fraction(name: str, value: object) -> None:
    """Raise unless `value` is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; allowed: a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; allowed: 0 to 1")
