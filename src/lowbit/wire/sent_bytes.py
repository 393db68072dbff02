"""Bytes that this process has sent outside of its training traffic, by purpose.

All senders of `lowbit.wire` count here, so that nobody has to collect their counts. Payloads count with their
checksums, and without what Gloo, TCP and the network add.
"""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()
_sent: Counter[str] = Counter()


def note_sent(purpose: str, nbytes: int) -> None:
    """Count bytes that were handed to a process group; from any thread."""
    with _lock:
        _sent[purpose] += nbytes


def sent_so_far() -> Counter[str]:
    """Bytes by purpose since the process began; what a run has sent is the difference of two of them."""
    with _lock:
        return Counter(_sent)
