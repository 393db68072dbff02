"""`lowbit bench memory`: what training needs memory for, and how much less of it low-bit activations take.

Every method trains the same model from the same weights on the same tokens, in a process of its own, so that the
memory of one is not that of another. On a CPU the peak is the process's own (its most resident pages in a
step, less those before the model was made), on a GPU the allocator's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.bench.memory_methods import EIGHT_BIT, METHODS
from lowbit.bench.pipeline import check_at_least, model_of
from lowbit.bench.report import Report, Row, machine
from lowbit.codecs.checks import check_choice, check_int
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import load_data
from lowbit.train.model import vocabulary

REFERENCE = "bf16"
_LEAST = {"batch": 1, "microbatches": 1, "steps": 2, "threads": 1, "max_bytes": 1}
# Without these, glibc keeps what is freed for later, and the process looks as large as it ever was.
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, how it is trained, and the methods.

    Args:
        methods: bf16 (PyTorch's own), checkpoint (of decoder layers), fp8 (everything saved in 8 bits), int4-uniform
            (everything in few bits), int4 (everything but attention), low-bit (ours: 8 for norms), low-bit+8bit (ours,
            with gradients and AdamW in 8 bits).
        sequences: tokens of a sample.
        batch: samples of a micro-batch; microbatches: of a step.
        bits: of low-bit activations; norms have at least 8 in low-bit.
        steps: of training, at least 2; the first is not measured.
        device: "cpu" or "cuda" (the current device).
        weights: "fp32" (master weights; matrix products in bfloat16 by autocast, as in `lowbit train`) or "bf16" (the
            model itself in bfloat16, without master weights).
        family: architecture: llama, gpt2, ... as in `lowbit train`.
        pretrained: local Hugging Face folder to take the model from; the sizes below then do not count.
        dim: width of the model; layers: decoder layers; heads: attention heads.
        kv_heads: key and value heads; 0: as many as heads. ffn: width of the feed-forward; 0: the family's usual.
        vocab: entries of the embedding, at least 256: logits and their gradient take some 14 bytes for each of them and
            token, whatever the method.
        lr: learning rate; seed: of weights and data order.
        text: files or folders to train on, as bytes; absent: Python's standard library.
        max_bytes: read no more text than this.
        threads: of PyTorch.
    """

    methods: tuple[str, ...] = METHODS
    sequences: tuple[int, ...] = (1024,)
    batch: int = 1
    microbatches: int = 2
    bits: int = 4
    steps: int = 4
    device: str = "cpu"
    weights: str = "fp32"
    family: str = "llama"
    pretrained: str = ""
    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 256
    lr: float = 1e-3
    seed: int = 0
    text: tuple[str, ...] = ()
    max_bytes: int = 4_000_000
    threads: int = 2

    def __post_init__(self) -> None:
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or not self.methods:
            raise ValueError(f"methods is {self.methods}; allowed: {', '.join(METHODS)}")
        if not self.sequences or min(self.sequences) < 1:
            raise ValueError(f"sequences is {self.sequences}; allowed: at least 1 each")
        check_at_least(self, **_LEAST)
        check_int("bits", self.bits, 2, 8)
        check_choice("device", self.device, ("cpu", "cuda"))
        check_choice("weights", self.weights, ("fp32", "bf16"))
        vocabulary(self.model, 256)

    @property
    def model(self) -> ModelConfig:
        """The model as `lowbit train` describes it."""
        return model_of(self)

    @property
    def data(self) -> DataConfig:
        """The text, for steps of all micro-batches."""
        return DataConfig(
            text=self.text, batch=self.batch * self.microbatches, max_bytes=self.max_bytes,
            sequence=max(self.sequences),
        )  # fmt: skip


