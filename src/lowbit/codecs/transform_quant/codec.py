"""`TransformQuant`: tokens in a basis that both ends hold, one uniform step with dither, entropy-coded to a rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.codecs.sessions import Key, Session
from lowbit.codecs.stateful import StatefulCodec
from lowbit.codecs.subspace_quant.memory import Memory
from lowbit.codecs.subspace_quant.reference_basis import Basis, follow, renew
from lowbit.codecs.transform_quant.basis import coefficients, tokens
from lowbit.codecs.transform_quant.layout import TransformGeometry, transform_geometry
from lowbit.codecs.transform_quant.reference import decode, encode
from lowbit.kernels import apart, implementation
from lowbit.kernels.layout import ALIGNMENT

MOST = 16.0  # bits
CODED = {"token": 2.25, "message": 2.25}  # bits of the symbols where no rate is set


@dataclass(frozen=True, kw_only=True)
class TransformQuant(StatefulCodec):
    """Send tokens as entropy-coded coefficients in a basis that both ends hold, at a rate of `bits`, both ways.

    Args:
        bits: of an element, with everything that travels, above 0 and at most 16.
        step: "token": the error is relative to each token's norm, as activations bear it; "message": one step for all
            tokens, as gradients do.
    """

    bits: float | None = None
    step: Literal["token", "message"] = "token"

    def __post_init__(self) -> None:
        if self.bits is not None:
            if not isinstance(self.bits, int | float) or isinstance(self.bits, bool) or not 0 < self.bits <= MOST:
                raise ValueError(f"bits is {self.bits!r}; allowed: a number above 0, at most {MOST:g}")
            object.__setattr__(self, "bits", float(self.bits))
        if self.step not in CODED:
            raise ValueError(f"step is {self.step!r}; allowed: {', '.join(map(repr, CODED))}")

    def __repr__(self) -> str:
        """The settings, without a rate that is left to the shape."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        named = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        return f"{type(self).__name__}({named})"

    def for_gradients(self) -> TransformQuant:
        """The same rate, with one step for all tokens."""
        return replace(self, step="message")

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self.geometry(shape).layout.nbytes if math.prod(shape) else 0

    def geometry(self, shape: Sequence[int]) -> TransformGeometry:
        """Sizes of a payload.

        Raises:
            ValueError: the rate is below what directions, scales and empty streams take.
        """
        rows, channels = _folded(shape)
        geo = transform_geometry(rows, channels, self.step == "token", self.bits, CODED[self.step])
        if geo.layout.nbytes < geo.least() and math.prod(shape):
            raise ValueError(
                f"bits is {self.bits:g}, which is {int(self.bits * math.prod(shape) / 8)} bytes for messages of "
                f"{tuple(shape)}; allowed: at least {8 * geo.least() / math.prod(shape):.2f}, for their directions, "
                "scales and streams"
            )
        return geo

    def shared_by(self, shape: Sequence[int]) -> int:
        return _folded(shape)[1]

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session:
        geo = self.geometry(shape)
        memory = Memory(geo.directions, geo.channels, torch.device(device))
        return TransformSession(self, torch.Size(shape), dtype, torch.device(device), memory)


class TransformSession(Session):
    """One shape's messages; the basis is shared with the sessions of other shapes of the same width."""

    codec: TransformQuant

    def __init__(
        self, codec: TransformQuant, shape: torch.Size, dtype: torch.dtype, device: torch.device, memory: Memory
    ) -> None:
        super().__init__(codec, shape, dtype, device)
        self._memory = memory
        self._geometry = codec.geometry(shape)
        disable = torch.compiler.disable
        vars(self).update(encode=disable(self.encode), decode=disable(self.decode))

    def beside(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
        return TransformSession(self.codec, torch.Size(shape), dtype, self.device, self._memory)

    def _encode(self, x: Tensor, payload: Tensor, key: Key | None, training: bool) -> None:
        device = self._memory.directions.device
        if x.device != device:
            raise ValueError(f"x is on {x.device}; this session is for {device}")
        payload.zero_()
        with apart(device):
            self._code(x.contiguous(), payload, training)

    def _code(self, x: Tensor, payload: Tensor, training: bool) -> None:
        memory, geo = self._memory, self._geometry
        x_RC = x.view(geo.rows, geo.channels).float()
        basis = Basis(memory.directions, memory.inverse(), memory.digest)
        new = Basis(*map(torch.empty_like, basis))
        implementation(renew, self.device)(x_RC, basis, payload, new, memory.messages, training, True, geo)
        header = geo.layout.section(payload, "header", torch.int32)
        z_RC = coefficients(x_RC, new.directions_KC)
        implementation(encode, self.device)(z_RC, header, payload, geo)
        if training:
            memory.keep(new.directions_KC, new.digest, new.inverse_KK)

    def _decode(self, payload: Tensor, out: Tensor, key: Key | None, training: bool) -> None:
        device = self._memory.directions.device
        if payload.device != device:
            raise ValueError(f"payload is on {payload.device}; expected {device}")
        payload = payload.clone() if payload.data_ptr() % ALIGNMENT else payload.contiguous()
        target = out.detach().contiguous()
        with apart(device):
            self._follow(payload, target, training)
            if target.data_ptr() != out.data_ptr():
                out.copy_(target)

    def _follow(self, payload: Tensor, out: Tensor, training: bool) -> None:
        memory, geo = self._memory, self._geometry
        directions_KC, digest = map(torch.empty_like, (memory.directions, memory.digest))
        expected = torch.empty(4, dtype=torch.int32, device=payload.device)
        run = partial(implementation, device=self.device)
        run(follow)(
            payload, memory.directions, memory.digest, expected, directions_KC, digest, memory.messages, training, geo
        )
        header = geo.layout.section(payload, "header", torch.int32)
        z_RC = directions_KC.new_empty(geo.rows, geo.channels)
        whole = run(decode)(payload, header, z_RC, geo)
        expected[3] = torch.where(whole, expected[3], -1)
        if not memory.headers.compare(header, expected):
            # The host learns it later: what does not belong here decodes to NaN and leaves the directions alone.
            wrong = ((header != expected) | (expected < 0)).any()
            directions_KC = torch.where(wrong, memory.directions, directions_KC)
            z_RC = torch.where(wrong, math.nan, z_RC)
        tokens(z_RC, directions_KC, out.view(geo.rows, geo.channels))
        if training:
            memory.keep(directions_KC, digest)

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


def _folded(shape: Sequence[int]) -> tuple[int, int]:
    """Any shape as (tokens, channels)."""
    padded = (1, 1, *shape)
    return math.prod(padded[:-1]), padded[-1]


SHORT_NAMES = {"transform": TransformQuant, "transform-backward": partial(TransformQuant, step="message")}
