"""Sessions: encode and decode messages of one shape, with the state that a codec keeps between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.codecs import plain
from lowbit.codecs.checks import check_dtype, check_float, check_out, check_payload

if TYPE_CHECKING:
    from lowbit.codecs.base import Codec


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

    def nbytes(self) -> int:
        """Bytes of the next message."""
        return self._nbytes

    def max_nbytes(self) -> int:
        """Upper bound of the bytes of any message of this session."""
        return self._nbytes

    def sharing_state(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
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
        size = self.nbytes()
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=x.device)
        check_payload("out", out, size, x.device)
        self._note = note
        if x.numel():
            if self._plain:
                plain.write(x.detach().contiguous(), self.dtype, out)
            else:
                self._encode(x.detach(), out, training)
        self._note = None
        return out

    def decode(self, payload: Tensor, *, out: Tensor | None = None, training: bool = True) -> Tensor:
        """Decode a payload to the session's shape and dtype (or into `out`); arguments as for `encode`.

        Raises:
            TypeError: `out` is not a tensor of float32, bfloat16 or float16.
            ValueError: a payload of another length, dtype or device, or that is not the sender's next message, or an
                `out` of another shape or device.
        """
        check_payload("payload", payload, self.nbytes(), payload.device)
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=payload.device)
        check_out(out, self.shape, payload.device)
        if out.numel():
            if self._plain:
                plain.read(payload.contiguous(), self.dtype, out, False)
            else:
                self._decode(payload, out, training)
        return out

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        """Fill `payload` (uint8, `nbytes()` long) from `x` (not empty)."""
        # Not by `Codec.encode`, which would check again what `encode` has checked.
        target = payload.contiguous()
        self.codec._encode(x.contiguous(), target)
        if target is not payload:
            payload.copy_(target)

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        """Write the tensor in `payload` to `out` (not empty)."""
        target = out.contiguous()
        self.codec._decode(payload.contiguous(), target, False)
        if target is not out:
            out.copy_(target)

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