def run(
    settings: Settings,
    *,
    on_rows: Callable[[Sequence[Row]], None] | None = None,
    file: Path | None = None,
) -> Report:
    """Measure every method at every sequence length that `file` does not hold yet.

    Args:
        settings: what to compare.
        on_rows: called with all rows whenever there is one more.
        file: JSON that is read first, if it is there, and written again after each measurement; its rows stay.

    Returns:
        A report with a row for each: `method`, `sequence`, `saved_bytes` (kept by autograd for one micro-batch, each
        storage once), `saved` (the same by layer type), `weight_copies_bytes` (what autocast's copies of weights add
        to them), `peak_bytes`, of which `weights_bytes`, `gradients_bytes` (before the optimizer's step),
        `optimizer_bytes` and `rest_bytes` (what is left: what is in use for a moment only, and waste), `step_seconds`
        (median), `loss` (of the last step's samples), `gradient_error` (by layer type and over "all": |g' - g| / |g|
        against plain gradients of the weights that the method has trained), and `saved_vs_bf16`, `peak_vs_bf16`,
        `time_vs_bf16` (this over bf16's at the same sequence, None without one).

    Raises:
        ValueError: text, model or device that cannot be used, or `file` holds rows of other settings.
        ModuleNotFoundError: a method needs torchao, which is not installed.
        ChildProcessError: a measurement failed.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda; this machine has none that PyTorch can use; allowed: cpu")
    rows = _read(file, settings) if file else []
    known = {(row["method"], row["sequence"]) for row in rows}
    if EIGHT_BIT in settings.methods and importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError("No module named 'torchao'", name="torchao")
    load_data(settings.data)  # what cannot be read is an error here
    for sequence, method in itertools.product(settings.sequences, settings.methods):
        if (method, sequence) in known:
            continue
        rows = sorted([*rows, _measure(settings, method, sequence)], key=_place)
        rows = [_compared(row, rows) for row in rows]
        if file:
            _report(settings, rows).write_json(file)
        if on_rows:
            on_rows(rows)
    return _report(settings, rows)


def _report(settings: Settings, rows: Sequence[Row]) -> Report:
    return Report(command="bench memory", settings=settings, machine=machine(), rows=rows)


def _place(row: Row) -> tuple[int, int]:
    return row["sequence"], METHODS.index(row["method"])


def _read(file: Path, settings: Settings) -> list[Row]:
    """Rows of an earlier call with the same settings but for methods and sequences."""
    if not file.exists():
        return []
    earlier = Report.read_json(file, command="bench memory", fields=("method", "sequence"))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        value = list(value) if isinstance(value, tuple) else value
        found = earlier.settings.get(field.name)
        if field.name not in ("methods", "sequences") and found != value:
            raise ValueError(
                f"{file} holds rows with {field.name} {found!r}; this call has {value!r}: name another file"
            )
    return list(earlier.rows)


def _measure(settings: Settings, method: str, sequence: int) -> dict[str, Any]:
    told = {"settings": dataclasses.asdict(settings), "method": method, "sequence": sequence}
    done = subprocess.run(
        [sys.executable, "-m", "lowbit.bench.memory_run"],
        env=os.environ | _EXACT, input=json.dumps(told), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = (done.stderr.strip() or "nothing said").splitlines()[-1]
        raise ChildProcessError(f"{method} at sequence {sequence} failed: {said}")
    row = json.loads(done.stdout.splitlines()[-1])
    # Gradients of a single micro-batch come only while its activations go.
    together = ["weights_bytes", "optimizer_bytes", "saved_bytes", "weight_copies_bytes"]
    together += ["gradients_bytes"] if settings.microbatches > 1 else []
    return row | {"rest_bytes": row["peak_bytes"] - sum(row[name] for name in together)}


def _compared(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    of = next((r for r in rows if r["method"] == REFERENCE and r["sequence"] == row["sequence"]), None)
    names = {
        "saved_vs_bf16": "saved_bytes",
        "peak_vs_bf16": "peak_bytes",
        "time_vs_bf16": "step_seconds",
    }
    return dict(row) | {to: row[name] / of[name] if of and of[name] else None for to, name in names.items()}
