"""Checksums: eight bytes after every message show whether it arrived as it was sent, and is the expected one.

They cover the payload, the message's place and the run's secret (LOWBIT_SECRET): XXH3 on the host, integer operations
on a device. This is not a message authentication code: an attacker who can read the traffic can forge it.
"""

import functools
import hashlib
import hmac
import json
import os
import struct
from typing import Any

import torch
import xxhash
from torch import Tensor

from lowbit.escape import shown
from lowbit.wire.errors import PeerError

CHECKSUM_BYTES = 8
"""Bytes that follow the payload in a message."""
SECRET = "LOWBIT_SECRET"
"""Environment variable that holds the secret shared by all ranks of a run."""
ATTEMPT = "LOWBIT_ATTEMPT"
"""Environment variable that holds the name of an attempt, set by a launcher that starts all ranks of the run."""
_attempt = ""  # name of the attempt, from this process's last meeting
_WORD = 8  # bytes that the checksum on a device takes at a time
_LOW_HALF = 0xFFFFFFFF
_MOST_SEARCHED = 1 << 20  # bytes that `Checksums.end_of` searches, which takes half a second
_ODD = (0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9)


class DamagedError(PeerError):
    """A message did not arrive as it was sent, or is not the expected one; `rank` is the sender's in the group."""


class Checksums:
    """Checksums of the messages of one conversation (`topic`); both ends make an equal object.

    A message is a 1-D contiguous uint8 tensor: the payload, then `room` bytes for the checksum: 8, or 0 if not enabled.
    """

    def __init__(self, topic: str, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.room = CHECKSUM_BYTES if enabled else 0
        self._base = xxhash.xxh3_64_intdigest(topic.encode(), seed=_key_of(run_secret()))

    def seal(self, message: Tensor, *place: int) -> None:
        """Write the checksum into the last bytes of a host message; `place` identifies it in the conversation."""
        if self.enabled:
            view = message.numpy().data
            view[-self.room :] = self._digest(view, place)

    def intact(self, message: Tensor, *place: int) -> bool:
        if not self.enabled:
            return True
        view = message.numpy().data
        return view[-self.room :] == self._digest(view, place)

    def end_of(self, memory: Tensor, *place: int) -> int | None:
        """Length of this place's message at the start of `memory`, found by its checksum; None if there is none."""
        if not self.enabled:
            return None
        # One digest that grows by a byte at a time: to hash each length anew would take quadratic time.
        view, digest = memory.numpy().data, xxhash.xxh3_64(seed=self._seed(place))
        for end in range(self.room, min(len(view), _MOST_SEARCHED) + 1):
            if view[end - self.room : end] == digest.digest():
                return end
            digest.update(view[end - self.room : end - self.room + 1])
        return None

    def seal_there(self, message: Tensor, *place: int) -> None:
        """Do as `seal`, with operations on the message's device; the receiver checks with `damage_there`."""
        if self.enabled:
            checksum = _sum_words(message[: -self.room], self._seed(place))
            message[-self.room :].copy_(checksum.view(torch.uint8))

    def damage_there(self, message: Tensor, *place: int) -> Tensor:
        """Whether a message is damaged: bool (1,) on its device, so that the host need not wait."""
        if not self.enabled:
            return torch.zeros(1, dtype=torch.bool, device=message.device)
        checksum = _sum_words(message[: -self.room], self._seed(place))
        # `clone`: in the message the checksum need not be aligned for int64.
        return checksum != message[-self.room :].clone().view(torch.int64)

    def _digest(self, view: memoryview, place: tuple[int, ...]) -> bytes:
        return xxhash.xxh3_64_digest(view[: -self.room], seed=self._seed(place))

    def _seed(self, place: tuple[int, ...]) -> int:
        return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(place)}q", *place), seed=self._base)


class Verdicts:
    """Outcomes of checksums that are still on a device."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, str, int]] = []

    def note(self, damage: Tensor, about: str, rank: int) -> None:
        self._noted.append((damage, about, rank))

    def combined(self) -> Tensor | None:
        """Whether any message is damaged: bool () on the device, None if nothing was noted. Clears the outcomes."""
        noted, self._noted = self._noted, []
        return torch.cat([damage for damage, _, _ in noted]).any() if noted else None

    def settle(self) -> None:
        """Wait for all outcomes, and clear them; DamagedError for the first damaged message."""
        noted, self._noted = self._noted, []
        # One transfer for all outcomes: the host would wait for the device in each.
        outcomes = torch.cat([damage for damage, _, _ in noted]).tolist() if noted else []
        for (_, about, rank), changed in zip(noted, outcomes, strict=True):
            if changed:
                raise damaged(about, rank)


def damaged(about: str, rank: int) -> DamagedError:
    """The error for a message. about: describes the message and its sender; rank: the sender's, in the group."""
    return DamagedError(
        f"{about} is damaged: it does not fit the checksum behind it; bytes changed on the way, or it is the message "
        "of another step or place",
        rank,
    )


