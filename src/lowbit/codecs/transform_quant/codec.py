"""`TransformQuant`: tokens in a basis that both ends hold, one uniform step with dither, entropy-coded to a rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lowbit.codecs.base import Session, StatefulCodec
from lowbit.codecs.cast.codec import Cast
from lowbit.codecs.transform_quant.basis import Basis, Transform, follow, renew
from lowbit.codecs.transform_quant.memory import BAD_STREAMS, ONE, SEEN, Memory, factors, packed, sampled, sinks
from lowbit.codecs.transform_quant.reference import TransformGeometry, decode, encode, transform_geometry
from lowbit.escape import shown
from lowbit.kernels import apart, implementation
from lowbit.kernels.layout import ALIGNMENT

MOST = 16.0  # bits
CODED = {"token": 3.0, "message": 1.85}  # bits of an element for symbols, where no rate is set, by `step`


@dataclass(frozen=True, kw_only=True)
class TransformQuant(StatefulCodec):
    """Send tokens as entropy-coded coefficients in a basis that both ends hold, at a set rate, both ways.

    This is transform coding, as in image codecs. Tensors at a boundary lie near a small subspace. An orthonormal
    transform H, whose first coordinates are K directions that both ends hold, packs most of a token x (C channels) into
    few coefficients. They are quantized with one uniform step and subtractive dither u in [0, 1), from a hash that both
    ends compute, and the integers are coded by rANS with probabilities that follow from a scale of each coordinate and
    one of each token:

        z = x H,  q = floor(z / step + u),  z' = (q + 1/2 - u) step,  y = z' H'.

    With step="message", the error y - x has variance step^2 / 12 in every direction, and is unbiased and independent of
    x, even where x is smaller than a step: on average, training still learns from small signals. With step="token", the
    receiver shrinks z' towards 0, by the factor of the best linear estimate for the scales of coordinate and token
    (`reference.shares`), but not out of its cell. This leaves little error in places without signal. Activations
    tolerate this bias, but gradients do not: with it, training was far worse. Coordinates get bits according to their
    energy automatically. A useless basis costs accuracy at the same rate, never correctness. A message uses the
    smallest step that fits its bytes, so that payloads of a shape have one size and a receiver can always post its
    buffer.

    Pretrained models have sinks: tokens, mostly the first, to which every later token attends and whose norm may be 100
    times that of others. With step="token", one of more than 4 times the median norm gets the step of the median, so
    that its error is as small as that of others (tokens of zeros do not count). Halving its error costs one bit per
    element, and the factor is at most 256. If that would take more than 1/4 bit per element of the message, such steps
    stay larger.

    Models are much more sensitive to errors in some channels than in others: in Gemma 3 the roots of channels'
    mean-square gradients span 6 to 9 octaves. A sender of activations receives their gradients. With step="token" it
    multiplies tokens by the roots of a running mean of the gradients' squares, rounded to half octaves, before coding,
    and the receiver divides (`weights`). With step="message" the roles are swapped: a sender of gradients holds the
    activations that it received, and multiplies channels by the fourth roots of their mean squares. It codes a sink's
    gradient more finely, by the ratio of the sink's norm to the median, within the same 1/4 bit: layers that make sinks
    multiply an error there by 100. Channel weights change between training steps (`LowBitStage`, `emulate_`), and are
    part of a sender's state. Without observations they are 1, but activations whose channels differ very much, as in
    Gemma 3, are then weighted by their own mean squares.

    Each message brings new directions that replace the least useful ones: an eighth of K = C / 4 (at most 64, or 32
    with step="message"), or fewer if they would take more than 1/8 bit. They are the principal directions of what the
    others leave of this message, and are already used to code it. In evaluation, they are then discarded. A message
    with NaN, Inf or magnitudes above 2^96, or with none of at least 2^-126, does not change the basis.

    Every training message carries its number, a digest of the directions of all messages before it, and one of its own.
    If one is lost, repeated or out of order, if its directions changed on the way, or if its streams do not end exactly
    as expected, the receiver raises an error, and its state and `out` do not change. Messages of evaluation have the
    number of the next training message: nothing here tells two of them apart. Other changed bytes spoil tokens of this
    message alone, unnoticed: the transport must protect them. On a GPU the host does not wait: a wrong message decodes
    to NaN and does not change the directions, and a later message or `state_dict()` raises the error, once the host has
    read the header.

    Payload, sections at multiples of 16 bytes, for R tokens and M new directions:

    - header, 4 int32: number of training messages before this one, modulo 2^31; digest of their directions; 1 in
      training, 0 in evaluation; digest of this message's directions; digests have 31 bits; the words choose the dither;
    - slots, M int16: which directions are replaced, each once (-1: none); lengths, M float32, and directions, M x C
      int8: the new ones are the products;
    - scalars, 4 int32: the largest sum of a coordinate's and a token's scale, the largest norm, both in quarters of an
      octave, the step in 64ths of an octave, and 0;
    - levels, C bytes, and tokens, R bytes: scales of coordinates and tokens, in quarters of an octave below the
      largest; a token of zeros has 255, one with NaN, Inf or coefficients beyond 2^112 has 254 and decodes to NaN; one
      of less than 2^-63 of the largest gets noise as if it were larger;
    - norms, R bytes, likewise, with step="token";
    - weights, C / 2 bytes: levels of 4 bits, 8 for the weight 1, in half octaves;
    - gains, R / 2 bytes, with step="message": weights of tokens, likewise, 0 for the weight 1;
    - streams of about 2^16 symbols, after a table of three int32 for each: 32 states of rANS, which take the symbols in
      turn, 4 bytes each; words of 16 bits; codes beyond the 15 symbols, int16; the lowest bits of codes whose scale is
      2 steps or more.

    Each end of each direction of a boundary keeps `state_bytes()` = 4 C K + 16, about 22 C bytes for weights, and a
    sender 4 K^2 more. While it runs, `encode` takes about 14 R C bytes in addition to its payload, and `decode` 4 R C.
    Messages depend on earlier ones, so this codec works through sessions only (`open`), not through `encode`.

    Args:
        bits: bits per element, every byte counted, above 0 and at most 16. None: 3 for the symbols with step="token",
            or 1.85 with step="message", plus scales and directions; if these take more than 16, as with one token or
            one channel, a tensor is sent as it is. A number that is too low for a tensor is an error, except after
            larger tensors of the same width: a last, smaller batch is sent as it is. `RateGoal` chooses a
            number from data.
        step: "token": the error of each token is relative to its norm, or for sinks to the median norm, which suits
            activations; "message": it is the same for all, which suits gradients.
    """

    payload_version: ClassVar[int] = 5
    # Products of integers and a length, rounded once, are the same at both ends. A digest stands for the messages that
    # made the directions, not for those that a checkpoint holds.
    compared: ClassVar[tuple[str, ...]] = ("directions", "messages", "digest")

    bits: float | None = None
    step: Literal["token", "message"] = "token"

    def __post_init__(self) -> None:
        if self.bits == "auto":
            raise ValueError("bits is 'auto'; allowed: None or a number, which RateGoal and `lowbit train` can choose")
        if self.bits is not None:
            object.__setattr__(self, "bits", check_above_0("bits", self.bits, MOST))
        if self.step not in CODED:
            raise ValueError(f"step is {shown(self.step)}; allowed: 'token', 'message'")

    def __repr__(self) -> str:
        """Show the settings, except a rate that depends on the shape."""
        bits = "" if self.bits is None else f"bits={self.bits!r}, "
        return f"{type(self).__name__}({bits}step={self.step!r})"

    def for_gradients(self) -> "TransformQuant":
        """Return the format with one step for all tokens and the same rate, or about a bit less if none is set."""
        return replace(self, step="message")

    def shared_by(self, shape: Sequence[int]) -> int:
        return folded(shape)[1]

    def format_nbytes(self, shape: Sequence[int]) -> int:
        geo, numel = self.geometry(shape), math.prod(shape)
        if self.bits is None and geo.overhead() > 2 * numel:
            return 4 * numel + 1  # more than plain numbers, so that plain numbers are sent
        return geo.layout.nbytes if numel else 0

    def geometry(self, shape: Sequence[int]) -> TransformGeometry:
        """Compute the sizes of a payload.

        Raises:
            ValueError: the rate is too low for directions, scales and empty streams.
        """
        geo = self._geometry(shape)
        if not self._has_room(geo):
            assert self.bits is not None
            raise ValueError(
                f"bits is {self.bits:g}, which is {int(self.bits * math.prod(shape) / 8)} bytes for messages of "
                f"{tuple(shape)}; allowed: at least {math.ceil(800 * geo.least() / math.prod(shape)) / 100:.2f}, for "
                "their directions, scales and streams"
            )
        return geo

    def reaches(self, shape: Sequence[int]) -> bool:
        """Whether the set rate is high enough for messages of this shape: few tokens take more for what they share."""
        return self._has_room(self._geometry(shape))

    def _has_room(self, geo: TransformGeometry) -> bool:
        return self.bits is None or not geo.rows * geo.channels or geo.layout.nbytes >= geo.least()

    def _geometry(self, shape: Sequence[int]) -> TransformGeometry:
        rows, channels = folded(shape)
        return transform_geometry(rows, channels, self.step == "token", self.bits, CODED[self.step])

    def open(self, *, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Session:
        geo = self.geometry(shape)
        memory = Memory(geo.directions, geo.channels, torch.device(device), root=2 if geo.by_token else 4)
        return TransformSession(self, torch.Size(shape), dtype, torch.device(device), memory)


class TransformSession(Session):
    """Session for one shape; its state is shared with sessions of other shapes of the same width."""

    codec: TransformQuant

    def __init__(
        self, codec: TransformQuant, shape: torch.Size, dtype: torch.dtype, device: torch.device, memory: Memory
    ) -> None:
        super().__init__(codec, shape, dtype, device)
        self._memory, self._geometry = memory, codec.geometry(shape)
        # Compiled code would free tensors whose addresses kernels use. (Decorators would import the compiler at once.)
        disable = torch.compiler.disable
        vars(self).update(encode=disable(self.encode), decode=disable(self.decode), observe=disable(self.observe))

    def sharing_state(self, *, shape: Sequence[int], dtype: torch.dtype) -> Session:
        """Return a session for another shape, which sends tensors as they are if the set rate is too low for it.

        Unlike the first shape, it may be that of a last, smaller batch, which nobody can set a rate for.
        """
        if not self.codec.reaches(shape):
            return Cast(dtype=dtype).open(shape=shape, dtype=dtype, device=self.device)
        return TransformSession(self.codec, torch.Size(shape), dtype, self.device, self._memory)

    def observe(self, x: Tensor) -> Tensor | None:
        geo = self._geometry
        if self._plain or not x.numel():
            return None
        x_RC = x.detach().reshape(geo.rows, geo.channels)
        if geo.by_token:
            self._memory.observe(x_RC[sampled(geo.rows, SEEN, x_RC.device)])
            return None
        gains_R, relative_RC = sinks(x_RC)
        self._memory.observe(relative_RC)
        return gains_R

    def end_step(self) -> None:
        self._memory.end_step()

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        memory, geo, device = self._memory, self._geometry, self._memory.directions.device
        if x.device != device:
            raise ValueError(f"x is on {x.device}; this session is for {device}")
        own = payload.is_contiguous() and payload.data_ptr() % ALIGNMENT == 0
        target = payload if own else payload.new_empty(payload.shape)
        target.zero_()  # also between sections
        with apart(device):
            x_RC = x.contiguous().view(geo.rows, geo.channels).float()
            weights, factor_C = memory.weights(x_RC, own=geo.by_token)
            geo.layout.section(target, "weights").copy_(weights)
            if factor_C is not None:
                x_RC = x_RC * factor_C
            if self._note is not None:
                gains = geo.layout.section(target, "gains").copy_(packed(self._note, 0))
                if (factor_R := factors(gains, geo.rows, 0, inverse=False)) is not None:
                    x_RC = x_RC * factor_R[:, None]
            basis = Basis(memory.directions, memory.transform().inverse(), memory.digest)
            new = Basis(*map(torch.empty_like, basis))
            products_RK = implementation(renew, self.device)(x_RC, basis, target, new, memory.messages, training, geo)
            transform = self._transform(target, new.directions_KC)
            header = geo.layout.section(target, "header", torch.int32)
            own_RC = None if x_RC.data_ptr() == x.data_ptr() else x_RC  # may be overwritten
            implementation(encode, self.device)(transform.coefficients(x_RC, products_RK, own_RC), header, target, geo)
            if training:
                memory.keep(new.directions_KC, new.digest, transform)
            if target is not payload:
                payload.copy_(target)

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        memory, geo, device = self._memory, self._geometry, self._memory.directions.device
        if payload.device != device:
            raise ValueError(f"payload is on {payload.device}; expected {device}")
        payload = payload.clone() if payload.data_ptr() % ALIGNMENT else payload.contiguous()
        target = out.detach().contiguous()
        with apart(device):
            directions_KC, digest = map(torch.empty_like, (memory.directions, memory.digest))
            expected = torch.empty(4, dtype=torch.int32, device=payload.device)
            implementation(follow, self.device)(
                payload, memory.directions, memory.digest, expected, directions_KC, digest, memory.messages, training,
                geo,
            )  # fmt: skip
            z_RC = directions_KC.new_empty(geo.rows, geo.channels)
            header = geo.layout.section(payload, "header", torch.int32)
            whole = implementation(decode, self.device)(payload, header, z_RC, geo)
            if whole.is_cuda or not whole:
                expected[3] = torch.where(whole, expected[3], BAD_STREAMS)
            if not memory.headers.compare(header, expected):
                # The host learns the outcome later: a wrong message decodes to NaN and does not change the directions.
                wrong = ((header != expected) | (expected < 0)).any()
                directions_KC = torch.where(wrong, memory.directions, directions_KC)
                z_RC = torch.where(wrong, math.nan, z_RC)
            gains, levels = (geo.layout.section(payload, name) for name in ("gains", "weights"))
            if len(gains) and (factor_R := factors(gains, geo.rows, 0, inverse=True)) is not None:
                z_RC *= factor_R[:, None]
            factor_C = factors(levels, geo.channels, ONE, inverse=True)
            transform = self._transform(payload, directions_KC)
            transform.tokens(z_RC, target.view(geo.rows, geo.channels), factor_C)
            if training:
                memory.keep(directions_KC, digest, transform)
            if target.data_ptr() != out.data_ptr():
                out.copy_(target)

    def _transform(self, payload: Tensor, directions_KC: Tensor) -> Transform:
        """Return the transform of the directions that a payload's new ones lead to."""
        slots = self._geometry.layout.section(payload, "slots", torch.int16)
        return implementation(Transform, self.device)(directions_KC, self._memory.transform(), slots)

    def state_bytes(self) -> int:
        return self._memory.directions.nbytes + 16

    def state_dict(self) -> dict[str, Any]:
        return self._memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._memory.load_state_dict(state, self.codec)


def folded(shape: Sequence[int]) -> tuple[int, int]:
    """Fold any shape to (tokens, channels)."""
    padded = (1, 1, *shape)
    return math.prod(padded[:-1]), padded[-1]


def check_above_0(name: str, value: object, most: float) -> float:
    """Return a setting as a float; ValueError unless it is a number above 0 and at most `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(f"{name} is {shown(value)}; allowed: a number above 0, at most {most:g}")
    return float(value)


SHORT_NAMES = {"transform": TransformQuant, "transform-backward": partial(TransformQuant, step="message")}
