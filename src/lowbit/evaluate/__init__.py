"""Whether a model still says the same when its tensor-parallel sums travel in few bits.

`lowbit calibrate` and `lowbit evaluate` are `calibrate.run` and `run.run` of this package with a command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowbit.evaluate.settings import CalibrationConfig, EvaluationConfig

if TYPE_CHECKING:
    from lowbit.evaluate.score import Score, perplexity
    from lowbit.evaluate.text import Sequences

__all__ = ["CalibrationConfig", "EvaluationConfig", "Score", "Sequences", "perplexity"]

_LATER = {"Score": "score", "perplexity": "score", "Sequences": "text"}


def __getattr__(name: str) -> Any:
    if name in _LATER:  # they import PyTorch, which a command line's help need not wait for
        return getattr(importlib.import_module(f"lowbit.evaluate.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
