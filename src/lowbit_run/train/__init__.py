"""The training recipe: pipeline-parallel Hugging Face causal language models, with few bits between the stages.

config = load("train.toml", ["pipeline.forward=int4"])
summary = run(config)       # starts local ranks; under torchrun, runs one
summary = train(config)     # on every rank of a launched environment (RANK, WORLD_SIZE, MASTER_*)
"""

from typing import TYPE_CHECKING, Any

from lowbit_run.config import ConfigError
from lowbit_run.job.stop import StoppedError
from lowbit_run.train.config import TrainConfig, from_mapping, load
from lowbit_run.train.launch import LaunchError, run
from lowbit_run.train.metrics import StepMetrics, Summary

if TYPE_CHECKING:
    from lowbit_run.train.loop import train

__all__ = [
    "ConfigError",
    "LaunchError",
    "StepMetrics",
    "StoppedError",
    "Summary",
    "TrainConfig",
    "from_mapping",
    "load",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "train":  # imports PyTorch, which reading a configuration does not need
        from lowbit_run.train.loop import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
