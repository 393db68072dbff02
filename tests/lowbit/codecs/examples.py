"""The examples of every format, from `examples.py` in its folder of tests: a new format is covered by adding that.

An `examples.py` holds, each for the tests in brackets:

- `CODECS`: codecs for any tensor (`test_base.py`), with `expected_error(codec)`, the largest relative error (Euclidean)
  of Gaussian numbers. The first also meets `torch.compile` (`kernels/test_operators.py`), the first and the last the
  GPU kernels (`test_gpu.py`). Formats that need calibration or a session have none.
- `OPERATORS`: by the names of the format's operators in PyTorch, such as "group_int_encode", functions that return
  valid arguments (`kernels/test_operators.py`): tensor, payload and settings where the name ends in "encode",
  else payload, tensor and settings.
- `GOLDEN`: frozen payloads by the names of their files (`test_golden.py`).
- `hostile()`, which every format must have: targets for hostile bytes (`tests/fuzz/attack.py`), whose names hold the
  name of the class, as they do by default. `layout(codec, shape)` tells them the sections of a payload.
"""

import importlib
import math
from types import ModuleType
from typing import Any

import torch

from lowbit.codecs import Codec, names


def rooms() -> list[ModuleType]:
    return [importlib.import_module(f"tests.lowbit.codecs.{folder}.examples") for folder in names.formats()]


def room_of(codec: Codec) -> ModuleType:
    return importlib.import_module(f"tests.lowbit.codecs.{type(codec).__module__.split('.')[-2]}.examples")


def every(name: str) -> list[Any]:
    return [example for room in rooms() for example in getattr(room, name, [])]


def bytes_of(codec: Codec, *shape: int) -> torch.Tensor:
    """An empty payload of a tensor of this shape."""
    return torch.zeros(codec.nbytes(shape), dtype=torch.uint8)


def encoded(codec: Codec, *shape: int) -> torch.Tensor:
    """A payload of Gaussian numbers."""
    return codec.encode(torch.randn(shape))


def of_steps(bits: int, rounding: str = "nearest") -> float:
    """Relative error that uniform noise of half a step gives, with a range of at most 6 deviations."""
    return 6 / (2**bits - 1 - (bits == 2)) / math.sqrt(12 / (2 if rounding == "stochastic" else 1)) * 1.2
