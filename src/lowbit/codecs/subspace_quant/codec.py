"""`SubspaceQuant`: 8-bit coefficients along a boundary's principal directions, the remainder in fewer bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit.codecs.basis.memory import Memory
from lowbit.codecs.basis.reference import coefficients, invert, units
from lowbit.codecs.basis.session import BasisCodec, BasisSession, folded
from lowbit.codecs.checks import FLOATS, check_int
from lowbit.codecs.sessions import Session
from lowbit.codecs.subspace_quant.fit import best_directions
from lowbit.codecs.subspace_quant.layout import SubspaceGeometry, subspace_geometry, suited
from lowbit.codecs.subspace_quant.reference import coefficients_decode, coefficients_encode, rest_decode, rest_encode
from lowbit.kernels import implementation

log = logging.getLogger(__name__)

MOST = 1 << 15  # directions: slots are int16


@dataclass(frozen=True, kw_only=True)
class SubspaceQuant(BasisCodec):
    """Send tokens as 8-bit coefficients along learned directions, and the remainder as integers of `bits` bits.

    Tensors at a boundary lie near a small subspace, forward and backward. With the K directions V (K x C) that both
    ends hold, a token x (C channels) is coded as

        c: the least squares of x - V' c,  c' = 8 bits of c,  x' = V' c',  y = x' + `bits` bits of (x - x').

    The remainder is relative to what the receiver computes (a closed loop): a useless basis costs precision, never
    correctness, and tokens far from the basis (massive activations) keep their precision through the remainder.

    The basis follows the tokens, which change as a model trains. Each message brings ceil(K / refresh) new directions,
    but not more than it has tokens. They replace the least useful ones, are the principal directions of what the
    others leave of this message, and are already used to code it. `refresh` messages can replace the whole basis. With
    refresh=1 each message brings its own; from refresh = 2 K on, once there are K directions, only every
    (refresh // K)th message brings a new one, and the others need no search. The payloads of a shape have one size, so
    that a receiver can always post its buffer. Evaluation works alike, but new directions are then discarded.

    Every message carries its number, a digest of the directions of all messages before it, and one of its own. If one
    is lost, repeated or out of order, or its directions changed on the way, the receiver raises an error, and its state
    and `out` do not change. Other changed bytes spoil tokens of this message alone, unnoticed: the transport must
    protect them. On a GPU the host does not wait: a wrong message decodes to NaN and does not change the directions,
    and a later message or `state_dict()` raises the error, once the host has read the header.

    Payload, sections at multiples of 16 bytes, for R tokens in G = ceil(C / group) groups each and M new directions:

    - header, 4 int32: number of training messages before this one, modulo 2^31; digest of their directions; 1 in
      training, 0 in evaluation; digest of this message's directions; digests have 31 bits;
    - slots, M int16: which directions are replaced, each once (-1: none); lengths, M float32, and directions, M x C
      int8: the new ones are the products;
    - units, K bfloat16: root mean square of the coefficients along each direction;
    - factors, R bfloat16: the token's largest coefficient in these units, rounded up;
    - coefficients, R K int8: c' = q (factor / 127) unit;
    - exponents, R bytes, and steps, R G bytes: each group's step as in `TAHQuant`, in sixteenths of an octave below the
      token's largest; 255: a group of zeros, 254: one with NaN or Inf, which decodes to NaN;
    - codes: group after group in bit planes as in `GroupInt`; a token's ragged last group takes a multiple of 8
      elements. y = x' + (code - (2^bits - 1) / 2) step; a step is 2^(1 - bits) of the group's largest magnitude.

    New directions are counted in `nbytes`. Each end of each direction of a boundary keeps `state_bytes()` = 4 C K + 16;
    a sender also holds the inverse of the directions' products, 4 K^2 bytes that can be recomputed. `encode` needs up
    to 4 R C temporary bytes in addition to its payload (without kernels, or on a GPU, twice as many, and another 4 R C
    for 16-bit input), and `decode` none if `out` is contiguous float32, otherwise up to 4 R C; coefficients and
    directions are small compared with that.

    A message depends on earlier ones, so this codec works only through sessions (`open`), not through `encode`.
    A token whose coefficients are not finite or beyond 2^96 is coded by the remainder alone. A message with NaN, Inf or
    such magnitudes, or with none from 2^-126 on, does not change the basis, and NaN is transmitted.

    Args:
        directions: their number, 1 to C, 32768 at most. None: C / 8, at least 1 and at most 32. "auto": a sender
            chooses the number, at most 256, in the last step of the warm-up by the spectrum of its first message in
            that step, and sends its choice with that step's messages. Each tensor of each boundary, forward and
            backward, gets its own number, or that of None if this message is all zeros, or has NaN or Inf. Sessions
            exist only after the warm-up.
        bits: bits of the remainder, 2 to 8.
        group: elements of the remainder that share a step, a multiple of 8 from 8 to 65536.
        refresh: messages that can replace all directions, if they have enough tokens, 1 to 65536. None: each message
            brings an eighth of the directions, or fewer if they would take more than 1/4 bit an element, but at least
            one.
    """

    payload_version: ClassVar[int] = 3

    directions: int | Literal["auto"] | None = None
    bits: int = 3
    group: int = 64
    refresh: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.directions, str) and self.directions != "auto":
            raise ValueError(f"directions is {self.directions!r}; allowed: an integer from 1 to {MOST}, or 'auto'")
        if self.directions not in (None, "auto"):
            check_int("directions", self.directions, 1, MOST)
        check_int("bits", self.bits, 2, 8)
        check_int("group", self.group, 8, 65536, multiple=8)
        if self.refresh is not None:
            check_int("refresh", self.refresh, 1, 65536)

    def __repr__(self) -> str:
        """Show the settings, except those that depend on the shape."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        named = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        return f"{type(self).__name__}({named})"

    @classmethod
    def fitted(cls, x: Tensor, *, bits: int = 3, group: int = 64, refresh: int | None = None) -> SubspaceQuant:
        """Return the codec with the best number of directions for messages like this one: least noise for its bits.

        Both ends need the same number: measure once, as `lowbit bench spectrum` does, and configure the result.

        Args:
            x: a typical message, (..., C): activations, or gradients.
            bits, group, refresh: as above.

        Raises:
            ValueError: `x` is empty or all zeros, or has NaN or Inf.
            TypeError: another dtype than float32, bfloat16 or float16.
        """
        if x.dtype not in FLOATS:
            raise TypeError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, FLOATS))}")
        directions = best_directions(x.detach().reshape(folded(x.shape)), bits, refresh)
        if not directions:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and holds nothing but zeros, or NaN or Inf; allowed: finite numbers"
            )
        return cls(directions=directions, bits=bits, group=group, refresh=refresh)

    @property
    def settled(self) -> bool:
        return self.directions != "auto"

    def for_gradients(self) -> SubspaceQuant:
        """Return the same settings with at least 4 bits: gradients have less of their energy in few directions."""
        return replace(self, bits=max(self.bits, 4))

    def advice(self, shape: Sequence[int]) -> str:
        """Return a warning if fewer directions than requested would halve messages of this shape."""
        if not isinstance(self.directions, int):
            return ""
        bits, least = (codec.bits_per_element(shape) for codec in (self, replace(self, directions=1)))
        if bits <= 2 * least:
            return ""
        return (
            f"{self} takes {bits:.1f} bits an element in messages of {tuple(shape)}, and {least:.1f} with "
            "directions=1; leave directions out, so that they follow from the width, or set fewer"
        )

    def choose(self, x: Tensor) -> int:
        """Choose the number of directions for messages like `x`, (..., C); the default if `x` is unusable."""
        rows, channels = folded(x.shape)
        directions = best_directions(x.detach().reshape(rows, channels), self.bits, self.refresh)
        if not directions:
            directions, _ = suited(rows, channels)
            log.warning("a message of %s is zeros, or has NaN or Inf: %d directions", tuple(x.shape), directions)
        return directions

    def settle(self, choice: int) -> SubspaceQuant:
        return self if self.settled else replace(self, directions=choice)

    def format_nbytes(self, shape: Sequence[int]) -> int:
        return self.geometry(shape).layout.nbytes if math.prod(shape) else 0

    def geometry(self, shape: Sequence[int]) -> SubspaceGeometry:
        """Return the sizes of a payload, and the settings that depend on the shape.

        Raises:
            ValueError: fewer channels than directions, or their number has not been chosen yet.
        """
        rows, channels = folded(shape)
        if self.directions == "auto":
            raise ValueError(
                "directions is 'auto': the number is chosen in the last step of a pipeline's warm-up, and nothing can "
                "be coded before; allowed here: an integer, such as that of SubspaceQuant.fitted(x), or None"
            )
        directions, refresh = suited(rows, channels, self.directions, self.refresh)
        if 0 < channels < directions:
            raise ValueError(
                f"directions is {directions}, and the last dimension of {tuple(shape)} is {channels}; "
                f"allowed: 1 to {channels}"
            )
        return subspace_geometry(rows, channels, directions, self.bits, self.group, refresh)

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session:
        geo = self.geometry(shape)
        memory = Memory(geo.directions, geo.channels, torch.device(device))
        return SubspaceSession(self, torch.Size(shape), dtype, torch.device(device), memory)


