"""The definition of `TransformQuant`'s coding, in plain PyTorch, and the layout of its payloads.

Sessions call these functions, and kernels of the same names, directly (`lowbit.kernels.implementation`). All that both
ends must agree on is integer arithmetic. A sender may choose any scales and steps, because they are sent. Shape
suffixes: R rows (tokens), C channels, S streams, N steps of a stream's lanes, L lanes.

Logarithms are integers: of scales and norms in quarters of an octave, of steps in 64ths.

A coefficient of z steps gets the code floor(z + (dither + 1/2) / 256). Its upper part, code >> n, is a symbol, and its
lowest n bits travel as they are: n is such that its standard deviation is below 2 units of the symbol. So one table of
probabilities for each such scale, by quarters of an octave, and each class of dither is enough. Tables are identical on
every machine to the last bit: they are computed in float64 with only sums, products and quotients, in a fixed order,
because IEEE arithmetic defines their results exactly; it does not define those of a library's exponential function.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.kernels.layout import Layout, ceil_div

PRECISION = 12  # bits of a probability
TOTAL = 1 << PRECISION
SYMBOLS = 16  # 1 to 15: codes -7 to 7; 0: a code beyond them, which is sent by itself
MIDDLE = 8  # symbol of the code 0
LOWEST = -24  # scale in quarters of an octave: 2^-6 of a step
RAW = 20  # bits of a code that travel as they are, at most
HIGHEST = 4 * RAW + 3  # scale
SCALES = 4 - LOWEST  # up to 3, just below 2 steps
DEAD = SCALES  # the next class: tokens of zeros or NaN, whose code is 0
DITHERS = 16  # classes of the 256 values, finer where a small coefficient may turn the code
BORDERS = (2, 4, 8, 16, 32, 48, 80)  # between classes: distance to the nearer end of the 256
CONTEXTS = (SCALES + 1) * DITHERS
ROOT = np.float32(2**0.5)
NOISE = np.float32(1 / 12)  # of a step squared
STRIDE = 32  # of a context's row of limits: 16 limits, `TOTAL`, and padding
LANES = 32  # states that code the symbols of a stream in turn
STREAM = 1 << 16  # fewest symbols of a stream, if there are as many
STREAM_BYTES = 12 + 4 * LANES  # its entry in the table of streams, and its states
DEAD_BITS = 0.08  # fewest bits of a symbol, slightly rounded up
SLACK = 4  # bytes behind the streams, so that whole words can be read at their end
ZERO, NAN = 255, 254  # instead of a token's scale: all zeros; with NaN or Inf
FURTHEST_BELOW = 253  # quarters of an octave that a scale can lie below the largest one
ROUNDS = 2  # of fitting scales of directions and tokens to each other
NEGLIGIBLE = 2.0**-40  # share of the largest channel's mean square: smaller ones are rounding errors
FINE = 64  # steps to an octave
LEAST_STEP, MOST_STEP = -126 * FINE, 126 * FINE
OUTLYING = 8  # quarters of an octave above the median: a token of a larger norm is coded as finely as the median's
MOST_LOWERED = 32  # quarters of an octave: codes stay within `FARTHEST`
FARTHEST = 1 << 28  # magnitude of a code, at most
MOST_LEVEL = 1 << 14  # magnitude of the largest scale that a receiver takes
BEGIN = 1 << 15  # a lane's state before its first symbol; it stays below 2^31
WORD = 16  # bits that a state outputs at a time
LIMIT = 31 - PRECISION  # a state with this many bits more than a symbol's probability outputs a word first
SMALLEST = 2.0**-126
LARGEST = 2.0**112  # a token with a coefficient from here on counts as one with Inf, so that its noise stays finite
ENTRY = 3  # numbers of a stream in the table: words, codes beyond the symbols, bytes of lowest bits


@dataclass(frozen=True)
class TransformGeometry:
    """Sizes of a payload of `lowbit.codecs.TransformQuant`, derived from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token.
        directions: number of directions; renewed: number that is sent with a message.
        by_token: steps are relative to each token's norm.
        streams: of symbols; stream_rows: tokens of each but the last.
        layout: the sections.
    """

    rows: int
    channels: int
    directions: int
    renewed: int
    by_token: bool
    streams: int
    stream_rows: int
    layout: Layout

    def overhead(self) -> int:
        """Bytes of a message without symbols."""
        return self.layout.offsets["streams"] + self.streams * STREAM_BYTES + SLACK

    def least(self) -> int:
        """Bytes of a message with the largest step."""
        return self.overhead() + int(self.rows * self.channels * DEAD_BITS / 8) + 2


def suited(rows: int, channels: int, by_token: bool) -> tuple[int, int]:
    """Return the number of directions, and how many are sent with a message of this shape.

    Both ends derive them from the shape, so another rule needs another payload version. Sessions of one width share
    their directions, so their number depends on the width alone. A new direction costs 8 / rows bits an element: each
    message brings an eighth of the directions, fewer where they would take more than 1/8 bit, but always one.

    Gradients need fewer directions than activations: with 32 rather than 64, the error of all parameters' gradients was
    3 % lower on SmolLM2 and 8 % higher on Gemma 3 (warm), in two thirds of the time.
    """
    directions = min(64 if by_token else 32, max(1, channels // 4))
    return directions, max(1, min(ceil_div(directions, 8), rows // 64))


def transform_geometry(rows: int, channels: int, by_token: bool, bits: float | None, coded: float) -> TransformGeometry:
    """Sizes of the payload of `rows` tokens of `channels` elements.

    Args:
        bits: bits per element, every byte counted; None: `coded` for the symbols, plus everything else.
    """
    directions, renewed = suited(rows, channels, by_token)
    count = max(1, min(rows, rows * channels // STREAM))
    stream_rows = max(1, ceil_div(rows, count))
    streams = ceil_div(rows, stream_rows)

    def layout(size: int) -> Layout:
        return Layout.of(
            header=16,
            slots=2 * renewed,
            lengths=4 * renewed,
            directions=renewed * channels,
            scalars=16,
            levels=channels,
            tokens=rows,
            norms=rows * by_token,
            weights=ceil_div(channels, 2),
            gains=ceil_div(rows, 2) * (not by_token),
            streams=max(0, size),
        )

    before, symbols = layout(16).offsets["streams"], rows * channels
    if bits is None:
        size = int(symbols * coded / 8) + streams * STREAM_BYTES + SLACK
    else:
        size = int(symbols * bits / 8) - before
    return TransformGeometry(rows, channels, directions, renewed, by_token, streams, stream_rows, layout(size // 2 * 2))


def encode(z: Tensor, header: Tensor, payload: Tensor, geo: TransformGeometry) -> None:
    """Scalars, levels, tokens, norms and streams of coefficients z (R, C), float32; `header` chooses the dither."""
    z, header = z.cpu(), header.cpu()
    level_C, token_R, norm_R, *largest = fitted(z, geo)
    level, norm = map(int, largest)
    scale_RC = scales(level_C, token_R, level)
    dither_RC = dither(header, z.shape)
    room, step = geo.layout.sizes["streams"] - SLACK, first_step(scale_RC, token_R, geo)
    while True:
        steps_R = steps(token_R, norm_R, norm, step, geo)
        inverse_R = torch.where(steps_R > 0, steps_R, 1.0).reciprocal()  # also of NaN
        usable_RC = torch.where(token_R[:, None] < NAN, z, 0.0)
        code_RC = (usable_RC * inverse_R[:, None] + (dither_RC.float() + 0.5) / 256).floor()
        code_RC = code_RC.clamp(-FARTHEST, FARTHEST).to(torch.int32)
        context_RC, raw_RC = contexts(scale_RC, token_R, dither_RC, step)
        streams = [
            stream_of(code_RC[rows].reshape(-1), context_RC[rows].reshape(-1), raw_RC[rows].reshape(-1))
            for rows in _stream_rows(geo)
        ]
        excess = 4 * ENTRY * geo.streams + sum(len(body) for _, body in streams) - room
        if excess <= 0 or step >= MOST_STEP:
            break
        step = min(MOST_STEP, step + 1 + 8 * FINE * excess // z.numel())
    if excess > 0:
        raise AssertionError("the largest step leaves nothing but dead symbols, and the layout has room for them")
    section = geo.layout.section
    section(payload, "scalars", torch.int32).copy_(
        torch.tensor([level, norm, step, 0], dtype=torch.int32, device="cpu")
    )
    section(payload, "levels").copy_(level_C)
    section(payload, "tokens").copy_(token_R)
    if geo.by_token:
        section(payload, "norms").copy_(norm_R)
    table = torch.tensor([entry for entry, _ in streams], dtype=torch.int32, device="cpu").reshape(-1).view(torch.uint8)
    content = torch.cat([table, *(body for _, body in streams)]).to(payload.device)
    section(payload, "streams")[: len(content)] = content


def decode(payload: Tensor, header: Tensor, z: Tensor, geo: TransformGeometry) -> Tensor:
    """Write the coefficients (R, C), float32, in a payload to z.

    Returns:
        Whether the streams are whole, a boolean (); z has any numbers otherwise.
    """
    section = geo.layout.section
    level, norm, step, _ = section(payload, "scalars", torch.int32).tolist()
    step, level = min(max(step, LEAST_STEP), MOST_STEP), min(max(level, -MOST_LEVEL), MOST_LEVEL)
    token_R = section(payload, "tokens").int()
    norm_R = section(payload, "norms").int() if geo.by_token else torch.zeros_like(token_R)
    scale_RC = scales(section(payload, "levels").int(), token_R, level)
    dither_RC = dither(header, z.shape)
    context_RC, raw_RC = contexts(scale_RC, token_R, dither_RC, step)
    streams = section(payload, "streams").cpu()
    table = streams[: 4 * ENTRY * geo.streams].view(torch.int32).view(-1, ENTRY).tolist()
    code_RC, whole = torch.zeros(z.shape, dtype=torch.int32, device="cpu"), True
    at = 4 * ENTRY * geo.streams
    for entry, rows in zip(table, _stream_rows(geo), strict=True):
        size = body_nbytes(*entry)
        if min(entry) < 0 or at + size > len(streams) - SLACK:
            return torch.zeros((), dtype=torch.bool, device=z.device)
        part = [values[rows].reshape(-1).cpu() for values in (context_RC, raw_RC)]
        codes, good = codes_of(streams[at : at + size], entry, *part)
        code_RC[rows] = codes.view(-1, geo.channels)
        whole, at = whole and good, at + size
    code_RC = code_RC.to(z.device)
    number_RC = code_RC.float() + (127.5 - dither_RC.float()) / 256
    if geo.by_token:
        number_RC = drawn(number_RC, clipped(scale_RC, step))
    z.copy_(number_RC * steps(token_R, norm_R, norm, step, geo)[:, None])
    return torch.tensor(whole, device=z.device)


class Fit(NamedTuple):
    """Scales of channels (C,) and tokens (R,), and norms (R,), uint8, as they travel; the largest scale, and norm."""

    levels: Tensor
    tokens: Tensor
    norms: Tensor
    highest: Tensor
    largest: Tensor


def fitted(z: Tensor, geo: TransformGeometry, dtype: torch.dtype = torch.float64) -> Fit:
    """Fit scales of channels and tokens to coefficients, with sums in this dtype. The host does not wait for a GPU."""
    most_R = z.abs().amax(1)
    finite_R = most_R < LARGEST
    usable_R = finite_R & (most_R >= SMALLEST)
    exponent_R = torch.frexp(torch.where(usable_R, most_R, 1.0))[1] - 1
    factor_R = torch.ldexp(torch.ones_like(most_R), -exponent_R)
    a_RC = torch.where(usable_R[:, None], z * factor_R[:, None], 0.0).to(dtype).square_()
    norm_R = _quarters(a_RC.mean(1)) if geo.by_token else torch.zeros_like(exponent_R)
    if geo.by_token:
        a_RC *= torch.exp2(-0.5 * norm_R.to(dtype))[:, None]
    count = usable_R.sum().clamp(min=1)
    token_R = usable_R.to(dtype)
    for _ in range(ROUNDS + 1):
        channel_C = torch.where(token_R > 0, token_R, 1.0).clamp(min=SMALLEST).reciprocal() @ a_RC / count
        token_R = a_RC @ channel_C.clamp(min=channel_C.amax() * NEGLIGIBLE + SMALLEST).reciprocal() / geo.channels
    norm_R += 4 * exponent_R
    lowered_R = lowered(norm_R, usable_R) if geo.by_token else norm_R
    tokens_R = _quarters(token_R) + (norm_R - lowered_R if geo.by_token else 4 * exponent_R)
    levels, level = _below(_quarters(channel_C), channel_C.gt(0), 255)
    tokens, token = _below(tokens_R, usable_R, ZERO)
    norms, norm = _below(lowered_R, usable_R, FURTHEST_BELOW)
    return Fit(levels, torch.where(finite_R, tokens, NAN).byte(), norms, level + token, norm)


def _quarters(square: Tensor) -> Tensor:
    """Logarithm of the square root, in quarters of an octave."""
    return (torch.where(square > 0, square, 1.0).log2() * 2).round().int()


def _below(quarters: Tensor, valid: Tensor, otherwise: int) -> tuple[Tensor, Tensor]:
    """Distances of the valid numbers below their maximum, uint8, and the maximum."""
    most = torch.where(valid, quarters, -(1 << 20)).amax()
    most = torch.where(most > -(1 << 20), most, 0)
    return torch.where(valid, (most - quarters).clamp(max=FURTHEST_BELOW), otherwise).byte(), most


def lowered(norm_R: Tensor, usable_R: Tensor) -> Tensor:
    """The norms that steps are relative to, (R,), integers in quarters of an octave: those of sinks are lowered.

    A sink, to which every later token attends, may have 100 times the norm of the others. A usable token of more than
    4 times the median (the lower one of two) takes the median's norm, so that its error is as small as theirs. Each
    quarter of an octave costs a quarter of a bit for each element of the token. Where that is more than a quarter of a
    bit in the mean of usable tokens, all such norms are lowered by at most the largest number that is not.
    """
    count = usable_R.sum()  # stays on its device: the host does not wait for a GPU
    ordered_R = torch.where(usable_R, norm_R, 1 << 20).sort().values
    median = ordered_R.gather(0, ((count - 1) // 2).clamp(min=0)[None])
    above_R = torch.where(usable_R & (norm_R - median > OUTLYING), norm_R - median, 0)
    most = torch.arange(1, MOST_LOWERED + 1, dtype=above_R.dtype, device=norm_R.device)
    most = (torch.minimum(above_R, most[:, None]).sum(1) <= count).sum()
    return norm_R - torch.minimum(above_R, most)


def scales(level_C: Tensor, token_R: Tensor, level: int) -> Tensor:
    """Return the standard deviation that each coefficient is coded for, in quarters of an octave, (R, C)."""
    return level - level_C.int() - token_R[:, None].int()


def steps(token_R: Tensor, norm_R: Tensor, norm: int, step: int, geo: TransformGeometry) -> Tensor:
    """Each token's step, float32; 0 for tokens of zeros."""
    by_norm_R = FINE // 4 * (norm - norm_R.long()) if geo.by_token else torch.zeros_like(token_R, dtype=torch.int64)
    fine_R = (step + by_norm_R).clamp(LEAST_STEP, MOST_STEP)
    step_R = torch.ldexp(_mantissas(token_R.device)[fine_R % FINE], torch.div(fine_R, FINE, rounding_mode="floor"))
    return torch.where(token_R == ZERO, 0.0, torch.where(token_R == NAN, torch.nan, step_R)).float()


