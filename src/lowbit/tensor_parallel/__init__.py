"""Tensor-parallel inference with a low-bit all-reduce: calibrate, run or emulate, and watch for drift."""

from __future__ import annotations

from lowbit.tensor_parallel.calibrate import calibrate
from lowbit.tensor_parallel.calibration import Calibration, CalibrationError
from lowbit.tensor_parallel.cut import tensor_parallel_
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.emulate import emulate_tensor_parallel_
from lowbit.tensor_parallel.low_bit import low_bit_, low_bit_styles
from lowbit.tensor_parallel.reduce import SumSettings, Traffic
from lowbit.tensor_parallel.rowwise import Installed, LowBitRowwiseParallel
from lowbit.tensor_parallel.sums import ModelSum, model_sums
from lowbit.tensor_parallel.thresholds import Thresholds

__all__ = [
    "Calibration",
    "CalibrationError",
    "Drift",
    "Installed",
    "LowBitRowwiseParallel",
    "ModelSum",
    "SumSettings",
    "Thresholds",
    "Traffic",
    "calibrate",
    "emulate_tensor_parallel_",
    "low_bit_",
    "low_bit_styles",
    "model_sums",
    "tensor_parallel_",
]