class SubspaceSession(BasisSession):
    """One shape's messages."""

    codec: SubspaceQuant
    _geometry: SubspaceGeometry

    def _code(self, x: Tensor, payload: Tensor, training: bool) -> None:
        memory, geo = self._memory, self._geometry
        x_RC = x.view(geo.rows, geo.channels)
        filled = memory.messages * geo.renewed >= geo.directions
        brings = not (filled and memory.messages % geo.pause)
        new, products_RK = self._renewed(x_RC, payload, training, brings=brings)
        if brings:
            self._run(invert, new.directions_KC, new.inverse_KK)
        else:
            new.inverse_KK.copy_(memory.inverse())
        c_RK, unit_K = new.inverse_KK.new_empty(geo.rows, geo.directions), new.inverse_KK.new_empty(geo.directions)
        self._run(coefficients, products_RK, new.inverse_KK, payload, c_RK, unit_K, geo)
        self._run(coefficients_encode, c_RK, unit_K, payload, c_RK, geo)
        self._run(rest_encode, x_RC, c_RK, new.directions_KC, payload, geo)
        if training:
            memory.keep(new.directions_KC, new.digest, new.inverse_KK)

    def _follow(self, payload: Tensor, out: Tensor, training: bool) -> None:
        geo = self._geometry
        directions_KC, digest, expected = self._next(payload, training)
        unit_K = directions_KC.new_empty(geo.directions)
        self._run(units, payload, unit_K, geo)
        directions_KC, unit_K = self._checked(payload, expected, directions_KC, unit_K)
        c_RK = directions_KC.new_empty(geo.rows, geo.directions)
        self._run(coefficients_decode, payload, unit_K, c_RK, geo)
        self._run(rest_decode, payload, c_RK, directions_KC, out.view(geo.rows, geo.channels), geo)
        if training:
            self._memory.keep(directions_KC, digest)

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        implementation(function, self.device)(*arguments)


SHORT_NAMES = {"subspace": SubspaceQuant, "subspace-backward": partial(SubspaceQuant, bits=4)}
