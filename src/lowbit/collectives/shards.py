"""Partition of a flat tensor: the shard that each rank sums, and the chunks in which it is sent."""

from __future__ import annotations

from dataclasses import dataclass

_ALIGN = 16  # elements: shards start at multiples of it, for vector registers
_MOST_CHUNKS = 1 << 13  # so that two messages for each chunk have distinct tags


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A flat tensor of `numel` elements, cut into a shard for each rank, and each shard into chunks of at most `chunk`.

    `length`: of a shard (the last may be shorter or empty); 0: as even as possible. `grain`: elements that stay
    together: shards and chunks are multiples of it; so must be `numel` and `length`.
    """

    numel: int
    ranks: int
    chunk: int
    length: int = 0
    grain: int = 1

    def __post_init__(self) -> None:
        unit = _ALIGN if self.grain == 1 else self.grain
        if not self.length:
            even = -(-self.numel // self.ranks)
            object.__setattr__(self, "length", -(-even // unit) * unit)
        chunk = self.chunk // self.grain * self.grain
        least = -(-self.length // _MOST_CHUNKS)
        object.__setattr__(self, "chunk", max(chunk, self.grain, -(-least // unit) * unit))

    @property
    def chunks(self) -> int:
        """Chunks of a whole shard."""
        return -(-self.length // self.chunk) if self.length else 0

    def piece(self, rank: int, index: int) -> slice:
        """Slice of the elements of a chunk of a rank's shard; empty behind the shard's end."""
        start = rank * self.length + index * self.chunk
        stop = min(start + self.chunk, (rank + 1) * self.length)
        return slice(min(start, self.numel), min(stop, self.numel))

    def size(self, rank: int, index: int) -> int:
        piece = self.piece(rank, index)
        return piece.stop - piece.start
