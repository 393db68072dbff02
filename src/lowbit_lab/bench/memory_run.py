"""The measurements of `lowbit bench memory`, in its own process: methods, training steps, and depths.

Bytes of models by depth are PyTorch's own allocations, so they are exact (`lowbit_run.plan.measure`). For these, all
methods run on the same model and tokens in turn, so that their times can be compared.
"""

import contextlib
import copy
import ctypes
import gc
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowbit.activations import LayerAware, LayerPlan, compress_saved_
from lowbit.activations.counting import counted, key_of, layer_type, note
from lowbit.codecs import BlockFloat8
from lowbit.codecs.checks import FLOATS
from lowbit.gradients import GradientStorage
from lowbit_lab.bench.memory import DEPTH_METHODS, MemoryBenchmark, in_8_bits
from lowbit_lab.bench.timing import memory_of_process
from lowbit_lab.bench.workers import serve
from lowbit_run.config import build
from lowbit_run.plan.layers import (
    StepCosts,
    choice_errors,
    described,
    fastest,
    measure_layers,
    predictions,
    seconds,
    with_errors,
)
from lowbit_run.plan.measure import gradients, relative_error, traced_peak
from lowbit_run.train.config import OptimizerConfig
from lowbit_run.train.data import Order, load_data
from lowbit_run.train.model import build_model, vocabulary
from lowbit_run.train.optim import eight_bit_adamw, make_optimizer, parts_of
from lowbit_run.train.single_process import model_loss

Around = Callable[[], contextlib.AbstractContextManager[None]]
_SKIPPED = 1  # steps that are not measured: the first creates the optimizer's state
_MEASURED = 3  # layers of the model that a plan is made from
_CODEC = BlockFloat8()
_FEWEST = 1024  # elements: smaller tensors are statistics and scalars
_FROM_WEIGHTS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy")


@contextlib.contextmanager
def saving(method: str, model: nn.Module, bits: int) -> Iterator[Around]:
    """Let autograd save a model's activations by a method while the block runs.

    bf16: PyTorch's default. checkpoint: the inputs of decoder layers, which run again in backward (non-reentrant). fp8:
    all saved tensors, attention's too, as `BlockFloat8`, none recomputed (COAT does the same in fused layers).
    low-bit: `compress_saved_`, with `bits` unless that is 0. int4: 4 bits (or `bits`) for all but attention, norms too.
    int4-uniform: for attention, too. agoq: `LayerAware.published()`. Parts after "+" concern `Updates`.

    Yields:
        A function that makes the context for each forward pass.
    """
    around: Around = contextlib.nullcontext
    method = method.partition("+")[0]
    with contextlib.ExitStack() as stack:
        if method == "checkpoint":
            stack.callback(enable_checkpointing(model))
        elif method == "fp8":
            around = saved_in_fp8
        elif method != "bf16":
            stack.callback(compress_saved_(model, policy_of(bits, method)).remove)
        yield around


def policy_of(bits: int, method: str = "low-bit") -> LayerAware:
    """Return the policy of a method. bits: for saved activations; 0: its default."""
    if method == "low-bit":
        return LayerAware(bits=bits) if bits else LayerAware()
    if method == "agoq":
        return LayerAware.published()
    few = bits or 4
    return LayerAware(bits=few, norm=few, attention=few if method == "int4-uniform" else 16)


def enable_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Checkpoint a model's decoder layers as Hugging Face does; return a function that undoes it."""
    # Versions of transformers before 5.2x use the second name.
    on, off = (
        getattr(model, f"activation_{word}", None) or getattr(model, f"gradient_{word}")
        for word in ("checkpointing_enable", "checkpointing_disable")
    )
    on({"use_reentrant": False})
    return off


