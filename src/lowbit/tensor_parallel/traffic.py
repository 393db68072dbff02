"""What travelled in sums over the ranks, coded or not: counted from shapes, so that counting costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.tensor_parallel.reduce import SumSettings


@dataclass
class Traffic:
    """Values that one rank contributed to sums, and the bytes of their payloads, once; alike on all ranks.

    Of two_shot, whose second step sends sums in payloads of the same size, the first step is counted. On one rank
    nothing travels.

    Args:
        coded, plain: values that travelled in few bits, and in the model's dtype (below `SumSettings.small`, or
            without a codec).
        coded_bytes, plain_bytes: everything that stands for them: codes, outlier features, scales; not the 8 bytes of
            each message's checksum.
        algorithms: of the all-reduces of those that were coded.
    """

    coded: int = 0
    plain: int = 0
    coded_bytes: int = 0
    plain_bytes: int = 0
    algorithms: set[str] = field(default_factory=set)

    @property
    def share_coded(self) -> float:
        """Share of the values that was coded; NaN: nothing travelled."""
        return self.coded / values if (values := self.coded + self.plain) else float("nan")

    @property
    def bits_per_value(self) -> float:
        """Bits for each value of everything that travelled; NaN: nothing did."""
        values = self.coded + self.plain
        return 8 * (self.coded_bytes + self.plain_bytes) / values if values else float("nan")

    def take(self, partial: Tensor, ranks: int, codec: Codec | None, settings: SumSettings) -> bool:
        """Count a sum of such partial sums over so many ranks; whether it is coded."""
        numel = partial.numel()
        if ranks == 1 or not numel:
            return False
        if codec is None or not settings.codes(numel):
            self.plain += numel
            self.plain_bytes += numel * partial.element_size()
            return False
        size = codec.nbytes((numel,))
        self.coded += numel
        self.coded_bytes += size
        self.algorithms.add(settings.chosen(ranks, size))
        return True

    def reset(self) -> None:
        """Count from zero again."""
        self.coded = self.plain = self.coded_bytes = self.plain_bytes = 0
        self.algorithms.clear()
