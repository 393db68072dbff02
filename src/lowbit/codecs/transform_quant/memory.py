"""The state of one end of a `TransformQuant` boundary, with its weights; and the check that a message is the next one.

Weights of channels and tokens put the error where, judged by the other direction's tensor, it costs little. An error of
activations costs loss in proportion to their gradients, and an error of gradients makes the gradients of parameters
wrong in proportion to the activations. Each sender holds both tensors. It multiplies a tensor by weights before coding
it, and the receiver divides:

- activations: each channel by the root of its mean-square gradient;
- gradients: each channel by the fourth root of the mean square of activations, each token relative to its norm; and
  each token whose activations are a sink by how far their norm lies above the median.

The fourth root was measured: the error of all parameters' gradients is less than with the root or without weights on
three pretrained models together (docs/results/codecs.md). Weights travel with each message, in steps of half an octave,
4 bits each, so that a receiver needs no statistics. Until something has been observed, all are 1, with one exception:
if the channels of activations differ very much, as in Gemma 3, the layers that read them compensate, and are least
sensitive to errors in the largest. Without gradients, weights are then channels' own root mean squares to the power
-3/4 (in Gemma 3 the logarithms spread by 1.2 to 1.6 octaves, and gradients fall by 0.6 to 1 octave for each).

Shape suffixes: R rows (tokens), C channels.
"""

import functools
from collections import deque
from typing import Any

import torch
from torch import Tensor

from lowbit.codecs.transform_quant.basis import Transform
from lowbit.codecs.transform_quant.reference import lowered
from lowbit.kernels import implementation

BAD_STREAMS = -2  # instead of the digest of new directions: the message's coded symbols are damaged
GRAIN = 2  # weights to an octave
ONE = 8  # level of the weight 1 of a channel; levels are 0 to 15
KEPT = 0.9  # share of the running mean squares that is kept when those of another step are added
ZEROS = 2.0**-60  # least mean square of a channel, relative to their mean
SEEN = 256  # tokens of a message, at most, that mean squares are computed from
OWN_ROOT = -8 / 3  # of a message's own mean squares: their weights are these to the power -3/8
OWN_SPREAD = 1.0  # octaves: own weights are taken where the spread of channels' root mean squares is larger
OWN_TOKENS = 8  # with fewer, mean squares of channels are too uncertain
OWN_SEEN = 64  # tokens of a message, at most, that the spread and the weights are computed from
FELT = "felt"


