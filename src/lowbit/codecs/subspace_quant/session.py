"""Sessions whose ends hold the same directions: what `SubspaceQuant` and `TransformQuant` share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.codecs.sessions import Session
from lowbit.codecs.subspace_quant.memory import Memory
from lowbit.kernels import apart
from lowbit.kernels.layout import ALIGNMENT

if TYPE_CHECKING:
    from lowbit.codecs.base import Codec


class BasisSession(Session):
    """One shape's messages; the basis is shared with the sessions of other shapes of the same width."""

    def __init__(
        self, codec: Codec, shape: torch.Size, dtype: torch.dtype, device: torch.device, memory: Memory
    ) -> None:
        super().__init__(codec, shape, dtype, device)
        self._memory = memory
        # Compiled code would free tensors whose addresses kernels have. (Not as decorators: this imports the compiler.)
        disable = torch.compiler.disable
        vars(self).update(encode=disable(self.encode), decode=disable(self.decode), observe=disable(self.observe))

    def beside(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
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
        target.zero_()  # between sections, too
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

    def state_bytes(self) -> int:
        return self._memory.directions.nbytes + 16

    def state_dict(self) -> dict[str, Any]:
        """The directions, float32 (K, C); messages so far, and the digest of what they brought."""
        return self._memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; an empty one is that of before the first message.

        Raises:
            ValueError: it is of another number of directions, or another width.
        """
        self._memory.load_state_dict(state, self.codec)
