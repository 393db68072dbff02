"""Low-bit sums over ranks, with agreement before the first byte and errors that name the rank that failed."""

from lowbit.collectives.calls import Pending
from lowbit.collectives.reduce import all_gather, all_reduce, all_reduce_bytes, reduce_scatter
from lowbit.wire.agreement import agree
from lowbit.wire.checksum import DamagedError
from lowbit.wire.errors import AgreementError, PeerError

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