class Headers:
    """Received and expected headers, compared by the host once they have arrived, without waiting for a GPU."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def compare(self, received: Tensor, expected: Tensor) -> bool:
        """Add two headers, check those that have arrived (on a GPU usually earlier ones); return whether these had."""
        both, event = torch.stack([received, expected]), None
        if both.is_cuda:
            host = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
            both, event = host.copy_(both, non_blocking=True), torch.cuda.Event()
            event.record()
        self._coming.append((both, event))
        self.check()
        return not self._coming

    def check(self, wait: bool = False) -> None:
        """Raise unless every header that has arrived is the expected one."""
        while self._coming:
            both, event = self._coming[0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            self._coming.popleft()
            received, expected = both.tolist()
            # Negative: invalid directions, which the sender's own header may announce as well.
            if received != expected or min(expected) < 0:
                raise ValueError(
                    f"payload is {_described(received)}; this end expects {_described(expected)}: "
                    "a message was lost, repeated or changed, or came in another order"
                )


class Memory:
    """One end's directions, the number and digest of the messages that brought them, and a sender's statistics.

    Args:
        root: which root of the mean squares of the other direction's tensors weights are: 2 for activations, 4 for
            gradients.

    Attributes:
        felt: float64 (C,), running mean squares; zeros if nothing was observed.
        levels: uint8 (C,), of the weights of the next messages.
        packed: the levels as sent; factors: the weights, or None if the host knows that all are 1.
        warm: whether the host knows that something was observed.
    """

    def __init__(self, directions: int, channels: int, device: torch.device, root: int) -> None:
        self._shape, self._device, self._root = (directions, channels), device, root
        self._reset()

    def _reset(self) -> None:
        """Return to the state before the first message."""
        digest = torch.zeros((), dtype=torch.int64, device=self._device)
        self._restore(torch.zeros(self._shape, dtype=torch.float32, device=self._device), 0, digest)
        self._feel(torch.zeros(self._shape[1], dtype=torch.float64, device=self._device))

    def _restore(self, directions: Tensor, messages: int, digest: Tensor) -> None:
        """Set the state after `messages` training messages; the digest is int64 ()."""
        self.directions, self.messages, self.digest = directions, messages, digest
        self._transform: Transform | None = None
        self.headers = Headers()

    def transform(self) -> Transform:
        """The transform of the directions; call it inside `apart`."""
        transform = self._transform or implementation(Transform, self.directions.device)(self.directions)
        self._transform = transform
        return transform

    def keep(self, directions: Tensor, digest: Tensor, transform: Transform) -> None:
        """Store the state after a training message."""
        for old in (self.directions, self.digest):
            if old.is_cuda:
                # This stream may still read memory of another stream, whose allocator could reuse it.
                old.record_stream(torch.cuda.current_stream())
        self.directions, self.digest, self._transform = directions, digest, transform
        self.messages += 1

    def state_dict(self) -> dict[str, Any]:
        """Return directions, float32 (K, C), number of messages, digest of their directions, and mean squares."""
        self.end_step()  # as the next pass would
        self.headers.check(wait=True)
        felt = {FELT: self.felt.clone()} if self.felt.any() else {}
        return {"directions": self.directions.clone(), "messages": self.messages, "digest": int(self.digest)} | felt

    def load_state_dict(self, state: dict[str, Any], codec: object) -> None:
        """Restore the result of `state_dict`; an empty one is the state before the first message.

        Raises:
            ValueError: it has another number of directions or another width, or no state of a `TransformQuant`. That of
                another `step` is accepted where these agree.
        """
        felt = state.get(FELT, torch.zeros(self._shape[1], dtype=torch.float64, device=self._device))
        if not isinstance(felt, Tensor) or felt.shape != self._shape[1:] or felt.dtype != torch.float64:
            raise ValueError(f"state has {FELT} of a wrong type or shape; allowed: float64 {self._shape[1:]}")
        if not (felt.isfinite() & (felt >= 0)).all():
            raise ValueError(f"state has {FELT} with NaN, Inf or negative numbers; allowed: mean squares")
        if not state.keys() - {FELT}:
            self._reset()
        else:
            if unlike := {"directions", "messages", "digest"} ^ (state.keys() - {FELT}):
                raise ValueError(f"state lacks or has {sorted(unlike)}; it is not a state of {codec}")
            directions, counts = state["directions"], (state["messages"], state["digest"])
            if not isinstance(directions, Tensor) or any(type(count) is not int for count in counts):
                raise ValueError(
                    "state has directions, messages or digest of a wrong type; allowed: a tensor and two integers"
                )
            if not directions.isfinite().all():
                raise ValueError("state has directions with NaN or Inf; allowed: finite ones")
            if directions.shape != self._shape:
                raise ValueError(
                    f"state has directions of shape {tuple(directions.shape)}; "
                    f"expected (directions, channels) = {self._shape}"
                )
            digest = torch.full((), state["digest"], dtype=torch.int64, device=self._device)
            directions = directions.to(self._device, torch.float32, copy=True).contiguous()  # kernels read rows
            self._restore(directions, state["messages"], digest)
        self._feel(felt.to(self._device, copy=True))

    def observe(self, x_RC: Tensor) -> None:
        """Add a tensor of the other direction to the mean squares; one with NaN or Inf is ignored."""
        square_C = x_RC.double().square().sum(0)
        # Not in place: evaluation in inference mode may have made the sum.
        self._squares = self._squares + torch.where(square_C.isfinite().all(), square_C, 0.0)

    def end_step(self) -> None:
        """Let the weights of the next messages follow what was observed since the last call."""
        mean, before = self._squares.mean(), self.felt.sum() > 0
        now_C = self._squares / torch.where(mean > 0, mean, 1.0)
        followed_C = torch.where(before, KEPT * self.felt + (1 - KEPT) * now_C, now_C)
        self._feel(torch.where(mean > 0, followed_C, self.felt))

    def _feel(self, felt: Tensor) -> None:
        self.felt, self._squares = felt, torch.zeros_like(felt)
        self.levels = levels_of(felt, self._root)
        self.packed = packed(self.levels, ONE)
        self.factors = factors(self.packed, len(felt), ONE, inverse=False)
        self.warm = not felt.is_cuda and bool(felt.any())

    def weights(self, x_RC: Tensor, *, own: bool) -> tuple[Tensor, Tensor | None]:
        """Return `packed` and `factors` for a message; with `own`, from the message itself until gradients come."""
        if self.warm or not own or len(x_RC) < OWN_TOKENS:
            return self.packed, self.factors
        square_C, differ = implementation(own_squares, x_RC.device)(x_RC)
        if not x_RC.is_cuda and not differ:
            return self.packed, self.factors
        levels = torch.where(differ & ~self.felt.any(), levels_of(square_C, OWN_ROOT), self.levels)
        chosen = packed(levels, ONE)
        return chosen, factors(chosen, len(levels), ONE, inverse=False)


def _described(header: list[int]) -> str:
    number, before, training, own = header
    kind = {0: "evaluation", 1: "training"}.get(training, f"unknown ({training})")
    new = f"new ones {own:08x}" if own >= 0 else "new ones beyond the basis or twice in one place"
    new = "streams that end as expected" if own == BAD_STREAMS else new
    return f"{kind} message {number} after directions {before:08x} with {new}"


def own_squares(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return channels' mean squares relative to tokens' norms, float64 (C,), and whether they differ enough to be used.

    They never do in messages with NaN or Inf, or with fewer than `OWN_TOKENS` tokens other than zeros.
    """
    some_RC = x_RC[sampled(len(x_RC), OWN_SEEN, x_RC.device)]
    norm_R = torch.linalg.vector_norm(some_RC, dim=1)
    square_C = (some_RC / norm_R.clamp(min=torch.finfo(norm_R.dtype).tiny)[:, None]).square().mean(0).double()
    # Channels of zeros count as the median.
    spread = torch.where(square_C > ZEROS, square_C, square_C.median()).log2().std(correction=0) / 2
    return square_C, (spread > OWN_SPREAD) & ((norm_R > 0).sum() >= OWN_TOKENS)


