"""`lowbit bench memory --depth`: peak and seconds of a step by depth, against activation checkpointing.

All methods run on the same model and tokens in one process, in turn, so that their times can be compared. Bytes are
PyTorch's own allocations, so they are exact (`lowbit.plan.trace`).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowbit.activations import LayerPlan, compress_saved_
from lowbit.plan.layers import (
    StepCosts,
    choice_errors,
    described,
    fastest,
    measure_layers,
    predictions,
    seconds,
    with_errors,
)
from lowbit.plan.measure import gradients, relative_error
from lowbit.plan.trace import traced_peak
from lowbit.train.data import load_data
from lowbit.train.model import build_model, vocabulary
from lowbit.train.single_process import model_loss
from lowbit_lab.bench.memory import DEPTH_METHODS, MemoryBenchmark
from lowbit_lab.bench.memory_methods import enable_checkpointing, policy_of

_MEASURED = 3  # layers of the model that a plan is made from


class Depths:
    """Models of several depths, and what their layers cost."""

    def __init__(self, settings: MemoryBenchmark) -> None:
        self.settings, self.sequence = settings, settings.sequences[0]
        self.device = torch.device(settings.device)
        windows = load_data(settings.data(self.sequence)).train
        self.inputs, self.targets = windows.batch(torch.arange(settings.batch))
        small = self._model(_MEASURED)
        costs = measure_layers(small, self._step(small), device=self.device, repeats=settings.steps)
        self.costs: StepCosts = with_errors(costs, choice_errors(small, lambda: self._loss(small), [*costs.layers]))

    def rows(self, layers: int) -> list[dict[str, Any]]:
        """A row for each method at a depth."""
        plain = self._model(layers)
        exact = gradients(plain, lambda: self._loss(plain))
        rows: list[dict[str, Any]] = []
        models: dict[str, nn.Module] = {}
        peaks: dict[str, int] = {}
        for method in DEPTH_METHODS:
            model, more = copy.deepcopy(plain), {}
            if method == "plan":
                plan, more = self._plan(layers, peaks["checkpoint"])
                compress_saved_(model, plan)
            elif "low-bit" in method:
                compress_saved_(model, policy_of(self.settings.bits), report=False)
            if method.startswith("checkpoint"):
                enable_checkpointing(model)
            error = relative_error(gradients(model, lambda m=model: self._loss(m)), exact)
            step = self._step(model)
            step()  # gradients exist from now on
            peaks[method], models[method] = traced_peak(step, self.device), model
            rows.append({
                "method": method, "sequence": self.sequence, "layers": layers,
                "activations_peak_bytes": peaks[method], "gradient_error_all": error, **more,
            })  # fmt: skip
        times = self._times(models)
        for row in rows:
            own = times[row["method"]]
            ratios = [a / b for a, b in zip(own, times["checkpoint"], strict=True)]
            row["pass_seconds"] = statistics.median(own)
            row["seconds_vs_checkpoint"] = statistics.median(ratios)
            row["lowest"], row["highest"] = min(ratios), max(ratios)
            row["activations_vs_checkpoint"] = row["activations_peak_bytes"] / peaks["checkpoint"]
            row["activations_vs_bf16"] = row["activations_peak_bytes"] / peaks["bf16"]
        return rows

    def _plan(self, layers: int, checkpointing: int) -> tuple[LayerPlan, dict[str, Any]]:
        """The fastest plan below a share of checkpointing's peak, or the one with the lowest peak."""
        every = predictions(self.costs, layers, max_error=self.settings.max_error)
        limit = max(int(checkpointing * self.settings.share), min(one.peak for one in every))
        best = fastest(every, limit)
        more = {"predicted_bytes": best.peak, "limit_bytes": limit, "choices": described(best.choices)}
        return LayerPlan(stages=(best.choices,)), more

    def _times(self, models: dict[str, nn.Module]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {method: [] for method in models}
        for _ in range(self.settings.steps):
            for method, model in models.items():
                times[method].append(seconds(self._step(model), self.device))
        return times

    def _model(self, layers: int) -> nn.Module:
        settings = self.settings
        config = replace(settings.model, layers=layers)
        vocab = vocabulary(config, 256)
        model = build_model(config, vocab=vocab, sequence=self.sequence, seed=settings.seed)
        model = model.bfloat16() if settings.weights == "bf16" else model
        return nn.Module.to(model, self.device).train()

    def _step(self, model: nn.Module) -> Callable[[], Any]:
        return lambda: self._loss(model).backward()

    def _loss(self, model: nn.Module) -> torch.Tensor:
        autocast = torch.bfloat16 if self.settings.weights == "fp32" else None
        return model_loss(model, self.inputs, self.targets, autocast=autocast)