def agreed_facts(checksums: bool) -> dict[str, str]:
    """Facts that all ranks must agree on for checksums to match: whether they are on, and the secret's digest."""
    return {"checksums": "on" if checksums else "off", **secret_facts()}


def secret_facts() -> dict[str, str]:
    """A digest of this process's secret for ranks to compare; it does not reveal the secret."""
    if not (secret := run_secret()):
        return {SECRET: "not set"}
    key = hashlib.sha256(secret).digest()
    digest = hmac.new(key, b"lowbit: which secret is it", hashlib.sha256).hexdigest()
    return {SECRET: f"one with digest {digest[:12]}"}


def check_checksums(value: object) -> None:
    """Raise unless an argument `checksums` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"checksums is {shown(value)}; allowed: True or False")


def sealed_bytes(nbytes: int, checksums: bool = True) -> int:
    """Bytes of a message with a payload of `nbytes`; 0 for an empty payload, which is not sent."""
    return nbytes + CHECKSUM_BYTES if nbytes and checksums else nbytes


def run_secret() -> bytes:
    """The run's secret from the environment; empty if there is none."""
    return os.environ.get(SECRET, "").encode()


def begin_attempt(name: str) -> None:
    """Set the name of the attempt that this process is part of; all ranks of the attempt use the same."""
    global _attempt
    _attempt = name


def this_attempt() -> str:
    """Name of this attempt: set by a launcher, else agreed when the ranks met, else torchrun's restart count."""
    return os.environ.get(ATTEMPT) or _attempt or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def signature(secret: bytes, *said: Any) -> str:
    """A keyed hash (HMAC-SHA256) of JSON values, in hexadecimal digits."""
    return hmac.new(secret, json.dumps(said, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def is_signed(written: object, secret: bytes, *said: Any) -> bool:
    """Whether `written` is the signature of these values with this secret."""
    return isinstance(written, str) and hmac.compare_digest(written.encode(), signature(secret, *said).encode())


@functools.cache
def _key_of(secret: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"lowbit checksums" + secret).digest()[:8]) if secret else 0


def _sum_words(payload: Tensor, seed: int) -> Tensor:
    """Compute a checksum with PyTorch's integer operations, modulo 2^64: int64 (1,), the same on every device.

    Each word of 8 bytes is mixed so that each of its bits reaches the lower half, and is multiplied by an odd weight
    that depends on its position. A change within one word is always detected; other changes, and words that swap
    positions, are missed once in billions.
    """
    # Viewing bytes as int64 needs an aligned start, which a copy has.
    if payload.storage_offset() % _WORD:
        payload = payload.clone()
    whole = payload.numel() // _WORD * _WORD
    words = payload[:whole].view(torch.int64)
    if whole < payload.numel():
        rest = torch.zeros(_WORD, dtype=torch.uint8, device=payload.device)
        rest[: payload.numel() - whole] = payload[whole:]
        words = torch.cat([words, rest.view(torch.int64)])
    start = seed - (1 << 64) if seed >> 63 else seed  # as int64
    mixed = (words ^ start) * _ODD[0]
    # Shifts of int64 repeat the sign bit; the mask removes its copies.
    mixed = mixed ^ ((mixed >> 32) & _LOW_HALF)
    # Powers of two: few tables of weights are cached, however many lengths there are.
    count = max(1 << 10, 1 << (words.numel() - 1).bit_length())
    total = (mixed * _weights(count, payload.device)[: words.numel()]).sum().reshape(1)
    # Zeros at the end may vanish in the padding of the last word, so the length counts as well.
    total = (total + payload.numel()) * _ODD[1]
    return (total ^ ((total >> 32) & _LOW_HALF)) + start


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    # A table made in inference mode would stay an inference tensor for all later callers.
    with torch.inference_mode(False):
        places = torch.arange(1, count + 1, device=device) * _ODD[2]
        places = (places ^ ((places >> 29) & 0x7FFFFFFFF)) * _ODD[0]
        # Multiplication by an odd number modulo 2^64 can be undone: no change within a word is lost.
        weights = places | 1
    if device.type == "cuda":  # other streams will use them, too
        torch.cuda.current_stream(device).synchronize()
    return weights
