"""How many values and bytes the sums over ranks carried: computed from shapes, so that counting is free."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.tensor_parallel.reduce import SumSettings


@dataclass
class Traffic:
    """Values that one rank contributed to sums, and the bytes of their payloads, counted once; the same on all ranks.

    Of two_shot, whose second step sends the sums in payloads of the same size, only the first step is counted. With one
    rank nothing is sent.

    Args:
        coded, plain: values sent in few bits, and in the model's dtype (below `SumSettings.small`, or without a codec).
        coded_bytes, plain_bytes: of their payloads, with codes, outlier features and scales, but without the 8 bytes of
            each message's checksum.
        algorithms: of the all-reduces of the coded values.
    """

    coded: int = 0
    plain: int = 0
    coded_bytes: int = 0
    plain_bytes: int = 0
    algorithms: set[str] = field(default_factory=set)

    @property
    def share_coded(self) -> float:
        """Share of the values that was coded; NaN if nothing was sent."""
        values = self.coded + self.plain
        return self.coded / values if values else float("nan")

    @property
    def bits_per_value(self) -> float:
        """Bits per value of everything sent; NaN if nothing was."""
        values = self.coded + self.plain
        return 8 * (self.coded_bytes + self.plain_bytes) / values if values else float("nan")

    def take(self, partial: Tensor, ranks: int, codec: Codec | None, settings: SumSettings) -> bool:
        """Count a sum of such partial sums over so many ranks; return whether it is coded."""
        numel = partial.numel()
        if ranks == 1 or not numel:
            return False
        if codec is None or not settings.codes(numel):
            self.plain += numel
            self.plain_bytes += numel * partial.element_size()
            return False
        nbytes = codec.nbytes((numel,))
        self.coded += numel
        self.coded_bytes += nbytes
        self.algorithms.add(settings.algorithm_for(ranks, nbytes))
        return True

    def reset(self) -> None:
        """Count from zero again."""
        self.coded = self.plain = self.coded_bytes = self.plain_bytes = 0
        self.algorithms.clear()
