"""How accurate a model is with low-bit tensor-parallel sums.

`commands.CALIBRATE` and `commands.EVALUATE` are the commands `lowbit calibrate` and `lowbit evaluate`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lowbit_lab.evaluate.settings import CalibrationConfig, EvaluationConfig

if TYPE_CHECKING:
    from lowbit_lab.evaluate.loading import Sequences
    from lowbit_lab.evaluate.score import Score, perplexity

__all__ = ["CalibrationConfig", "EvaluationConfig", "Score", "Sequences", "perplexity"]

_LATER = {"Score": "score", "perplexity": "score", "Sequences": "loading"}


def __getattr__(name: str) -> Any:
    if name in _LATER:  # these import PyTorch, which a command's help need not wait for
        return getattr(importlib.import_module(f"lowbit_lab.evaluate.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
