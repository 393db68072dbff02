"""Count the bytes that this process has sent outside of its training traffic, by purpose, with their checksums."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_sent: Counter[str] = Counter()


def note_sent(purpose: str, nbytes: int) -> None:
    """Count bytes handed to a process group; thread-safe."""
    with _lock:
        _sent[purpose] += nbytes


def sent_so_far() -> Counter[str]:
    """Return bytes by purpose since the process began; subtract an earlier result to get those of one run."""
    with _lock:
        return Counter(_sent)
