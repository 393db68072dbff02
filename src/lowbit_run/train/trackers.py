"""Curves in services that people use, by Accelerate's trackers; TensorBoard's are `metrics.Recorder`'s own."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit import escape
from lowbit_run.config import ConfigError

log = escape.logger(__name__)

PROJECT = "lowbit"
"""The project that runs belong to."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError unless Accelerate and the packages of these trackers are installed."""
    missing = [name for name in (*names, "accelerate") if names and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"run.trackers is {', '.join(names)}, and {' and '.join(missing)} cannot be imported; allowed: without it, "
            f"or after: pip install {' '.join(missing)}"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"run.trackers is {', '.join(names)}; allowed: each once")
    if names:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        if old := [name for name in names if not hasattr(LOGGER_TYPE_TO_CLASS.get(name), "start")]:
            raise ConfigError(
                f"run.trackers is {', '.join(old)}, for which Accelerate is too old; allowed: a newer one"
            )


class Trackers:
    """The trackers of a run, on rank 0 only. One that fails is left out from then on; the run continues.

    Args:
        names: "wandb" or "trackio". folder: of the run, whose name the tracked run gets. settings: of the run.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
        self._open: dict[str, Any] = {}
        if not names:
            return
        import torch
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # Trackers write log lines through this state. It takes the process group that there is, and would set the
        # number of threads and variables of its own.
        threads, environment = torch.get_num_threads(), dict(os.environ)
        PartialState(cpu=True)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
        for name in names:
            self._open[name] = LOGGER_TYPE_TO_CLASS[name](PROJECT, name=folder.resolve().name)
            self._call(name, "start")
            self._call(name, "store_init_configuration", dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values after `step` steps."""
        for name in tuple(self._open):
            self._call(name, "log", dict(values), step=step)

    def close(self) -> None:
        """Wait until everything is written."""
        for name in tuple(self._open):
            self._call(name, "finish")
        self._open.clear()

    def _call(self, name: str, method: str, *args: Any, **kwargs: Any) -> None:
        if name not in self._open:
            return
        try:
            getattr(self._open[name], method)(*args, **kwargs)
        except Exception as error:  # of a package that sends over a network: a run of hours does not end for it
            log.warning("%s gets no more curves: %s: %s", name, type(error).__name__, error)
            del self._open[name]