@functools.lru_cache(maxsize=8)
def _mantissas(device: torch.device) -> Tensor:
    return torch.tensor([2.0 ** (i / FINE) for i in range(FINE)], dtype=torch.float32, device=device)


def dither(header: Tensor, shape: torch.Size) -> Tensor:
    """A byte for each element, int64 (R, C): the upper one of a hash of its place and of the message's header."""
    count, device = shape.numel(), header.device
    number, before, training, own = header.long().unbind()
    seed = number * 0x9E3779B1 + before * 0x85EBCA77 + training * 0xC2B2AE3D + own * 0x27D4EB2F
    index = torch.arange(count, device=device)
    h = (index & 0xFFFFFFFF) ^ ((seed + (index >> 32) * 0x9E3779B9) & 0xFFFFFFFF)
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return ((h ^ (h >> 16)) >> 24).view(shape)


def clipped(scale_RC: Tensor, step: int) -> Tensor:
    """Scales in quarters of an octave of a step, within those that have tables."""
    return (scale_RC - ((step + FINE // 8) >> 4)).clamp(LOWEST, HIGHEST)


def drawn(middle_RC: Tensor, clipped_RC: Tensor) -> Tensor:
    """Middles of cells, in steps, drawn towards 0 to the best linear estimate, but not out of their cells."""
    share_RC = torch.from_numpy(shares()).to(middle_RC.device)[clipped_RC.long() - LOWEST]
    size_RC = middle_RC.abs()
    return torch.maximum(size_RC * share_RC, size_RC - 0.5).copysign(middle_RC)


def contexts(scale_RC: Tensor, token_R: Tensor, dither_RC: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The table that each code's symbol is coded with, and the number of its lowest bits that travel as they are."""
    clipped_RC = clipped(scale_RC, step)
    raw_RC = clipped_RC.clamp(min=0) >> 2
    class_RC = torch.where(clipped_RC >= 0, clipped_RC & 3, clipped_RC) - LOWEST
    class_RC = torch.where(token_R[:, None] >= NAN, DEAD, class_RC)
    raw_RC = torch.where(token_R[:, None] >= NAN, 0, raw_RC)
    of_dither = torch.from_numpy(dither_classes()).to(scale_RC.device)
    return class_RC * DITHERS + of_dither[dither_RC >> raw_RC], raw_RC


def first_step(scale_RC: Tensor, token_R: Tensor, geo: TransformGeometry) -> int:
    """Return the smallest step with which symbols distributed as in the tables would fit into the payload."""
    coded_RC = scale_RC[token_R < NAN]
    if not coded_RC.numel():
        return 0
    room = 8 * (geo.layout.sizes["streams"] - geo.streams * 140 - SLACK)
    low, count = int(coded_RC.amin()), torch.bincount((coded_RC - coded_RC.amin()).reshape(-1))
    cost = torch.from_numpy(costs())
    scale = low + torch.arange(len(count), device="cpu")
    for step in range(int(coded_RC.amax()) - HIGHEST, 8 * 256):
        if float((cost[(scale - step).clamp(LOWEST, HIGHEST) - LOWEST] * count).sum()) <= room:
            return max(LEAST_STEP, step * 16)
    return MOST_STEP


def _stream_rows(geo: TransformGeometry) -> list[slice]:
    return [slice(i * geo.stream_rows, (i + 1) * geo.stream_rows) for i in range(geo.streams)]


def body_nbytes(words: int, beyond: int, raw: int) -> int:
    """Bytes of a stream: its states, words, codes beyond the symbols, and lowest bits."""
    return 4 * LANES + 2 * words + 2 * beyond + raw


def stream_of(code: Tensor, context: Tensor, raw: Tensor) -> tuple[tuple[int, int, int], Tensor]:
    """Code a stream, last symbol first.

    Returns:
        Its entry in the table, and its bytes.
    """
    upper = (code >> raw).clamp(-(1 << 15), (1 << 15) - 1)
    symbol = upper + MIDDLE
    symbol = torch.where((symbol < 1) | (symbol >= SYMBOLS), 0, symbol).long()
    table = torch.from_numpy(limits().astype(np.int64))
    begin_NL, end_NL = (_lanes(table[context, symbol + i]) for i in (0, 1))
    exists_NL = _lanes(torch.ones_like(symbol)) > 0
    state_L = torch.full((LANES,), BEGIN, dtype=torch.int64, device="cpu")
    words: list[Tensor] = []
    for begin_L, end_L, exists_L in zip(begin_NL.flip(0), end_NL.flip(0), exists_NL.flip(0), strict=True):
        share_L = torch.where(exists_L, end_L - begin_L, TOTAL)
        full_L = state_L >= share_L << LIMIT
        words.append((state_L & 0xFFFF)[full_L])
        state_L = torch.where(full_L, state_L >> WORD, state_L)
        next_L = (state_L // share_L << PRECISION) + state_L % share_L + begin_L
        state_L = torch.where(exists_L, next_L, state_L)
    word = torch.cat(words[::-1]).to(torch.int16) if words else torch.zeros(0, dtype=torch.int16, device="cpu")
    beyond = upper[symbol == 0].to(torch.int16)
    packed = _packed(code, raw)
    pieces = [state_L.to(torch.int32), word, beyond, packed]
    return (len(word), len(beyond), len(packed)), torch.cat([piece.view(torch.uint8) for piece in pieces])


def codes_of(body: Tensor, entry: list[int], context: Tensor, raw: Tensor) -> tuple[Tensor, bool]:
    """Inverse of `stream_of`: the codes, int32, and whether everything there has been used, and no more."""
    count = [4 * LANES, 2 * entry[0], 2 * entry[1], entry[2]]
    state, word, beyond, packed = body.split(count)
    state_L = state.clone().view(torch.int32).long() & 0xFFFFFFFF
    word = torch.cat([word.clone().view(torch.int16).long() & 0xFFFF, torch.zeros(1, dtype=torch.int64, device="cpu")])
    table, at, symbols = torch.from_numpy(limits().astype(np.int64)), 0, []
    context_NL, exists_NL = _lanes(context), _lanes(torch.ones_like(context)) > 0
    for context_L, exists_L in zip(context_NL, exists_NL, strict=True):
        slot_L = state_L & TOTAL - 1
        row_LK = table[context_L]
        symbol_L = (row_LK[:, :SYMBOLS] <= slot_L[:, None]).sum(1) - 1
        begin_L, end_L = (row_LK.gather(1, (symbol_L + i)[:, None])[:, 0] for i in (0, 1))
        next_L = (end_L - begin_L) * (state_L >> PRECISION) + slot_L - begin_L
        empty_L = exists_L & (next_L < BEGIN)
        place_L = (at + empty_L.cumsum(0) - 1).clamp(0, len(word) - 1)
        next_L = torch.where(empty_L, next_L << WORD | word[place_L], next_L)
        state_L = torch.where(exists_L, next_L, state_L)
        symbols.append(symbol_L[exists_L])
        at += int(empty_L.sum())
    symbol = torch.cat(symbols)
    upper, escaped = symbol - MIDDLE, symbol == 0
    few = min(int(escaped.sum()), entry[1])
    value = torch.zeros(int(escaped.sum()), dtype=torch.int64, device="cpu")
    value[:few] = beyond.clone().view(torch.int16)[:few].long()
    upper[escaped] = value
    low, used = _unpacked(packed, raw)
    whole = at == entry[0] and int(escaped.sum()) == entry[1] and used == entry[2]
    return (upper << raw | low).to(torch.int32), whole and bool((state_L == BEGIN).all())


def _lanes(values: Tensor) -> Tensor:
    """Arrange values in steps of lanes, (N, L); the last step is padded with zeros."""
    values = values.long()
    return torch.cat([values, values.new_zeros(-len(values) % LANES)]).view(-1, LANES)


def _packed(code: Tensor, raw: Tensor) -> Tensor:
    """The lowest bits of codes, one after the other, in an even number of bytes, uint8."""
    taken = torch.arange(RAW, device="cpu") < raw[:, None]
    bit = ((code[:, None].long() >> torch.arange(RAW, device="cpu")) & 1)[taken]
    bit = torch.cat([bit, bit.new_zeros(-len(bit) % 16)]).view(-1, 8)
    return (bit << torch.arange(8, device="cpu")).sum(1).to(torch.uint8)


def _unpacked(packed: Tensor, raw: Tensor) -> tuple[Tensor, int]:
    """Inverse of `_packed`: the lowest bits as integers, and the bytes that they take."""
    taken = torch.arange(RAW, device="cpu") < raw[:, None]
    count = int(raw.sum())
    bit = (packed[:, None].long() >> torch.arange(8, device="cpu") & 1).reshape(-1)
    bit = torch.cat([bit, bit.new_zeros(max(0, count - len(bit)))])[:count]
    low = torch.zeros(taken.shape, dtype=torch.int64, device="cpu")
    low[taken] = bit
    return (low << torch.arange(RAW, device="cpu")).sum(1), -(-count // 16) * 2


@functools.cache
def limits() -> NDArray[np.uint16]:
    """Cumulative probabilities, (CONTEXTS, STRIDE): of symbol s, from [s] to [s + 1]."""
    quarters = np.arange(LOWEST, LOWEST + SCALES)
    roots = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
    scale = roots[quarters & 3] * np.ldexp(1.0, quarters >> 2)
    edge = np.arange(-7, 9, dtype=np.float64)  # lower ends of the codes -7 to 8
    shift = (np.arange(256) + 0.5) / 256
    below = _logistic((edge - shift[:, None]) / scale[:, None, None])  # SCALES, 256, 16
    inside = below[..., 1:] - below[..., :-1]
    # Means of each class, whose sums are in order.
    inside = [sum(np.moveaxis(inside[:, dither_classes() == d], 1, 0)) for d in range(DITHERS)]
    inside = np.stack(inside, 1) / np.bincount(dither_classes())[:, None]
    probability = np.concatenate([1 - inside.sum(-1, keepdims=True), inside], -1)
    dead = np.zeros((1, DITHERS, SYMBOLS))
    dead[..., MIDDLE] = 1
    probability = np.concatenate([probability, dead]).reshape(CONTEXTS, SYMBOLS)
    count = np.maximum(np.floor(probability * (TOTAL - SYMBOLS) + 0.5), 1).astype(np.int64)
    rows = np.arange(CONTEXTS)
    count[rows, count.argmax(1)] += TOTAL - count.sum(1)
    table = np.zeros((CONTEXTS, STRIDE), np.uint16)
    table[:, 1 : SYMBOLS + 1] = count.cumsum(1)
    table[:, SYMBOLS + 1 :] = 0xFFFF
    return table


@functools.cache
def dither_classes() -> NDArray[np.int64]:
    """The class of each value of dither, (256,)."""
    value = np.arange(256)
    near = np.searchsorted(np.array(BORDERS), np.minimum(value, 255 - value), side="right")
    return np.where(value < 128, near, DITHERS - 1 - near)


@functools.cache
def costs() -> NDArray[np.float64]:
    """Mean bits of a code by scale from `LOWEST` to `HIGHEST`, if scales are right: an estimate, for a sender alone."""
    count = np.diff(limits()[:, : SYMBOLS + 1].astype(np.float64), axis=1)
    share = np.where(count > 1, count, 0) / np.where(count > 1, count, 0).sum(1, keepdims=True)
    bits = -(share * np.log2(count / TOTAL)).sum(1).reshape(SCALES + 1, DITHERS)
    width = np.bincount(dither_classes(), minlength=DITHERS) / 256
    scale = np.arange(LOWEST, HIGHEST + 1)
    return (bits * width).sum(1)[np.where(scale >= 0, scale & 3, scale) - LOWEST] + (scale.clip(0) >> 2)


@functools.cache
def symbol_costs() -> NDArray[np.float64]:
    """Bits of each symbol of each table, without the lowest bits, (CONTEXTS, SYMBOLS)."""
    bits = PRECISION - np.log2(np.diff(limits()[:, : SYMBOLS + 1].astype(np.float64), axis=1))
    bits[:, 0] += 16
    return bits


@functools.cache
def shares() -> NDArray[np.float32]:
    """Return the share of a cell's middle in the best linear estimate, by scale from `LOWEST` to `HIGHEST`.

    The error of a middle has the variance `NOISE`. Every operation is float32, with an exactly defined result.
    """
    scale = np.arange(LOWEST, HIGHEST + 1)
    square = np.ldexp(np.where(scale & 1, ROOT, np.float32(1)), scale >> 1)
    return (square / (square + NOISE)).astype(np.float32)


def _logistic(t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logistic distribution function of variance 1 at t: its tails lie between the normal's and Laplace's."""
    small = np.minimum(np.maximum(t * -1.8137993642342178, -64.0), 64.0) * 2.0**-9
    power = np.ones_like(t)
    for n in range(12, 0, -1):  # series of the exponential at a small argument; the result is squared nine times
        power = 1 + power * small / n
    for _ in range(9):
        power = power * power
    return 1 / (1 + power)
