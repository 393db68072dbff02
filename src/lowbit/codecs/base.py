"""The codec interface: a frozen, keyword-only dataclass that turns tensors into bytes, and back.

Its fields are its whole configuration. Optional capabilities are in `lowbit.codecs.sums` and `.stateful`.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from lowbit.codecs import plain
from lowbit.codecs.checks import check_dtype, check_float, check_out, check_payload
from lowbit.codecs.sessions import Session


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
        settled: False while a parameter must still be chosen from data.
    """

    payload_version: ClassVar[int] = 1
    is_plain: ClassVar[bool] = False
    stateful: ClassVar[bool] = False
    needs_key: ClassVar[bool] = False
    settled: ClassVar[bool] = True

    @abstractmethod
    def format_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the format for a tensor of this shape, with any dtype and content."""

    @abstractmethod
    def _encode(self, x: Tensor, payload: Tensor) -> None:
        """Fill `payload` (uint8, `format_nbytes(x.shape)` long) from `x` (contiguous, not empty)."""

    @abstractmethod
    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        """Write the tensor in `payload` to `out` (contiguous, not empty), or add it to `out`."""

    def for_gradients(self) -> Codec | None:
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
        if out is None:
            out = torch.empty(self.nbytes(x.shape), dtype=torch.uint8, device=x.device)
        check_payload("out", out, self.nbytes(x.shape), x.device)
        if x.numel():
            target, x = out.contiguous(), x.detach().contiguous()
            if self._sends_plain(x.shape):
                plain.write(x, torch.float32, target)
            else:
                self._encode(x, target)
            if target is not out:
                out.copy_(target)
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
            target = out.contiguous()
            if self._sends_plain(shape):
                plain.read(payload.contiguous(), torch.float32, target, accumulate)
            else:
                self._decode(payload.contiguous(), target, accumulate)
            if target is not out:
                out.copy_(target)
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

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session:
        """Start a session for messages of one shape and dtype, in one direction of one boundary."""
        return Session(self, torch.Size(shape), dtype, torch.device(device))

    def _sends_plain(self, shape: Sequence[int]) -> bool:
        """Whether `encode` sends plain numbers; a stateful codec encodes nothing without a session."""
        return not self.stateful and self.sized(shape)[1]
