"""`python -m benchmarks saved`: gradient errors of pretrained models whose saved activations are in few bits."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.real import Reading, RealBenchmark, Window, model_loss, opened
from lowbit.activations import compress_saved_
from lowbit.activations.counting import counted
from lowbit_lab.bench.settings import Names
from lowbit_lab.bench.training import POLICIES
from lowbit_run.config import ConfigError, Positive, section
from lowbit_run.report import Column, Command, Row, Table


@section()
class SavedBenchmark:
    """Models, policies and text."""

    models: Names
    """Folders of causal language models in Hugging Face format, such as those of `make real-models`."""
    methods: Names = ("default", "norm-8", "agoq")
    """Policies for saved activations: default, norm-8, agoq (as published), attention-8, uniform."""
    text: tuple[str, ...] = ()
    """Files to take windows from. If omitted, Python's language reference."""
    tokens: Positive = 256
    """Tokens of a window."""
    windows: Positive = 4
    """Windows, each a step of its own. The first decides what outliers there are."""
    threads: Positive = 1
    """Threads of this process."""

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in POLICIES:
                raise ConfigError(f"methods has {method!r}; allowed: {', '.join(POLICIES)}")


def measure(settings: SavedBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Compare gradients with those of the same model whose activations are saved in full.

    Yields:
        Rows: `model`, `method`, `saved_bytes` (by autograd for a window, without weights), `saved` (of what PyTorch
        keeps), `error` (of all gradients, |g' - g| / |g|, mean over windows), `error_error` (its standard error),
        `norm` (the same of the worst norm's weight, its mean), and `name` of that norm.
    """
    torch.set_num_threads(settings.threads)
    rows: list[Row] = []
    for folder, tokenizer, load in opened(settings.models):
        real = RealBenchmark(models=(folder,), text=settings.text, tokens=settings.tokens)
        windows = Reading(tokenizer, "text", real).held_out[: settings.windows]
        model = load().train()
        exact = [_gradients(model, window) for window in windows]
        for method in settings.methods:
            model.zero_grad()
            coded = copy.deepcopy(model)
            compress_saved_(coded, POLICIES[method])
            steps = (_gradients(coded, window) for window in windows)  # one at a time: they are as large as the model
            rows.append({"model": Path(folder).name, "method": method, **_compared(exact, steps)})
            del coded, steps
            gc.collect()  # a compressed model has cycles
            yield list(rows)


Step = tuple[int, dict[str, Tensor]]
"""Bytes that autograd kept, and the gradients."""


def _gradients(model: Any, window: Window) -> Step:
    model.zero_grad()
    with counted(model) as saved:
        loss = model_loss(model, window)
        kept = saved.total
        loss.backward()
    return kept, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compared(exact: Sequence[Step], coded: Iterable[Step]) -> Row:
    errors, kept = list[dict[str, float]](), list[int]()
    for (_, a), (nbytes, b) in zip(exact, coded, strict=True):
        errors.append(_errors(a, b))
        kept.append(nbytes)
    norms = {name: statistics.fmean(each[name] for each in errors) for name in errors[0] if "norm" in name}
    alls, worst = [each[""] for each in errors], max(norms, key=lambda name: norms[name])
    return {
        "saved_bytes": kept[-1], "saved": kept[-1] / exact[-1][0],
        "error": statistics.fmean(alls), "error_error": statistics.stdev(alls) / len(alls) ** 0.5 if alls[1:] else 0.0,
        "norm": norms[worst], "name": worst.removesuffix(".weight"),
    }  # fmt: skip


def _errors(exact: Mapping[str, Tensor], coded: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each weight's gradient; "": of all together."""
    apart = {name: _square(coded[name] - grad) for name, grad in exact.items()}
    sizes = {name: _square(grad) for name, grad in exact.items()}
    found = {name: (apart[name] / size) ** 0.5 for name, size in sizes.items() if size}
    return {**found, "": (sum(apart.values()) / sum(sizes.values())) ** 0.5}


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.flatten(), dtype=torch.float64)) ** 2


COMMAND = Command(
    name="benchmarks saved",
    summary="Gradient errors of pretrained models whose saved activations are in few bits.",
    examples=("python -m benchmarks saved runs/real-models/smollm2 --json saved.json",),
    settings=SavedBenchmark,
    measure=measure,
    tables=[
        Table(
            title="Gradients of pretrained models with saved activations in few bits",
            columns=[
                Column("model", "model"),
                Column("method", "method"),
                Column("saved\nMB", "saved_bytes", lambda n: f"{n / 1e6:.1f}"),
                Column("of\nPyTorch's", "saved", "{:.0%}"),
                Column("error of\nall gradients", "error", "{:.4f}"),
                Column("±", "error_error", "{:.4f}"),
                Column("worst\nnorm", "norm", "{:.3f}"),
                Column("its name", "name"),
            ],
        ),
    ],
    charts=[],
)
