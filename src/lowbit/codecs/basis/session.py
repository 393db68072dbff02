"""Base classes of codecs whose ends hold the same directions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.codecs.base import Session, StatefulCodec
from lowbit.codecs.basis.memory import Memory
from lowbit.codecs.basis.reference import Basis, BasisGeometry, follow, renew
from lowbit.kernels import apart, implementation
from lowbit.kernels.layout import ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class BasisCodec(StatefulCodec):
    """A codec whose sessions learn directions, which all shapes of one width share."""

    @abstractmethod
    def geometry(self, shape: Sequence[int]) -> BasisGeometry:
        """Return the sizes of a payload."""

    def shared_by(self, shape: Sequence[int]) -> int:
        return folded(shape)[1]


class BasisSession(Session):
    """Session for one shape; the basis is shared with sessions of other shapes of the same width."""

    codec: BasisCodec
    _geometry: BasisGeometry

    def __init__(
        self, codec: BasisCodec, shape: torch.Size, dtype: torch.dtype, device: torch.device, memory: Memory
    ) -> None:
        super().__init__(codec, shape, dtype, device)
        self._memory, self._geometry = memory, codec.geometry(shape)
        # Compiled code would free tensors whose addresses kernels use. (Decorators would import the compiler at once.)
        disable = torch.compiler.disable
        vars(self).update(encode=disable(self.encode), decode=disable(self.decode), observe=disable(self.observe))

    def sharing_state(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
        return type(self)(self.codec, torch.Size(shape), dtype, self.device, self._memory)

    @abstractmethod
    def _code(self, x: Tensor, payload: Tensor, training: bool) -> None:
        """Fill an aligned payload of zeros from contiguous `x`."""

    @abstractmethod
    def _follow(self, payload: Tensor, out: Tensor, training: bool) -> None:
        """Write the tensor in an aligned payload to contiguous `out`."""

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        device = self._memory.directions.device
        if x.device != device:
            raise ValueError(f"x is on {x.device}; this session is for {device}")
        target = torch.empty_like(payload) if payload.data_ptr() % ALIGNMENT else payload
        target.zero_()  # also between sections
        with apart(device):
            self._code(x.contiguous(), target, training)
            if target is not payload:
                payload.copy_(target)

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        device = self._memory.directions.device
        if payload.device != device:
            raise ValueError(f"payload is on {payload.device}; expected {device}")
        payload = payload.clone() if payload.data_ptr() % ALIGNMENT else payload.contiguous()
        target = out.detach().contiguous()
        with apart(device):
            self._follow(payload, target, training)
            if target.data_ptr() != out.data_ptr():
                out.copy_(target)

    def _renewed(self, x_RC: Tensor, payload: Tensor, training: bool) -> tuple[Basis, Tensor]:
        """Write header and new directions to a payload; return the new basis, and the tokens' products with it."""
        memory = self._memory
        basis = Basis(memory.directions, memory.inverse(), memory.digest)
        new = Basis(*map(torch.empty_like, basis))
        arguments = x_RC, basis, payload, new, memory.messages, training, self._geometry
        return new, implementation(renew, self.device)(*arguments)

    def _next(self, payload: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the directions after a payload's renewal, their digest, and the header that the payload must have."""
        memory = self._memory
        directions_KC, digest = map(torch.empty_like, (memory.directions, memory.digest))
        expected = torch.empty(4, dtype=torch.int32, device=payload.device)
        implementation(follow, self.device)(
            payload, memory.directions, memory.digest, expected, directions_KC, digest, memory.messages, training,
            self._geometry,
        )  # fmt: skip
        return directions_KC, digest, expected

    def _checked(
        self, payload: Tensor, expected: Tensor, directions_KC: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return directions and values of a message, or the old directions and NaN if its header is not `expected`.

        Raises:
            ValueError: the header is wrong, and the host knows it already.
        """
        memory = self._memory
        header = self._geometry.layout.section(payload, "header", torch.int32)
        if memory.headers.compare(header, expected):
            return directions_KC, values
        # The host learns the outcome later: a wrong message decodes to NaN and does not change the directions.
        wrong = ((header != expected) | (expected < 0)).any()
        return torch.where(wrong, memory.directions, directions_KC), torch.where(wrong, math.nan, values)

    def state_bytes(self) -> int:
        return self._memory.directions.nbytes + 16

    def state_dict(self) -> dict[str, Any]:
        """Return the directions, float32 (K, C), the number of messages so far, and the digest of their directions."""
        return self._memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; an empty one is the state before the first message.

        Raises:
            ValueError: it has another number of directions, or another width.
        """
        self._memory.load_state_dict(state, self.codec)


def folded(shape: Sequence[int]) -> tuple[int, int]:
    """Fold any shape to (tokens, channels)."""
    padded = (1, 1, *shape)
    return math.prod(padded[:-1]), padded[-1]
