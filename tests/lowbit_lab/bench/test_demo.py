import io
import json
import re
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest
from rich.console import Console

from lowbit_lab.bench import demo
from lowbit_lab.bench.pipeline import PipelineBenchmark
from lowbit_lab.bench.runs import curve
from lowbit_lab.network import SlowLink
from lowbit_run.config import ConfigError
from lowbit_run.train.boundaries import AUTO_FORMATS
from lowbit_run.train.config import DataConfig, ModelConfig, PipelineConfig

TINY = PipelineBenchmark(
    model=ModelConfig(dim=32, layers=4, heads=2), data=DataConfig(batch=8, sequence=32), samples=8,
    pipeline=PipelineConfig(stages_per_rank=2, schedule="Interleaved1F1B"),
)  # fmt: skip


def test_a_small_demo_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SETTINGS", TINY)
    monkeypatch.setattr(demo, "SECONDS", 1.5)
    with (console := Console(width=80)).capture() as shown:
        report = demo.run(Path("demo"), console=console)
    links = [None] if SlowLink.available() else [25.0, 100.0]
    assert [(row["link_mbit"], row["boundary"]) for row in report.rows] == [*product(links, demo.CONTESTANTS)]
    for stock, full, auto in (report.rows[i : i + 3] for i in range(0, len(report.rows), 3)):
        assert (stock["bits_forward"], stock["speedup_stock_fp32"]) == (32.0, 1.0)
        assert stock["curve"][0][1] == full["curve"][0][1] == pytest.approx(auto["curve"][0][1], abs=0.05)
        assert len(auto["formats"]) == 3
        assert set(auto["formats"]) <= set(AUTO_FORMATS)
        assert (stock["formats"], full["formats"]) == ([], [])
        for row in (stock, full, auto):
            assert row["steps"] == len(row["curve"])
            longest = max(after[0] - before[0] for before, after in pairwise([(0.0, 0.0), *row["curve"]]))
            assert abs(row["seconds"] - demo.SECONDS) <= longest, "as close to the time as a step permits"
    text = shown.get()
    for part in ("PyTorch's stage, FP32", "lowbit's stage, auto", "tokens/s", "auto chose", "def ", "demo.png"):
        assert part in text
    assert re.search(r"lowbit's stage, auto +[\d,]+ ", text), "a row of the table fits on 80 columns"
    assert "…" not in text
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "demo" / "report.json").read_text())["command"] == "demo"
    demo.check_output(Path("demo"))  # it may be run again


@pytest.mark.parametrize("name", ["report.json", "demo.png", "25mbit/fp32/metrics.jsonl", "100mbit/auto/config.json"])
def test_a_folder_with_files_of_others_is_left_alone(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="which lowbit has no record of making"):
        demo.run(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_matplotlib_is_needed_and_a_link_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: "No namespaces here."))
    console = Console(width=80)
    with console.capture() as shown:
        (link,) = demo.choose_links(console)
    assert link.rate_mbit is None
    assert "No namespaces here." in shown.get()
    assert "Continuing without a limit" in shown.get()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        demo.run(tmp_path, console=Console(file=io.StringIO()))


def test_the_findings_tell_the_stage_from_the_bits_and_curves_are_means():
    rows = [
        {"boundary": boundary, "link": "25mbit", "link_mbit": 25.0, "speedup_stock_fp32": speed, "seconds": 20.0,
         "formats": formats, "curve": [(0.0, 5.0), (20.0, loss)]}
        for boundary, speed, loss, formats in (
            ("stock-fp32", 1.0, 4.5, []), ("fp32", 1.5, 4.2, []), ("auto", 10.2, 3.0, ["transform", "transform"]),
        )
    ]  # fmt: skip
    result, link, warm_up = demo.findings(rows)
    assert result == "lowbit trains 10.2 times as fast over 25 Mbit/s as PyTorch's stage in FP32."
    assert (
        "25 Mbit/s: auto chose boundary 0 to 1 transform. lowbit's stage alone, in FP32, is 1.5 times as fast" in link
    )
    assert "few bits make it 10.2; the loss at which PyTorch's stage ends is reached after 5 s." in link
    assert "No run has a warm-up" in warm_up
    points = curve([{"seconds": 0.5, "loss": float(i)} for i in range(20)])
    assert points[:2] == [(0.5, 0.0), (1.0, 0.5)]
    assert points[-1] == (10.0, pytest.approx(17.0))  # of the losses of the last seconds, 15 to 19
