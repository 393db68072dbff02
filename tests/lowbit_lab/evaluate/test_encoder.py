"""`lowbit calibrate` and `lowbit evaluate` on encoders: neighbours; and greedy generation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit_lab.evaluate import CalibrationConfig, EvaluationConfig, loading
from lowbit_lab.evaluate.commands import CALIBRATE, EVALUATE
from lowbit_lab.evaluate.loading import read_text
from lowbit_lab.evaluate.score import agreement, embed, same_tokens
from lowbit_run.config import ConfigError
from lowbit_run.report import run
from lowbit_run.train.pretrained import load_tokenizer
from tests.command_line import invoke
from tests.lowbit_lab.evaluate.models import write_checkpoint, write_encoder
from tests.lowbit_lab.evaluate.test_run import evaluation_config
from tests.processes import Ranks


def config(folder: Path, **more: Any) -> EvaluationConfig:
    text = (str(folder / "text.txt"),)
    return evaluation_config(folder, **{"calibration_text": text, "tps": (1, 2), **more})


def test_an_encoder_keeps_its_neighbours(encoder: Path):
    report = run(EVALUATE, config(encoder, formats=("int4", "feature-int4", "int8"), sentences=30))
    rows = {(row["format"], row["tp"]): row for row in report.rows}
    assert list(rows) == [("bf16", 1)] + [(name, 2) for name in ("bf16", "int4", "feature-int4", "int8")]
    assert rows["bf16", 1]["nearest"] == rows["bf16", 1]["nearest_10"] == 1
    assert rows["int8", 2]["rank_correlation"] > rows["int4", 2]["rank_correlation"]
    for row in report.rows:
        assert (row["kind"], row["model"], row["sentences"]) == ("encoder", encoder.name, 30)
        assert "perplexity" not in row
        assert row["kept"] is None
    layers = {f"encoder.layer.{i}.{name}output.dense" for i in (0, 1) for name in ("", "attention.")}
    for name in ("layers", "layers_by_token"):
        assert set(rows["int4", 2][name]) == layers
        assert all(0.01 < error < 0.5 for error in rows["int4", 2][name].values())


def test_the_command_names_model_and_measure(encoder: Path, caplog: pytest.LogCaptureFixture):
    base = (
        f"evaluate {encoder} --length 32 --text {encoder}/text.txt --calibration-text {encoder}/text.txt --sentences 30"
    )
    coded = invoke(*f"{base} --tp 2 --low-bit --small 0".split())
    assert coded.exit_code == 0, coded.output
    assert f"Neighbours of 30 sentences: {encoder.name}, emulated ranks\n" in coded.stdout
    assert "attention" in coded.stdout
    small = invoke(*f"{base} --tp 2 --low-bit".split())
    assert f"Neighbours of 30 sentences: {encoder.name}, emulated ranks; NOTHING WAS CODED" in small.stdout
    assert "feature-int4, tp 2: nothing was coded: every sum has fewer than 32768 elements (small)" in caplog.text


def test_of_a_masked_language_model_the_encoder_is_compared(tmp_path: Path):
    folder = write_encoder(tmp_path, head="masked")
    row, *_ = run(EVALUATE, config(folder, formats=("int8",), sentences=30)).rows
    assert (row["kind"], row["nearest"], row.get("perplexity")) == (loading.ENCODER, 1, None)
    first, second = (loading.load_model(str(folder), "float32", torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    weights = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "layer.1" not in k}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no weights .*layer\.1\..*; allowed: a complete checkpoint"):
        loading.load_model(str(folder), "float32", torch.device("cpu"))


def test_vectors_and_their_agreement_by_hand(encoder: Path):
    model = loading.load_model(str(encoder), "float32", torch.device("cpu"))
    tokenizer = load_tokenizer(str(encoder), key="tokenizer").hugging_face()
    texts = ["The 3 cats sat on the 4 mats; 2 dogs did not.", "The 5 cats."]
    for text, vector in zip(texts, embed(model, tokenizer, texts), strict=True):  # of which the second is padded
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(vector, states.mean(0))
    torch.manual_seed(0)
    exact, other = torch.randn(20, 8), torch.randn(20, 8)
    assert agreement(exact, 3 * exact) == pytest.approx({"nearest": 1, "nearest_10": 1, "rank_correlation": 1})
    distances = [torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=-1) for x in (exact, other)]
    expected = 0
    for i in range(20):
        near = [set(sorted(set(range(20)) - {i}, key=lambda j, d=d: -float(d[i, j]))[:10]) for d in distances]
        expected += len(near[0] & near[1])
    assert agreement(exact, other)["nearest_10"] == pytest.approx(expected / 200)
    with pytest.raises(ValueError, match="11 sentences have no 10 neighbours"):
        agreement(exact[:11], exact[:11])


def test_generation_is_compared_token_by_token(tmp_path: Path):
    folder = write_checkpoint(tmp_path)
    settings = config(folder, formats=("int8",), sequences=4, generate=5)
    first, *others = run(EVALUATE, settings).rows
    assert (first["same_tokens"], first["tokens_before"], first["same_texts"]) == (1, 5, 1)
    assert all(0 <= row["tokens_before"] <= 5 for row in others)
    same = same_tokens(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 9, 3], [4, 5, 6]]))
    assert same == pytest.approx({"same_tokens": 5 / 6, "tokens_before": 2, "same_texts": 0.5})


def test_real_ranks_find_the_neighbours_of_emulated_ones(encoder: Path, ranks: Ranks):
    settings = CalibrationConfig(model=str(encoder), text=(str(encoder / "text.txt"),), length=32, sequences=4)
    assert len(run(CALIBRATE, settings).rows) == 4
    sequences, _ = read_text(settings, encoder=True)
    assert all(drawn[0] == 2 and drawn[-1] == 3 for drawn in sequences.draw(4, 0))
    emulated = run(EVALUATE, config(encoder, tps=(2,), low_bit=True, sentences=30, calibration_text=())).rows
    for real in ranks.run(on_a_rank, str(encoder), ranks=2, timeout=120):
        assert real == [row["rank_correlation"] for row in emulated]


def on_a_rank(folder: str) -> list[float]:
    rows = run(EVALUATE, config(Path(folder), tps=(), low_bit=True, sentences=30, calibration_text=())).rows
    return [row["rank_correlation"] for row in rows]