class Updates:
    """Gradients and optimizer of a method: in 8 bits if in `in_8_bits(method)`, else `.grad` and PyTorch's AdamW."""

    def __init__(self, method: str, model: nn.Module, config: OptimizerConfig) -> None:
        self.model = model
        eight = in_8_bits(method)
        self.storage = GradientStorage(model) if "gradients" in eight else None
        make = eight_bit_adamw if "optimizer" in eight else make_optimizer
        self.optimizer = make(model.named_parameters(), config)

    def step(self, microbatches: int) -> None:
        """Take a step with the mean of the gradients, and delete them."""
        if self.storage is not None:
            self.storage.scale_(1 / microbatches)
            self.storage.step(self.optimizer)
            self.storage.zero_()
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / microbatches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Return gradients of a loss as they are stored, by parameter, in float32; the stored ones are deleted."""
        if self.storage is None:
            return gradients(self.model, loss)
        loss().backward()
        parameters = self.model.named_parameters()
        stored = {name: self.storage.gradient(parameter, torch.float32) for name, parameter in parameters}
        self.storage.zero_()
        return {name: gradient for name, gradient in stored.items() if gradient is not None}

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that are stored now."""
        if self.storage is not None:
            return self.storage.nbytes
        return sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state."""
        values = [v for state in self.optimizer.state.values() for v in state.values()]
        return sum(x.nbytes for value in values if isinstance(value, Tensor) for x in parts_of(value).values())


def make_model(settings: MemoryBenchmark, sequence: int, layers: int = 0) -> nn.Module:
    """Make the model on its device, in training mode; with this many layers, if given."""
    config = replace(settings.model, layers=layers or settings.model.layers)
    model = build_model(config, vocab=vocabulary(config, 256), sequence=sequence, seed=settings.seed)
    model = model.bfloat16() if settings.weights == "bf16" else model
    return nn.Module.to(model, torch.device(settings.device)).train()


def loss_of(settings: MemoryBenchmark, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of samples, in nats per token."""
    autocast = torch.bfloat16 if settings.weights == "fp32" else None
    return model_loss(model, inputs, targets, autocast=autocast)


class Meter:
    """Measures how much memory this process uses beyond what it used at its start.

    On a CPU it is the peak of resident pages (VmHWM, reset through clear_refs), on a GPU that of PyTorch's allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            self._first = torch.cuda.memory_allocated(device)
        else:
            with contextlib.suppress(AttributeError):  # C libraries other than GNU's
                ctypes.CDLL(None).malloc_trim(0)
            self._first = memory_of_process()["VmRSS"]

    def reset(self) -> None:
        """Start a new maximum."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the peak bytes since `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._first
        return memory_of_process()["VmHWM"] - self._first


class MemoryTraining:
    """A model trained with a method."""

    def __init__(self, settings: MemoryBenchmark, method: str, sequence: int) -> None:
        self.settings, self.method = settings, method
        self.device = torch.device(settings.device)
        data = settings.data(sequence)
        self.windows = load_data(data).train
        self.order = Order(samples=len(self.windows), batch=data.batch, seed=settings.seed)
        self.model = make_model(settings, sequence)
        self.updates = Updates(method, self.model, OptimizerConfig(lr=settings.lr))

    def loss(self, inputs: Tensor, targets: Tensor, around: Around) -> Tensor:
        """Return the mean loss of a micro-batch, in nats per token."""
        with around():
            return loss_of(self.settings, self.model, inputs, targets)

    def microbatches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return tokens and targets of each micro-batch of a step."""
        batches = map(self.windows.batch, self.order.ids(step).split(self.settings.batch))
        return [(x.to(self.device), y.to(self.device)) for x, y in batches]

    def step(self, number: int, around: Around) -> tuple[float, float, int]:
        """Train one step; return its loss, its seconds, and the bytes of gradients before the optimizer's step."""
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


