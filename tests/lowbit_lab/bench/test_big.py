import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors import safe_open

from lowbit_lab.bench import big
from lowbit_lab.network import LinkUnavailable, SlowLink
from lowbit_run.config import ConfigError
from lowbit_run.train.footprint import model_bytes

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(bool(SlowLink.available()), reason="no network namespaces")
def test_two_ranks_train_a_model_that_is_made_once(tmp_path: Path):
    with (console := Console(width=80)).capture() as shown:
        report = big.run(tmp_path, sizes=TINY, steps=2, console=console)
    model, first, second = tmp_path / "big" / "model", *report.rows
    config = big.recipe(tmp_path / "big", 0, 2)
    counted = model_bytes(config, vocab=256, autocast=None)
    assert first["weights_bytes"] + second["weights_bytes"] == sum(
        part.weights for part in (*counted.layers, counted.first, counted.last)
    )
    assert [row["layers"] for row in report.rows] == [2, 1]
    for row in report.rows:
        assert 100e6 < row["peak_bytes"] < row["resident_bytes"] < 2e9
        assert row["step_bf16_bytes"] == 2 * 2 * 64 * 64
        assert 0 < row["step_bytes"] < row["step_bf16_bytes"] / 2
        assert row["sent_bytes"] > 2 * row["step_bytes"]
        assert row["goodput_mbit"] == pytest.approx(24, abs=6)
    assert "…" not in shown.get()
    for part in ("Writing random weights", "No rank took more than", "One machine would need", "calculated"):
        assert part in shown.get()
    assert json.loads((tmp_path / "big" / "report.json").read_text())["command"] == "demo --big"
    written = (model / "0.safetensors").stat().st_mtime_ns
    assert big.complete(model, TINY)
    big.check_files(tmp_path / "big", [big.recipe(tmp_path / "big", rank, 2) for rank in range(2)])
    assert (model / "0.safetensors").stat().st_mtime_ns == written


def test_the_model_is_whole_and_an_unfinished_one_is_not(tmp_path: Path):
    big.write_config(tmp_path, TINY)
    assert not big.complete(tmp_path, TINY)
    big.write_random(tmp_path, TINY)
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert stored["weight_map"].keys() == big.tensors_of(TINY).keys()
    with safe_open(tmp_path / "1.safetensors", "pt") as file:
        queries = file.get_tensor("model.layers.1.self_attn.q_proj.weight").float()
        assert file.get_tensor("model.layers.1.input_layernorm.weight").eq(1).all()
    assert queries.shape == (64, 64)
    assert queries.std().item() == pytest.approx(0.02, rel=0.1)
    assert big.complete(tmp_path, TINY)
    assert not big.complete(tmp_path, TINY | {"num_hidden_layers": 4})
    (tmp_path / "model.safetensors.index.json").unlink()
    assert not big.complete(tmp_path, TINY)


def test_what_is_missing_is_one_line_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: None))
    monkeypatch.setattr(big.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 7_000_000_000}))
    with pytest.raises(ConfigError, match=r"the model needs 16\.1 GB in .*, and 7\.0 GB of the disk is free$"):
        big.run(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: None))
    monkeypatch.setattr(big, "memory_of", lambda _: (200_000_000, 0))
    with pytest.raises(ConfigError, match=r"^both ranks need 0\.9 GB of memory, and 0\.2 GB is free$"):
        big.run(tmp_path, sizes=TINY)
    assert not list(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: "No namespaces here."))
    with pytest.raises(LinkUnavailable, match=r"^No namespaces here\.$"):
        big.run(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["report.json", "model/config.json", "model/mine.safetensors", "rank-1/metrics.jsonl"])
def test_files_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: None))
    file = tmp_path / "big" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(ConfigError, match="which lowbit has no record of making"):
        big.run(tmp_path, sizes=TINY)
    assert file.read_text() == "mine"
