"""Memory for payloads that is kept between calls: touching fresh pages would take longer than encoding."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGN = 64
"""Alignment of payloads in bytes."""
_LEAST = 1 << 20  # fewest bytes of a block


class Scratch:
    """Memory for one call at a time, as much as the largest has needed; several blocks become one for the next call."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, list[Tensor]] = {}
        self._used: dict[torch.device, list[int]] = {}
        self._most: dict[torch.device, int] = {}

    def reset(self) -> None:
        """Free all memory for reuse."""
        for device, used in self._used.items():
            self._most[device] = max(self._most.get(device, 0), sum(used))
            if len(used) > 1:
                self._blocks[device].clear()
                used.clear()
            used[:] = [0] * len(used)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return `nbytes` bytes, aligned, for use until the next `reset`."""
        size = -(-nbytes // ALIGN) * ALIGN
        blocks, used = self._blocks.setdefault(device, []), self._used.setdefault(device, [])
        for i, block in enumerate(blocks):
            if used[i] + size <= block.numel():
                used[i] += size
                return block[used[i] - size : used[i] - size + nbytes]
        least = _LEAST if blocks else max(_LEAST, self._most.get(device, 0))
        with torch.inference_mode(False):  # so that it can be written to in any mode
            blocks.append(torch.empty(max(size, least), dtype=torch.uint8, device=device))
        used.append(size)
        return blocks[-1][:nbytes]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.numel() for blocks in self._blocks.values() for block in blocks)
