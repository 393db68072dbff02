"""Pipeline parallelism whose stages communicate in few bits, under PyTorch's schedules or emulated in one process."""

from lowbit.pipeline.anchors import TokenAnchor
from lowbit.pipeline.emulate import Emulation, emulate_
from lowbit.pipeline.rates import choose_rate
from lowbit.pipeline.stage import LowBitStage
from lowbit.wire.checksum import DamagedError
from lowbit.wire.connections import connect_more
from lowbit.wire.errors import AgreementError, PeerError
from lowbit.wire.traffic import Traffic

__all__ = [
    "AgreementError", "DamagedError", "Emulation", "LowBitStage", "PeerError", "TokenAnchor", "Traffic", "choose_rate",
    "connect_more", "emulate_",
]  # fmt: skip
