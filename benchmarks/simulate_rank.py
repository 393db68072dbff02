"""One rank of the runs that `python -m benchmarks simulate` predicts: it times each action of its stages."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lowbit.pipeline import LowBitStage
from lowbit_lab.bench.runs import Runs
from lowbit_lab.bench.worker import serve


class Profile:
    """Seconds of the actions of a trainer's stages, and of the rest of its steps.

    Where ranks share cores, seconds are those that the thread ran, so that other ranks do not count. The rest then has
    those of the threads that send and receive, because they take the cores of others.
    """

    def __init__(self, trainer: Any) -> None:
        self._shared = dist.get_world_size() > len(os.sched_getaffinity(0))
        if dist.get_world_size() > (os.cpu_count() or 1):
            self._shared = True
        self.clock = time.thread_time if self._shared else time.perf_counter
        self.times: dict[str, list[float]] = defaultdict(list)
        self._within = self._timed = self._waited = 0.0
        self._stages = list(trainer.pipeline.lowbit_stages.values())
        for stage in self._stages:
            self._wrap(stage)
        self._wrap_step(trainer)

    def answer(self) -> dict[str, Any]:
        """Medians by name: `0 forward`, ... for each stage; `optimizer`, `averaging`, and `rest` of a whole pass."""
        return {name: statistics.median(values) for name, values in self.times.items()}

    def _wrap(self, stage: LowBitStage) -> None:
        index = stage.stage_index
        for name, kind in (("_retrieve_recv_activations", "forward"), ("_retrieve_recv_grads", "backward")):
            setattr(stage, name, self._decoding(stage, getattr(stage, name), f"{index} decode_{kind}"))
        for name, kind in (("get_fwd_send_ops", "forward"), ("get_bwd_send_ops", "backward")):
            setattr(stage, name, self._encoding(getattr(stage, name), f"{index} encode_{kind}"))
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, self._computing(getattr(stage, name), index, name))

    def _decoding(self, stage: LowBitStage, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, waited = self.clock(), stage.traffic.wait_seconds
            result = function(*args, **kwargs)
            elapsed, waited = self.clock() - start, stage.traffic.wait_seconds - waited
            self._within += elapsed
            self._waited += waited
            self.times[name].append(elapsed if self._shared else elapsed - waited)
            return result

        return timed

    def _encoding(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            result = function(*args, **kwargs)
            self.times[name].append(self.clock() - start)
            self._timed += self.times[name][-1]
            return result

        return timed

    def _computing(self, function: Callable[..., Any], index: int, name: str) -> Callable[..., Any]:
        kinds = {"forward_one_chunk": "forward", "backward_weight_one_chunk": "weights"}

        def timed(*args: Any, **kwargs: Any) -> Any:
            whole = kwargs.get("full_backward", True)
            kind = kinds.get(name, "backward" if whole else "inputs")
            start, within = self.clock(), self._within
            result = function(*args, **kwargs)
            elapsed = self.clock() - start
            self.times[f"{index} {kind}"].append(elapsed - (self._within - within))
            self._timed += elapsed
            return result

        return timed

    def _wrap_step(self, trainer: Any) -> None:
        marks: dict[str, float] = {}
        step, run, sums = trainer.step, trainer.pipeline.step, trainer._sums.of

        def timed_step(*args: Any) -> Any:
            marks["begin"] = self.clock()
            result = step(*args)
            before = marks["run"] - marks["begin"]
            self.times["optimizer"].append(before + self.clock() - marks["summed"])
            return result

        def timed_run(*args: Any, **kwargs: Any) -> Any:
            whole = time.process_time if self._shared else time.perf_counter
            marks["run"], start = self.clock(), whole()
            self._timed = self._waited = 0.0
            result = run(*args, **kwargs)
            elapsed, marks["ran"] = whole() - start, self.clock()
            waits = sum(stage.traffic.wait_seconds for stage in self._stages) - self._waited
            rest = elapsed - self._timed - (0.0 if self._shared else waits)
            self.times["rest"].append(max(0.0, rest))
            return result

        def timed_sums(values: Any) -> Any:
            self.times["averaging"].append(self.clock() - marks["ran"])
            result = sums(values)
            marks["summed"] = self.clock()
            return result

        trainer.step, trainer.pipeline.step, trainer._sums.of = timed_step, timed_run, timed_sums


class ProfiledRuns(Runs):
    """Runs whose actions can be timed."""

    def profile(self, name: str, count: int) -> dict[str, Any]:
        """Advance a run: seconds of each step but the first, which warms up, and of its actions (`Profile.answer`)."""
        self.steps(name, 1)
        profile = Profile(self._trainers[name])
        seconds = [step["seconds"] for step in self.steps(name, count)]
        return {"seconds": seconds, "times": profile.answer()}


if __name__ == "__main__":
    serve(ProfiledRuns)
