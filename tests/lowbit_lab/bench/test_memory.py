"""`lowbit bench memory`: real measurements of a tiny model in processes of their own."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.activations import LayerAware
from lowbit_lab.bench import memory, memory_run
from lowbit_lab.bench.memory import COMMAND, METHODS, MemoryBenchmark, in_8_bits
from lowbit_lab.bench.memory_run import Meter, measure, policy_of
from lowbit_run.report import Report, run
from lowbit_run.train.config import ModelConfig


@pytest.fixture
def settings(text: str) -> MemoryBenchmark:
    return MemoryBenchmark(
        methods=("bf16",), sequences=(64,), steps=2, model=ModelConfig(dim=32, layers=1, heads=2, vocab=256),
        text=(text,), max_bytes=8000, threads=1,
    )  # fmt: skip


def fake(settings: MemoryBenchmark, method: str, sequence: int) -> dict[str, Any]:
    size = (100 - 10 * METHODS.index(method)) * sequence
    return {
        "method": method, "sequence": sequence, "saved_bytes": size, "peak_bytes": 2 * size, "step_seconds": 1.0,
        "loss": 4.0, "weights_bytes": 1, "gradients_bytes": 1, "optimizer_bytes": 2, "weight_copies_bytes": 3,
        "saved": {"norm": size}, "gradient_error": {"all": 0.0, "norm": 0.0}, "rest_bytes": size - 7,
    }  # fmt: skip


def test_a_real_measurement_in_a_process_of_its_own(settings: MemoryBenchmark):
    row = run(COMMAND, settings).rows[0]
    assert {"norm", "mlp", "attention", "linear", "loss"} <= set(row["saved"])
    assert row["saved_bytes"] == sum(row["saved"].values())
    assert row["gradient_error"]["all"] == 0
    assert row["optimizer_bytes"] >= 2 * row["weights_bytes"]
    assert row["gradients_bytes"] == row["weights_bytes"]
    assert row["peak_bytes"] > 0 < row["step_seconds"]
    assert (row["saved_vs_bf16"], row["peak_vs_bf16"], row["time_vs_bf16"]) == (1, 1, 1)
    meter = Meter(torch.device("cpu"))
    meter.reset()
    filled = torch.ones(16 << 20, dtype=torch.uint8)
    assert 12 << 20 < meter.peak() < 64 << 20, "memory is seen"
    del filled


SHARES = {
    "bf16": (1, 1), "checkpoint": (0.1, 0.4), "fp8": (0.3, 0.6), "int4-uniform": (0.05, 0.3), "int4": (0.1, 0.33),
    "low-bit": (0.1, 0.38), "agoq": (0.1, 0.33), "bf16+8bit-gradients": (1, 1), "bf16+8bit-optimizer": (1, 1),
    "int4+8bit-gradients": (0.1, 0.33),
}  # fmt: skip


def test_what_each_method_keeps_and_loses(settings: MemoryBenchmark, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_run, "eight_bit_adamw", memory_run.make_optimizer)
    plain = measure(settings, "bf16", 64)
    layers = plain["saved_bytes"] - plain["saved"]["loss"]  # which is most of so small a model
    for method, (low, high) in SHARES.items():
        row = plain if method == "bf16" else measure(settings, method, 64)
        error = row["gradient_error"]["all"]
        assert low <= (row["saved_bytes"] - row["saved"]["loss"]) / layers <= high, method
        assert (error == 0) == (method in ("bf16", "checkpoint", "bf16+8bit-optimizer"))
        assert row["gradients_bytes"] == pytest.approx(
            plain["gradients_bytes"] / (4 if "gradients" in in_8_bits(method) else 1), rel=0.05
        )
        assert error < 0.3
        assert row["loss"] == pytest.approx(plain["loss"], abs=0.02)
    both = ("gradients", "optimizer")
    assert in_8_bits("agoq") == in_8_bits("low-bit+8bit") == both
    assert [in_8_bits(f"bf16+8bit-{part}") for part in both] == [("gradients",), ("optimizer",)]
    assert in_8_bits("int4+8bit-gradients") == ("gradients",)
    assert in_8_bits("int4") == in_8_bits("low-bit") == ()
    assert policy_of(6, "agoq") == dataclasses.replace(policy_of(0, "int4"), outliers=False) == LayerAware.published()
    assert policy_of(0, "low-bit") == LayerAware()


def test_ratios_are_of_the_same_sequence_and_a_file_is_gone_on_with(
    settings: MemoryBenchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = []
    monkeypatch.setattr(memory, "_measured", lambda *a: asked.append(a[1:]) or fake(*a))
    both = dataclasses.replace(settings, methods=("low-bit", "bf16"), sequences=(64, 32))
    file = tmp_path / "m.json"
    run(COMMAND, dataclasses.replace(both, methods=("bf16",), sequences=(64,)), file=file)
    report = run(COMMAND, both, file=file)
    assert asked == [("bf16", 64), ("low-bit", 64), ("low-bit", 32), ("bf16", 32)]
    places = [(row["sequence"], row["method"]) for row in report.rows]
    assert places == [(32, "bf16"), (32, "low-bit"), (64, "bf16"), (64, "low-bit")]
    assert [row["saved_vs_bf16"] for row in report.rows] == [1, 0.5, 1, 0.5]
    assert Report.read_json(file).rows == report.rows
    depth = {**fake(settings, "bf16", 128), "layers": 2}
    for sequence, rows in ((128, 1), (64, 1)):  # of depths, whose rows have the same methods and sequences
        found = list(memory.measure(dataclasses.replace(settings, sequences=(sequence,)), [depth]))[-1]
        assert [row["sequence"] for row in found if "layers" not in row] == [sequence] * rows
        assert depth in found
    with pytest.raises(ValueError, match="holds rows with model.dim 32; this call has 64: name another file"):
        run(COMMAND, dataclasses.replace(both, model=dataclasses.replace(both.model, dim=64)), file=file)


def test_what_can_not_be_measured_is_said_first_or_left_out(
    settings: MemoryBenchmark, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(ValueError, match="where there is no file"):
        run(COMMAND, dataclasses.replace(settings, text=("missing.txt",)))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is cuda; this machine has none"):
            run(COMMAND, dataclasses.replace(settings, device="cuda"))
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        run(COMMAND, dataclasses.replace(settings, methods=("low-bit+8bit",)))
    assert raised.value.name == "torchao"
    monkeypatch.setattr(memory, "_measured", lambda _, method, sequence: {"method": method, "sequence": sequence})
    every = list(memory.measure(dataclasses.replace(settings, methods=memory.METHODS, sequences=(64, 128)), []))
    left_out = ["low-bit+8bit", "bf16+8bit-optimizer", "agoq"]
    assert {row["method"] for row in every[-1]} == set(memory.METHODS) - set(left_out)
    missing = 'is left out: torchao is missing; install it with: pip install "lowbit[8bit]"'
    assert caplog.messages == [f"{method} {missing}" for method in left_out]
