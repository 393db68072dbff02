"""`AQSGD`: encode the change since the sample was last seen; a baseline that needs much memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.codecs.base import Codec, Session, StatefulCodec
from lowbit.codecs.cast.codec import Cast
from lowbit.codecs.group_int.codec import GroupInt
from lowbit.escape import shown
from lowbit.kernels.exact import store


@dataclass(frozen=True, kw_only=True)
class AQSGD(StatefulCodec):
    """Code the difference from each sample's last reconstruction with another codec (AQ-SGD, NeurIPS 2022).

    Both ends keep the last reconstructed activation m of every sample, by sample id. The first visit sends x in its own
    dtype and sets m = x; a later one sends q(x - m), and both ends set m to m + q(x - m). So the state grows with the
    data set: samples x elements of a sample x 4 bytes on each side of each boundary (`Session.state_bytes`), for each
    shape of a batch, as sessions of different shapes share none.

    Bytes of a message: for each sample (entry of the first dimension), 4 or 2 per element at its first visit, later
    those of the inner codec. `nbytes` is for a message whose samples have all been seen; a session knows the actual
    size. If the inner codec takes more than 4 or 2, every visit is like the first, and nothing is kept. After a visit
    with NaN or Inf the next one is a first visit. A message needs its samples' ids (`Session.samples`), so this codec
    works only through sessions (`open`).

    Args:
        inner: codec of the differences.
    """

    payload_version: ClassVar[int] = 2

    inner: Codec = field(default_factory=lambda: GroupInt(bits=4, group=64))
    needs_key: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec) or self.inner.stateful:
            raise TypeError(f"inner is {shown(self.inner)}; allowed: a codec without state")

    def format_nbytes(self, shape: Sequence[int]) -> int:
        batch, sample = (shape[0], shape[1:]) if shape else (1, ())
        return batch * self.inner.format_nbytes(sample) if math.prod(shape) else 0

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session:
        if not len(shape):
            raise ValueError("shape is (); AQSGD needs a first dimension, the samples")
        return AQSGDSession(self, torch.Size(shape), dtype, torch.device(device))


class AQSGDSession(Session):
    """Keeps the last reconstruction of every sample by its id, in float32."""

    codec: AQSGD

    def __init__(self, codec: AQSGD, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(codec, shape, dtype, device)
        self._memory: dict[int, Tensor] = {}
        self._first = Cast(dtype=dtype)

    def nbytes(self) -> int:
        return self._nbytes if self._plain else sum(self._sizes(self._ids()))

    def max_nbytes(self) -> int:
        return self._first.nbytes(self.shape)  # the inner codec takes less, or is not used

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        parts = []
        for row, sample in zip(x, self._ids(), strict=True):
            codec, last = self._codec_of(sample), self._memory.get(sample)
            parts.append(codec.encode(row if last is None else row.float() - last))
            if training:
                self._keep(sample, self._moved(sample, parts[-1]))
        torch.cat(parts, out=payload)

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        ids = self._ids()
        for row, sample, part in zip(out, ids, payload.split(self._sizes(ids)), strict=True):
            moved = self._moved(sample, part)
            store(moved, row, False)
            if training:
                self._keep(sample, moved)

    def state_bytes(self) -> int:
        return sum(m.numel() * m.element_size() for m in self._memory.values())

    def state_dict(self) -> dict[str, Any]:
        return {str(i): m for i, m in self._memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shape = tuple(self.shape[1:])
        for i, m in state.items():
            if not isinstance(m, Tensor):
                raise ValueError(f"state of sample {i} is {type(m).__name__}; allowed: a tensor")
            if m.shape != shape:
                raise ValueError(f"state of sample {i} has shape {tuple(m.shape)}; expected {shape}")
        self._memory = {int(i): m.to(self.device, torch.float32, copy=True) for i, m in state.items()}

    def _ids(self) -> Sequence[int]:
        ids = None if self.samples is None else [int(i) for i in self.samples]  # entries of a tensor are all different
        if ids is None or len(ids) != self.shape[0] or len(set(ids)) != len(ids):
            raise ValueError(
                f"samples is {ids}; AQSGD needs {self.shape[0]} different sample ids, one for each entry: give them to "
                "set_samples(ids) before each step"
            )
        return ids

    def _sizes(self, ids: Sequence[int]) -> list[int]:
        return [self._codec_of(i).nbytes(self.shape[1:]) for i in ids]

    def _codec_of(self, sample: int) -> Codec:
        return self.codec.inner if sample in self._memory else self._first

    def _keep(self, sample: int, moved: Tensor) -> None:
        """Remember a reconstruction; one with NaN or Inf would spoil all later ones: the sample begins anew."""
        if moved.isfinite().all():
            self._memory[sample] = moved
        else:
            self._memory.pop(sample, None)

    def _moved(self, sample: int, payload: Tensor) -> Tensor:
        """The receiver's reconstruction of a sample after this message."""
        codec, shape, last = self._codec_of(sample), self.shape[1:], self._memory.get(sample)
        if last is None:
            return codec.decode(payload, shape=shape)
        return codec.decode(payload, shape=shape, out=last.clone(), accumulate=True)


SHORT_NAMES = {"aq-sgd": AQSGD}