class Depths:
    """Models of several depths, and the costs of their layers."""

    def __init__(self, settings: MemoryBenchmark) -> None:
        self.settings, self.sequence = settings, settings.sequences[0]
        self.device = torch.device(settings.device)
        windows = load_data(settings.data(self.sequence)).train
        self.inputs, self.targets = windows.batch(torch.arange(settings.batch))
        small = make_model(settings, self.sequence, _MEASURED)
        costs = measure_layers(small, self._step(small), device=self.device, repeats=settings.steps)
        self.costs: StepCosts = with_errors(costs, choice_errors(small, lambda: self._loss(small), [*costs.layers]))

    def rows(self, layers: int) -> list[dict[str, Any]]:
        """Return a row for each method at a depth."""
        plain = make_model(self.settings, self.sequence, layers)
        exact = gradients(plain, lambda: self._loss(plain))
        rows: list[dict[str, Any]] = []
        models: dict[str, nn.Module] = {}
        peaks: dict[str, int] = {}
        for method in DEPTH_METHODS:
            model, more = copy.deepcopy(plain), {}
            if method == "plan":  # the fastest within the limit, or else the one with the lowest peak
                every = predictions(self.costs, layers, max_error=self.settings.max_error)
                limit = max(int(peaks["checkpoint"] * self.settings.share), min(one.peak for one in every))
                best = fastest(every, limit)
                more = {"predicted_bytes": best.peak, "limit_bytes": limit, "choices": described(best.choices)}
                compress_saved_(model, LayerPlan(stages=(best.choices,)))
            elif "low-bit" in method:
                compress_saved_(model, policy_of(self.settings.bits))
            if method.startswith("checkpoint"):
                enable_checkpointing(model)
            error = relative_error(gradients(model, lambda m=model: self._loss(m)), exact)
            step = self._step(model)
            step()  # allocates the gradients
            peaks[method], models[method] = traced_peak(step, self.device), model
            rows.append({
                "method": method, "sequence": self.sequence, "layers": layers,
                "activations_peak_bytes": peaks[method], "gradient_error_all": error, **more,
            })  # fmt: skip
        times: dict[str, list[float]] = {method: [] for method in models}
        for _ in range(self.settings.steps):
            for method, model in models.items():
                times[method].append(seconds(self._step(model), self.device))
        for row in rows:
            own = times[row["method"]]
            ratios = [a / b for a, b in zip(own, times["checkpoint"], strict=True)]
            row["pass_seconds"] = statistics.median(own)
            row["seconds_vs_checkpoint"] = statistics.median(ratios)
            row["lowest"], row["highest"] = min(ratios), max(ratios)
            row["activations_vs_checkpoint"] = row["activations_peak_bytes"] / peaks["checkpoint"]
            row["activations_vs_bf16"] = row["activations_peak_bytes"] / peaks["bf16"]
        return rows

    def _step(self, model: nn.Module) -> Callable[[], Any]:
        return lambda: self._loss(model).backward()

    def _loss(self, model: nn.Module) -> Tensor:
        return loss_of(self.settings, model, self.inputs, self.targets)


class MemoryWorker:
    """Methods that the measuring process runs on order."""

    def measure(self, settings: dict[str, Any], method: str, sequence: int) -> dict[str, Any]:
        """Return a row of `lowbit bench memory` without its comparisons."""
        chosen = build(MemoryBenchmark, settings)
        torch.set_num_threads(chosen.threads)
        return measure(chosen, method, sequence)

    def depths(self, settings: dict[str, Any]) -> None:
        """Measure the layers of the model, for plans at several depths."""
        chosen = build(MemoryBenchmark, settings)
        torch.set_num_threads(chosen.threads)
        self._depths = Depths(chosen)

    def depth(self, layers: int) -> list[dict[str, Any]]:
        """Return rows of all methods at a depth; call `depths` first."""
        return self._depths.rows(layers)


