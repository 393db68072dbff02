"""One measurement of `lowbit bench memory` in a process of its own: a method at a sequence length."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.activations.counting import counted, layer_type
from lowbit.config import build
from lowbit.plan.measure import gradients, relative_error
from lowbit.train.config import OptimizerConfig
from lowbit.train.data import Order, load_data
from lowbit.train.model import build_model, vocabulary
from lowbit.train.single_process import model_loss
from lowbit_lab.bench.memory import MemoryBenchmark
from lowbit_lab.bench.memory_methods import Around, Updates, saving
from lowbit_lab.bench.worker import serve

_SKIPPED = 1  # steps that are not measured: the first makes the optimizer's state


class Meter:
    """The memory that this process uses beyond that of its start.

    On a CPU the peak of resident pages (VmHWM, reset through clear_refs), on a GPU that of PyTorch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            self._first = torch.cuda.memory_allocated(device)
        else:
            with contextlib.suppress(AttributeError):  # C libraries other than GNU's
                ctypes.CDLL(None).malloc_trim(0)
            self._first = _resident("VmRSS")

    def reset(self) -> None:
        """Start a new maximum."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Peak bytes since `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._first
        return _resident("VmHWM") - self._first


class Training:
    """A model trained with a method."""

    def __init__(self, settings: MemoryBenchmark, method: str, sequence: int) -> None:
        self.settings, self.method = settings, method
        self.device = torch.device(settings.device)
        data = settings.data(sequence)
        self.windows = load_data(data).train
        self.order = Order(samples=len(self.windows), batch=data.batch, seed=settings.seed)
        vocab = vocabulary(settings.model, 256)
        model = build_model(settings.model, vocab=vocab, sequence=sequence, seed=settings.seed)
        if settings.weights == "bf16":
            model = model.bfloat16()
        self.model = nn.Module.to(model, self.device).train()
        self.updates = Updates(method, self.model, OptimizerConfig(lr=settings.lr))

    def loss(self, inputs: Tensor, targets: Tensor, around: Around) -> Tensor:
        """Mean loss of a micro-batch, nats a token."""
        with around():
            autocast = torch.bfloat16 if self.settings.weights == "fp32" else None
            return model_loss(self.model, inputs, targets, autocast=autocast)

    def microbatches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of a step, a micro-batch each."""
        batches = map(self.windows.batch, self.order.ids(step).split(self.settings.batch))
        return [(x.to(self.device), y.to(self.device)) for x, y in batches]

    def step(self, number: int, around: Around) -> tuple[float, float, int]:
        """One step: its loss, its seconds, and bytes of the gradients before the optimizer's turn."""
        batches = self.microbatches(number)
        self._wait()
        start = time.perf_counter()
        losses = []
        for inputs, targets in batches:
            loss = self.loss(inputs, targets, around)
            loss.backward()
            losses.append(loss.detach())
            del loss
        held = self.updates.gradient_bytes()
        self.updates.step(len(batches))
        mean = torch.stack(losses).mean().item()
        self._wait()
        return mean, time.perf_counter() - start, held

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Measurement:
    """The process that measures."""

    def measure(self, settings: dict[str, Any], method: str, sequence: int) -> dict[str, Any]:
        """A row of `lowbit bench memory` without its comparisons."""
        chosen = build(MemoryBenchmark, settings)
        torch.set_num_threads(chosen.threads)
        return measure(chosen, method, sequence)

    def depths(self, settings: dict[str, Any]) -> None:
        """Measure the layers of the model, for plans at several depths."""
        from lowbit_lab.bench.memory_depths import Depths

        chosen = build(MemoryBenchmark, settings)
        torch.set_num_threads(chosen.threads)
        self._depths = Depths(chosen)

    def depth(self, layers: int) -> list[dict[str, Any]]:
        """Rows of all methods at a depth; after `depths`."""
        return self._depths.rows(layers)


def measure(settings: MemoryBenchmark, method: str, sequence: int) -> dict[str, Any]:
    """Train for `settings.steps` steps and measure; see `lowbit_lab.bench.memory.measure` for the fields."""
    _rehearse(settings, method)
    meter = Meter(torch.device(settings.device))
    training = Training(settings, method, sequence)
    peaks, seconds, losses, gradient_bytes = [], [], [], 0
    with saving(method, training.model, settings.bits) as around:
        for number in range(settings.steps):
            meter.reset()
            loss, elapsed, gradient_bytes = training.step(number, around)
            losses.append(loss)
            peaks.append(meter.peak())
            seconds.append(elapsed)
    row = {
        "method": method,
        "sequence": sequence,
        "peak_bytes": max(peaks[_SKIPPED:]),
        "step_seconds": statistics.median(seconds[_SKIPPED:]),
        "loss": losses[-1],
        "weights_bytes": sum(p.nbytes for p in training.model.parameters()),
        "gradients_bytes": gradient_bytes,
        "optimizer_bytes": training.updates.state_bytes(),
    }
    return row | _saved_and_errors(training)


def _rehearse(settings: MemoryBenchmark, method: str) -> None:
    """Train a tiny model for two steps, so that kernels are compiled and late imports are done."""
    model = replace(settings.model, dim=64, layers=1, heads=1, kv_heads=0, ffn=0, pretrained="")
    training = Training(replace(settings, model=model, steps=2, max_bytes=20_000), method, 64)
    with saving(method, training.model, settings.bits) as around:
        for number in range(2):
            training.step(number, around)
    _saved_and_errors(training)


def _saved_and_errors(training: Training) -> dict[str, Any]:
    """Bytes that autograd saves for a micro-batch, and errors of its gradients, by layer type."""
    inputs, targets = training.microbatches(training.settings.steps)[0]
    model, updates = training.model, training.updates
    with saving(training.method, model, training.settings.bits) as around, counted(model) as saved:
        coded = updates.gradients(lambda: training.loss(inputs, targets, around))
    if updates.storage is not None:
        updates.storage.close()  # which would round these gradients, too
    exact = gradients(model, lambda: training.loss(inputs, targets, contextlib.nullcontext))
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, gradient in exact.items():
        groups[layer_type(modules_around(model, name))][name] = gradient
    errors = {kind: relative_error(coded, group) for kind, group in groups.items()}
    return {
        "saved_bytes": saved.total,
        "saved": {kind: size for kind, size in saved.peak.items() if kind != "weights"},
        "weight_copies_bytes": saved.peak.get("weights", 0),
        "gradient_error": {"all": relative_error(coded, exact), **errors},
    }


def modules_around(model: nn.Module, parameter: str) -> list[nn.Module]:
    """The modules that hold a parameter, outermost first."""
    parts = parameter.split(".")[:-1]
    return [model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts))]


def _resident(name: str) -> int:
    """An entry of this process in /proc, in bytes."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    serve(Measurement)
