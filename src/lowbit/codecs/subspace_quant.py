"""`SubspaceQuant`: a boundary's principal directions in 8 bits, what remains in 2 to 4, both ways."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lowbit import ops
from lowbit.codecs.base import FLOATS, Codec, Key, Session, check_int
from lowbit.codecs.basis import Renewal, best_rank, gram_inverse, renew, renewed_products, units_of
from lowbit.ops.layout import ALIGNMENT, SubspaceGeometry, subspace_geometry

log = logging.getLogger(__name__)

FALLBACK = 32  # directions where there is nothing to choose them by


@dataclass(frozen=True, kw_only=True)
class SubspaceQuant(Codec):
    """Coefficients along `rank` learned directions in 8 bits, the remainder in groups of `bits`-bit integers.

    What crosses a boundary lies near a small subspace, forward and backward. With the directions V (rank x C) that both
    ends hold, a token x (C channels) is coded as

        c: the least squares of x - V' c,  c' = 8 bits of c,  x' = V' c',  y = x' + `bits` bits of (x - x').

    The remainder is taken from what the receiver computes (a closed loop): a useless basis costs precision, never
    correctness, and tokens far from the basis (massive activations) keep theirs by the remainder.

    The basis follows the tokens, because it ages: while a model trains, after eight steps one has served 5 to 20 dB
    worse than a message's own. So each message brings ceil(rank / refresh) new directions in place of those that serve
    it least: the principal directions of what the others leave of this very message, which is coded with them already.
    With `refresh` messages the whole basis can have been replaced; with refresh=1 each message brings its own. The
    payloads of a shape have one size, so that a receiver can always post its buffer. Every message carries its number
    and a digest of all directions that have ever travelled: one that is lost, repeated or out of order is an error at
    the receiver. Evaluation is coded in the same way, and what its messages bring is forgotten again.
    Nobody waits for a GPU: there such a message decodes to NaN and leaves the directions alone, and the error is raised
    by a later message, or by `state_dict()`, once the host has seen the header.

    Payload, sections at multiples of 16 bytes, for R tokens in G = ceil(C / group) groups each and M new directions:

    - header, 16 bytes: int32 number of the message, int32 digest of what came before it, int32 1 in training, int32 0;
    - slots, M int16: which directions are replaced (-1: none); lengths, M float32, and directions, M x C int8: the new
      ones are the products;
    - units, rank bfloat16: root mean square of the coefficients along each direction;
    - factors, R bfloat16: the token's largest coefficient in these units, rounded up;
    - coefficients, R rank int8: c' = q (factor / 127) unit;
    - exponents, R bytes, and steps, R G bytes: each group's step as in `TAHQuant`, in sixteenths of an octave below the
      token's largest; 255: a group of zeros, 254: one with NaN or Inf, which decodes to NaN;
    - codes: group after group in bit planes as in `GroupInt`; a token's ragged last group takes a multiple of 8
      elements. y = x' + (code - (2^bits - 1) / 2) step; a step is 2^(1 - bits) of the group's largest magnitude.

    New directions are counted in `nbytes`: with the defaults 4 C bytes a message, 0.03 bits an element if it has 1024
    tokens. Each end of each direction of a boundary keeps `state_bytes()` = 4 C rank + 16;
    a sender holds the inverse of the directions' products beside them, 4 rank^2 bytes that follow from them.

    A message needs what earlier ones left, so this codec works through sessions only (`open`), not through `encode`.
    A token whose coefficients are not finite or beyond 2^96 is coded by the remainder alone. A message with NaN, Inf or
    such magnitudes, or with none from 2^-126 on, leaves the basis as it is, and the NaN travels.

    Args:
        rank: directions, 1 to C; or "auto": a sender chooses them, at most 256, in the last step of the warm-up, by the
            spectrum of the first message that it sends there, and its choice travels with the messages of that step.
            Each tensor of each boundary and direction gets a rank of its own: 32 (or C, if that is less) where that
            message has nothing but zeros, or NaN or Inf. There must be a warm-up, and until it is over no session.
        bits: of the remainder, 2 to 8.
        group: elements of it for each step, a multiple of 8 from 8 to 65536.
        refresh: messages in which all directions can be replaced, 1 to 65536.
    """

    stateful: ClassVar[bool] = True

    rank: int | Literal["auto"] = 32
    bits: int = 2
    group: int = 64
    refresh: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.rank, str) and self.rank != "auto":
            raise ValueError(
                f"rank is {self.rank!r}; allowed: an integer from 1 to 65536, or 'auto'"
            )
        if self.settled:
            check_int("rank", self.rank, 1, 65536)
        check_int("bits", self.bits, 2, 8)
        check_int("group", self.group, 8, 65536, multiple=8)
        check_int("refresh", self.refresh, 1, 65536)

    @classmethod
    def fitted(
        cls, x: Tensor, *, bits: int = 2, group: int = 64, refresh: int = 8
    ) -> SubspaceQuant:
        """The codec whose rank suits messages like this one: least noise for the bits that directions cost.

        Both ends need the same rank: measure once, as `lowbit bench spectrum` does, and configure the result.

        Args:
            x: a typical message, (..., C): activations, or gradients.
            bits, group, refresh: as above.

        Raises:
            ValueError: nothing but zeros, NaN or Inf in x, or no element.
            TypeError: another dtype than float32, bfloat16 or float16.
        """
        if x.dtype not in FLOATS:
            raise TypeError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, FLOATS))}")
        rank = best_rank(x.detach().reshape(_folded(x.shape)), bits, refresh)
        if not rank:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and holds nothing but zeros, or NaN or Inf; allowed: finite numbers"
            )
        return cls(rank=rank, bits=bits, group=group, refresh=refresh)

    @property
    def settled(self) -> bool:
        return self.rank != "auto"

    @property
    def directions(self) -> int:
        """The rank; a ValueError where that is "auto"."""
        if isinstance(self.rank, int):
            return self.rank
        raise ValueError(
            "rank is 'auto': it is chosen in the last step of a pipeline's warm-up, and nothing can be coded "
            "before; allowed here: an integer, such as that of SubspaceQuant.fitted(x)"
        )

    def choose(self, x: Tensor) -> int:
        """The rank for messages like `x`, (..., C); the fallback (see `rank`) where `x` does not tell."""
        rows, channels = _folded(x.shape)
        rank = best_rank(x.detach().reshape(rows, channels), self.bits, self.refresh)
        if not rank:
            rank = max(1, min(FALLBACK, channels))
            log.warning(
                "a message of %s is zeros, or has NaN or Inf: rank %d", tuple(x.shape), rank
            )
        return rank

    def settle(self, choice: int) -> SubspaceQuant:
        return self if self.settled else replace(self, rank=choice)

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.geometry(shape).layout.nbytes if math.prod(shape) else 0

    def geometry(self, shape: Sequence[int]) -> SubspaceGeometry:
        """Sizes of a payload.

        Raises:
            ValueError: fewer channels than directions.
        """
        rows, channels = _folded(shape)
        rank = self.directions
        if rank > channels:
            raise ValueError(
                f"rank is {rank}, and the last dimension of {tuple(shape)} is {channels}; "
                f"allowed: 1 to {channels}"
            )
        return subspace_geometry(rows, channels, rank, self.bits, self.group, self.refresh)

    def shared_by(self, shape: Sequence[int]) -> int:
        return _folded(shape)[1]

    def open(
        self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Session:
        self.geometry(shape)
        memory = _Memory(self, _folded(shape)[1], torch.device(device))
        return SubspaceSession(self, torch.Size(shape), dtype, torch.device(device), memory)

    def _encode(self, x: Tensor, payload: Tensor) -> None:
        raise ValueError("SubspaceQuant learns from message to message: use open()")

    def _decode(self, payload: Tensor, out: Tensor, accumulate: bool) -> None:
        raise ValueError("SubspaceQuant learns from message to message: use open()")


class _Headers:
    """What arrives and what should have: compared by the host as soon as it knows, which waits for no GPU."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def compare(self, found: Tensor, expected: Tensor) -> None:
        """Take two headers; raise for those that have arrived: on the CPU these, on a GPU those before, as a rule."""
        both, event = torch.stack([found, expected]), None
        if both.is_cuda:
            host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            both, event = host.copy_(both, non_blocking=True), torch.cuda.Event()
            event.record()
        self._coming.append((both, event))
        self.check()

    def check(self, wait: bool = False) -> None:
        """Raise unless every header that has arrived is the expected one."""
        while self._coming:
            both, event = self._coming[0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            self._coming.popleft()
            found, expected = both.tolist()
            if found != expected:
                raise ValueError(
                    f"payload is {_told(found)}; this end expects {_told(expected)}: "
                    "a message was lost, repeated or changed, or came in another order"
                )

    def clear(self) -> None:
        self._coming.clear()


class _Memory:
    """What an end knows: the directions, and how they came about."""

    def __init__(self, codec: SubspaceQuant, channels: int, device: torch.device) -> None:
        self.directions = torch.zeros(codec.directions, channels, device=device)
        self.messages = 0  # of training
        self.digest = torch.zeros((), dtype=torch.int64, device=device)
        self.headers = _Headers()
        self._inverse: Tensor | None = None

    def header(self, training: bool) -> Tensor:
        """Of the next message, int32 (4,)."""
        header = torch.zeros(4, dtype=torch.int32, device=self.digest.device)
        header[0].fill_(self.messages % (1 << 31))
        header[1].copy_(self.digest)
        header[2].fill_(int(training))
        return header

    def inverse(self) -> Tensor:
        """`gram_inverse` of the directions."""
        if self._inverse is None:
            self._inverse = gram_inverse(self.directions)
        return self._inverse

    def keep(self, directions: Tensor, renewal: Renewal, inverse: Tensor | None = None) -> None:
        """A training message has passed."""
        self.directions, self._inverse = directions, inverse
        self.messages += 1
        self.digest = (self.digest * 31 + renewal.digest()) & 0x7FFFFFFF

    def forget(self) -> None:
        """The directions are other ones."""
        self._inverse = None
        self.headers.clear()


class SubspaceSession(Session):
    """One shape's messages; the basis is shared with the sessions of other shapes of the same width."""

    codec: SubspaceQuant

    def __init__(
        self,
        codec: SubspaceQuant,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        memory: _Memory,
    ) -> None:
        super().__init__(codec, shape, dtype, device)
        self._memory = memory
        self._geometry = codec.geometry(shape)

    def beside(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
        return SubspaceSession(self.codec, torch.Size(shape), dtype, self.device, self._memory)

    def encode(self, x: Tensor, *, key: Key | None = None, training: bool = True) -> Tensor:
        self._check_shape(x)
        if x.dtype not in FLOATS:
            raise TypeError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, FLOATS))}")
        payload = torch.zeros(
            self.nbytes(), dtype=torch.uint8, device=x.device
        )  # between sections, too
        if not x.numel():
            return payload
        memory, geo = self._memory, self._geometry
        x_RC = x.detach().contiguous().view(geo.rows, geo.channels)
        full_RC = x_RC.float()
        products_RK = full_RC @ memory.directions.t()
        renewal = renew(full_RC, memory.directions, geo.renewed, products_RK, memory.inverse())
        directions_KC = renewal.applied(memory.directions)
        inverse_KK = gram_inverse(directions_KC)
        c_RK = renewed_products(full_RC, products_RK, renewal, directions_KC) @ inverse_KK
        units_K = units_of(c_RK)
        self._section(payload, "header", torch.int32).copy_(memory.header(training))
        self._section(payload, "slots", torch.int16).copy_(renewal.slots_M)
        self._section(payload, "lengths", torch.float32).copy_(renewal.lengths_M)
        self._section(payload, "directions", torch.int8).copy_(renewal.codes_MC.view(-1))
        self._section(payload, "units", torch.bfloat16).copy_(units_K)
        coded_RK = torch.empty_like(c_RK)
        ops.subspace_coefficients_encode(
            c_RK, units_K.float(), payload, coded_RK, geo.channels, *self._settings
        )
        base_RC = coded_RK @ directions_KC
        ops.subspace_rest_encode(x_RC, base_RC, payload, self.codec.directions, *self._settings)
        if training:
            memory.keep(directions_KC, renewal, inverse_KK)
        return payload

    def decode(
        self,
        payload: Tensor,
        *,
        key: Key | None = None,
        out: Tensor | None = None,
        training: bool = True,
    ) -> Tensor:
        """The tensor in `payload`, in the session's shape and dtype (or in `out`); arguments as for `encode`.

        Raises:
            ValueError: another length, or not the next message of the sender that this end has followed.
        """
        if payload.shape != (self.nbytes(),) or payload.dtype != torch.uint8:
            raise ValueError(
                f"payload is {payload.dtype} {tuple(payload.shape)}; expected {self.nbytes()} bytes"
            )
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=payload.device)
        if not out.numel():
            return out
        memory, geo = self._memory, self._geometry
        payload = payload.clone() if payload.data_ptr() % ALIGNMENT else payload.contiguous()
        header, expected = self._section(payload, "header", torch.int32), memory.header(training)
        memory.headers.compare(header, expected)
        # Where the host learns it later, what does not belong here decodes to NaN and leaves the directions alone.
        wrong = (header != expected).any()
        slots_M = self._section(payload, "slots", torch.int16)
        renewal = Renewal(
            torch.where(wrong, -1, slots_M).to(torch.int16),
            self._section(payload, "lengths", torch.float32),
            self._section(payload, "directions", torch.int8).view(geo.renewed, geo.channels),
        )
        directions_KC = renewal.applied(memory.directions)
        units_K = self._section(payload, "units", torch.bfloat16).float()
        units_K = torch.where(wrong, math.nan, units_K)
        c_RK = torch.empty(geo.rows, self.codec.directions, device=payload.device)
        ops.subspace_coefficients_decode(payload, units_K, c_RK, geo.channels, *self._settings)
        base_RC = c_RK @ directions_KC
        target = out
        if not out.is_contiguous():
            target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        flat_RC = target.view(geo.rows, geo.channels)
        ops.subspace_rest_decode(
            payload, base_RC, flat_RC, self.codec.directions, *self._settings, False
        )
        if target is not out:
            out.copy_(target)
        if training:
            memory.keep(directions_KC, renewal)
        return out

    def state_bytes(self) -> int:
        return self._memory.directions.nbytes + 16

    def state_dict(self) -> dict[str, Any]:
        """The directions, float32 (rank, C); messages so far, and the digest of what they brought."""
        memory = self._memory
        memory.headers.check(wait=True)
        return {
            "directions": memory.directions.clone(),
            "messages": memory.messages,
            "digest": int(memory.digest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; an empty one changes nothing.

        Raises:
            ValueError: it is of another rank or width.
        """
        if not state:
            return
        memory = self._memory
        if unlike := {"directions", "messages", "digest"} ^ set(state):
            raise ValueError(f"state lacks or has {sorted(unlike)}; it is not one of {self.codec}")
        directions = state["directions"]
        if directions.shape != memory.directions.shape:
            (rank, channels), (own, width) = directions.shape, memory.directions.shape
            raise ValueError(
                f"state has {rank} directions of {channels} channels; this session has rank {own} "
                f"and {width} channels: allowed are the same"
            )
        memory.directions = directions.to(self.device, torch.float32, copy=True)
        memory.forget()
        memory.messages = int(state["messages"])
        memory.digest.fill_(int(state["digest"]))

    @property
    def _settings(self) -> tuple[int, int, int]:
        return self.codec.bits, self.codec.group, self.codec.refresh

    def _section(self, payload: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        return self._geometry.layout.section(payload, name, dtype)


def _told(header: list[int]) -> str:
    kind = "training" if header[2] else "evaluation"
    return f"{kind} message {header[0]} after directions {header[1]:08x}"


def _folded(shape: Sequence[int]) -> tuple[int, int]:
    """Any shape as (tokens, channels)."""
    padded = (1, 1, *shape)
    return math.prod(padded[:-1]), padded[-1]