def measure(settings: MemoryBenchmark, method: str, sequence: int) -> dict[str, Any]:
    """Train for `settings.steps` steps and measure; see `lowbit_lab.bench.memory.measure` for the fields."""
    _rehearse(settings, method)
    meter = Meter(torch.device(settings.device))
    training = MemoryTraining(settings, method, sequence)
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
    training = MemoryTraining(replace(settings, model=model, steps=2, max_bytes=20_000), method, 64)
    with saving(method, training.model, settings.bits) as around:
        for number in range(2):
            training.step(number, around)
    _saved_and_errors(training)


def _saved_and_errors(training: MemoryTraining) -> dict[str, Any]:
    """Measure the bytes that autograd saves for a micro-batch, and errors of its gradients, by layer type."""
    inputs, targets = training.microbatches(training.settings.steps)[0]
    model, updates = training.model, training.updates
    with saving(training.method, model, training.settings.bits) as around, counted(model) as saved:
        coded = updates.gradients(lambda: training.loss(inputs, targets, around))
    if updates.storage is not None:
        updates.storage.close()  # it would round these gradients, too
    exact = gradients(model, lambda: training.loss(inputs, targets, contextlib.nullcontext))
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, gradient in exact.items():
        parts = name.split(".")[:-1]
        path = [model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts))]
        groups[layer_type(path)][name] = gradient
    errors = {kind: relative_error(coded, group) for kind, group in groups.items()}
    return {
        "saved_bytes": saved.total,
        "saved": {kind: size for kind, size in saved.peak.items() if kind != "weights"},
        "weight_copies_bytes": saved.peak.get("weights", 0),
        "gradient_error": {"all": relative_error(coded, exact), **errors},
    }


class _Coded:
    """A storage in few bits."""

    def __init__(self, x: Tensor) -> None:
        with torch.no_grad():
            self.payload = _CODEC.encode(x)
        self.shape, self.dtype = x.shape, x.dtype

    def decode(self) -> Tensor:
        return _CODEC.decode(self.payload, shape=self.shape, dtype=self.dtype)


class _Held:
    """A saved tensor: unchanged, or a view of a coded storage."""

    def __init__(self, source: Tensor | _Coded, place: Any) -> None:
        self.source, self.place = source, place
        note(self, [source.payload if isinstance(source, _Coded) else source])

    def unpack(self) -> Tensor:
        return self.source if isinstance(self.source, Tensor) else self.source.decode().as_strided(*self.place)


@contextlib.contextmanager
def saved_in_fp8() -> Iterator[None]:
    """Code in FP8 what autograd saves in the block, each storage once, as COAT does in fused layers.

    Not coded are parameters, their casts, and tensors of fewer than `_FEWEST` elements.
    """
    coded: dict[Any, tuple[StorageWeakRef, weakref.ref[_Coded]]] = {}

    def pack(x: Tensor) -> _Held:
        place = x.size(), x.stride(), x.storage_offset()
        if x.dtype not in FLOATS or x.numel() < _FEWEST or _is_weight(x):
            return _Held(x.detach(), place)
        storage, key = x.untyped_storage(), (key_of(x), x.dtype, x._version)
        whole = storage.nbytes() // x.element_size()
        if whole > 2 * x.numel():  # part of a large storage: code it alone
            return _Held(_Coded(x.detach().contiguous()), (x.size(), torch.empty(x.size(), device="meta").stride(), 0))
        known = coded[key][1]() if key in coded else None
        if known is None:
            known = _Coded(x.detach().as_strided((whole,), (1,), 0))
            coded[key] = StorageWeakRef(storage), weakref.ref(known)
        return _Held(known, place)

    with saved_tensors_hooks(pack, _Held.unpack):
        yield


def _is_weight(x: Tensor) -> bool:
    """Whether `x` is a leaf that requires a gradient, or a view or cast of one."""
    if x.is_leaf:
        return x.requires_grad
    node = x.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _FROM_WEIGHTS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


if __name__ == "__main__":
    serve(MemoryWorker)
