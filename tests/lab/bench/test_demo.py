import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lowbit.codecs import TransformQuant
from lowbit.config import ConfigError
from lowbit.train.config import DataConfig, ModelConfig, PipelineConfig
from lowbit_lab.bench import demo
from lowbit_lab.bench.curves import curve
from lowbit_lab.bench.pipeline import PipelineBenchmark
from lowbit_lab.bench.recipes import PROGRAM, as_mapping
from lowbit_lab.bench.workers import Workers
from lowbit_lab.network import SlowLink

TINY = PipelineBenchmark(
    model=ModelConfig(dim=32, layers=4, heads=2), data=DataConfig(batch=8, sequence=32), samples=8,
    pipeline=PipelineConfig(stages_per_rank=2, schedule="Interleaved1F1B"),
    boundaries=("stock-fp32", "fp32", "transform"),
)  # fmt: skip
ONE_RANK = PipelineConfig(ranks=1, stages_per_rank=8, schedule="Interleaved1F1B")


def test_a_small_demo_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SETTINGS", TINY)
    small = tuple(replace(c, steps=3 + i) for i, c in enumerate(demo.CONTESTANTS))
    monkeypatch.setattr(demo, "CONTESTANTS", small)
    with (console := Console(width=80)).capture() as shown:
        report = demo.run(Path("demo"), console=console)
    stock, fp32, few = report.rows
    for i, (row, name) in enumerate(zip(report.rows, ("stock-fp32", "fp32", "transform"), strict=True)):
        assert (row["boundary"], row["steps"], len(row["curve"])) == (name, 3 + i, 3 + i)
    assert (stock["bits_forward"], stock["speedup_stock_fp32"]) == (32.0, 1.0)
    assert few["bytes_per_step"] < fp32["bytes_per_step"] / 3
    assert few["bits_forward"] == pytest.approx(TransformQuant().bits_per_element((2, 32, 32)), abs=0.1)
    assert stock["curve"][0][1] == fp32["curve"][0][1] == pytest.approx(few["curve"][0][1], abs=0.05)
    assert {row["link_mbit"] for row in report.rows} == {None if SlowLink.available() else 100.0}
    text = shown.get()
    for part in ("PyTorch's stage, FP32", "lowbit's stage, TransformQuant", "tokens/s", "def ", "demo.png"):
        assert part in text
    assert re.search(r"lowbit's stage, TransformQuant +[\d,]+ ", text), "a row of the table fits on 80 columns"
    assert "…" not in text
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "demo" / "report.json").read_text())["command"] == "demo"
    demo.check_output(Path("demo"))  # it may be run again


@pytest.mark.parametrize("name", ["report.json", "demo.png", "stock-fp32/metrics.jsonl", "transform/config.json"])
def test_a_folder_with_files_of_others_is_left_alone(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="which lowbit has no record of making"):
        demo.run(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_without_matplotlib_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        demo.run(tmp_path, console=Console(file=io.StringIO()))


def test_without_a_link_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: "No namespaces here."))
    console = Console(width=80)
    with console.capture() as shown:
        assert demo.choose_link(console).rate_mbit is None
    assert "No namespaces here." in shown.get()
    assert "Continuing without a limit" in shown.get()


def test_a_rank_that_fails_is_named(tmp_path: Path):
    config = demo.recipe(demo.CONTESTANTS[1], tmp_path)
    config = replace(config, model=replace(config.model, layers=7), pipeline=ONE_RANK)
    with pytest.raises(ChildProcessError, match="rank 0 failed: .*8 stages"), Workers(PROGRAM, grouped=True) as ranks:
        ranks.ask("train", config=as_mapping(config))


def test_curve_is_a_mean_of_the_last_steps():
    metrics = [{"seconds": 2.0, "loss": float(i)} for i in range(20)]
    points = curve(metrics)
    assert points[0] == (2.0, 0.0)
    assert points[1] == (4.0, 0.5)
    assert points[-1] == (40.0, pytest.approx(15.5))  # of losses 12 to 19


def test_the_findings_tell_the_stage_from_the_bits():
    rows = [
        {"steps": steps, "bits_forward": bits, "bits_backward": bits + 1, "speedup_stock_fp32": speed / 2000,
         "target_loss": 3.0, "seconds_to_loss": seconds,
         "curve": [(float(i), 4.0 - i / 2 + seconds / 1000) for i in range(steps)]}
        for steps, speed, bits, seconds in ((3, 2000, 32.0, 60.0), (4, 3000, 32.0, 42.0), (9, 6000, 4.4, 20.0))
    ]  # fmt: skip
    stage, bits, loss, same, warm_up = demo.findings(rows)
    assert "1.50 times as fast as PyTorch's" in stage
    assert "4.4 forward and 5.4 backward instead of 32 make it another 2.00 times as fast, 3.00 times in all" in bits
    assert "3.00 after 60 s with PyTorch's stage, 42 s with lowbit's in FP32 and 20 s with TransformQuant" in loss
    assert "after 3 steps, training loss is 3.060, 3.042 and 3.020" in same
    assert "No run has a warm-up" in warm_up
