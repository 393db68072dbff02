"""What several ranks do together: sums in few bits, agreeing before they talk, finding out who died."""

from __future__ import annotations

from lowbit.collectives.agreement import AgreementError, agree
from lowbit.collectives.checksum import DamagedError
from lowbit.collectives.failure import PeerError
from lowbit.collectives.line import Pending
from lowbit.collectives.reduce import all_gather, all_reduce, all_reduce_bytes, reduce_scatter

__all__ = [
    "AgreementError",
    "DamagedError",
    "PeerError",
    "Pending",
    "agree",
    "all_gather",
    "all_reduce",
    "all_reduce_bytes",
    "reduce_scatter",
]