def levels_of(felt_C: Tensor, root: float) -> Tensor:
    """Levels of channels' weights, uint8: roots of mean squares, relative to their median; 1 where all are zeros."""
    octaves_C = torch.where(felt_C.sum() > 0, felt_C, 1.0).clamp(min=ZEROS).log2() / root
    steps_C = (GRAIN * (octaves_C - octaves_C.median())).round()
    return (steps_C.clamp(-ONE, 15 - ONE) + ONE).to(torch.uint8)


def sinks(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """How much finer than others the gradients of tokens are coded, and the tokens relative to their norms.

    Returns:
        uint8 (R,): the half octaves, at most 15, that a sink's norm lies above the median, by the rule of `lowered`; 0
        for other tokens. And float32 (at most `SEEN` rows, C), for `Memory.observe`.
    """
    norm_R = torch.linalg.vector_norm(x_RC, dim=1, dtype=torch.float32)
    usable_R = (norm_R > 0) & (norm_R < torch.inf)
    norm_R = torch.where(usable_R, norm_R, 1.0)
    quarters_R = (4 * norm_R.log2()).round().int()
    above_R = quarters_R - lowered(quarters_R, usable_R)
    some = sampled(len(x_RC), SEEN, x_RC.device)
    relative_RC = torch.where(usable_R[some, None], x_RC[some].float() / norm_R[some, None], 0.0)
    return (above_R // 2).clamp(max=15).to(torch.uint8), relative_RC


@functools.lru_cache(maxsize=64)
def sampled(rows: int, most: int, device: torch.device) -> Tensor:
    """Choose tokens to compute mean squares from, int64: all, or one of each run, at a hashed place in it.

    A regular stride would hit the same places of every sequence, such as only the first tokens.
    """
    run = -(-rows // most)
    begin = torch.arange(0, rows, max(1, run), device="cpu")
    place = begin + ((begin * 0x9E3779B1 & 0xFFFFFFFF) >> 16) % max(1, run)
    return place.clamp(max=rows - 1).to(device)


def packed(levels: Tensor, filler: int) -> Tensor:
    """Pack levels two to a byte, the first in the lower half; `filler` follows an odd number."""
    even_2 = torch.cat([levels, levels.new_full((len(levels) % 2,), filler)]).view(-1, 2)
    return even_2[:, 0] | even_2[:, 1] << 4


def factors(packed: Tensor, count: int, one: int, *, inverse: bool) -> Tensor | None:
    """Return the factors before coding, or after with `inverse`, float32 (count,); `one`: the level of the weight 1.

    None if all weights are 1; never None on a GPU, because the host would have to wait for it.
    """
    if packed.is_cuda:
        return _powers(packed.device, one, inverse)[packed.long()].view(-1)[:count]
    sent = packed.numpy().tobytes()
    return None if sent == bytes([one * 17]) * len(sent) else _factors(sent, count, one, inverse)


@functools.lru_cache(maxsize=64)  # channels' change from step to step, not from message to message
def _factors(packed: bytes, count: int, one: int, inverse: bool) -> Tensor:
    levels = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return _powers(levels.device, one, inverse)[levels.long()].view(-1)[:count]


@functools.lru_cache(maxsize=8)
def _powers(device: torch.device, one: int, inverse: bool) -> Tensor:
    """The two weights of each byte, float32 (256, 2)."""
    byte = torch.arange(256, device=device)
    steps = torch.stack([byte & 15, byte >> 4], 1).double() - one
    return (2.0 ** ((-steps if inverse else steps) / GRAIN)).float()
