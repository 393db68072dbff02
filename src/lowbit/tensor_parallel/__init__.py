"""Tensor-parallel inference with a low-bit all-reduce: calibrate, run or emulate, and watch for drift."""

from lowbit.tensor_parallel.calibrate import calibrate
from lowbit.tensor_parallel.calibration import Calibration, CalibrationError
from lowbit.tensor_parallel.cut import emulate_tensor_parallel_, tensor_parallel_
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.low_bit import LowBitRowwiseParallel, low_bit_, low_bit_styles
from lowbit.tensor_parallel.reduce import SumSettings, SumTraffic, Thresholds
from lowbit.tensor_parallel.rowwise import Installed
from lowbit.tensor_parallel.sums import ModelSum, model_sums

__all__ = [
    "Calibration",
    "CalibrationError",
    "Drift",
    "Installed",
    "LowBitRowwiseParallel",
    "ModelSum",
    "SumSettings",
    "SumTraffic",
    "Thresholds",
    "calibrate",
    "emulate_tensor_parallel_",
    "low_bit_",
    "low_bit_styles",
    "model_sums",
    "tensor_parallel_",
]
