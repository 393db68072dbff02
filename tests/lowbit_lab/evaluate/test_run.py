"""`lowbit calibrate` and `lowbit evaluate` on a tiny checkpoint: results, errors, real ranks against emulated ones."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.collectives import AgreementError
from lowbit.tensor_parallel import Calibration, CalibrationError
from lowbit_lab.evaluate import CalibrationConfig, EvaluationConfig
from lowbit_lab.evaluate.commands import CALIBRATE, EVALUATE
from lowbit_run.report import run
from tests.command_line import invoke
from tests.lowbit_lab.evaluate.models import BOOLQ, WINOGRANDE
from tests.processes import Ranks

SHORT: dict[str, Any] = {"length": 32, "threads": 1}
FORMATS = ("feature-int4", "feature-int4-static", "int8")


@pytest.fixture(scope="module")
def calibrated(folder: Path) -> Path:
    """A calibration for two ranks, beside the checkpoint."""
    run(CALIBRATE, calibration_config(folder))
    return folder / "calibration-tp2.safetensors"


def calibration_config(folder: Path, **more: Any) -> CalibrationConfig:
    text = (str(folder / "text.txt"),)
    return CalibrationConfig(**{"model": str(folder), "text": text, "sequences": 8, "features": "1", **SHORT, **more})


def evaluation_config(folder: Path, **more: Any) -> EvaluationConfig:
    text = (str(folder / "text.txt"),)
    return EvaluationConfig(**{"model": str(folder), "text": text, "sequences": 8, "small": 0, **SHORT, **more})


def test_without_a_terminal_the_log_says_how_far_a_calibration_is(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lowbit.tensor_parallel.observed._PROGRESS_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        run(CALIBRATE, calibration_config(folder, output=str(tmp_path / "ranges.safetensors")))
    assert "calibrating: 8 of 8" in caplog.text
    assert "choosing bits: measuring what coding does to the outputs, " in caplog.text
    assert "choosing bits: 1 of " in caplog.text


def test_rows_of_formats_and_ranks(folder: Path, calibrated: Path, caplog: pytest.LogCaptureFixture):
    settings = evaluation_config(
        folder, tps=(1, 2, 4), formats=("int4", "feature-int4", "int8"),
        calibration_text=(str(folder / "text.txt"),), calibration_sequences=4, dtype="bfloat16",
    )  # fmt: skip
    seen: list[int] = []
    report = run(EVALUATE, settings, on_rows=lambda rows: seen.append(len(rows)))
    rows = {(row["format"], row["tp"]): row for row in report.rows}
    names = ("bf16", "int4", "feature-int4", "int8")
    assert list(rows) == [("bf16", 1)] + [(name, tp) for tp in (2, 4) for name in names]
    assert seen == list(range(1, 10))
    assert rows["bf16", 2]["bits_per_value"] == 16
    int4 = 4.5  # 16 bits of a gain over 32 features; of five sums the embedding's stays in bfloat16
    assert rows["int4", 2]["bits_per_value"] == pytest.approx((4 * int4 + 16) / 5, abs=0.01)
    for (name, tp), row in rows.items():
        assert row["tokens"] == 256
        assert row["kept"] == rows["bf16", tp]["perplexity"] / row["perplexity"]
        if tp > 1:
            assert len(row["layers"]) == 4
        if name in ("bf16", "int8"):
            assert row["logits_error"] is None or row["logits_error"] < 0.02
    assert rows["int4", 2]["sum_error"] > 5 * rows["int8", 2]["sum_error"] > 0
    assert rows["bf16", 2]["sum_error"] < 0.005
    assert rows["bf16", 1]["algorithm"] is None
    assert all(row["algorithm"] == "one_shot" and row["coded"] == 0.8 for row in report.rows[1:])
    assert caplog.text.count("the calibration was made from the same") == 1


def test_calibrations_are_formats_and_say_what_they_send(
    folder: Path, calibrated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A budget by default; `--bits uniform` as before there was one; sums alone with `--inputs none`."""
    base = f"--text {folder / 'text.txt'} --length 32 --sequences 8 --features 1 --threads 1"
    files = {name: tmp_path / f"{name}.safetensors" for name in ("default", "uniform", "sums")}
    for (name, file), more in zip(files.items(), ("", "--bits uniform", "--inputs none --bits 6"), strict=True):
        result = invoke("calibrate", str(folder), *f"{base} --output {file} {more}".split())
        assert result.exit_code == 0, result.output
        said = "2 layers send their inputs, whose weights take 0.0 MB more on each rank" in result.stdout
        assert said == (name == "default")
    loaded = {name: Calibration.load(file) for name, file in files.items()}
    assert loaded["default"].fingerprint() == Calibration.load(calibrated).fingerprint()
    assert len(loaded["default"].inputs) == 2
    assert {*loaded["uniform"].bits.values()} == {4}
    assert not loaded["uniform"].inputs
    assert (loaded["sums"].inputs, loaded["sums"].settings["bits"]) == ({}, 6)
    again = invoke("calibrate", str(folder), *f"{base} --output {files['sums']} --continue".split())
    assert again.exit_code == 0, again.output
    assert "replaces" not in caplog.text
    continued = Calibration.load(files["sums"])
    invoke("calibrate", str(folder), *f"{base} --output {files['uniform']} --bits uniform".split())
    assert "uniform.safetensors holds a calibration (8 of 32 tokens from" in caplog.text
    assert (continued.count, continued.inputs, continued.settings["bits"]) == (14, {}, 6)
    (tmp_path / "other").mkdir()
    alike = tmp_path / "other" / "sums.safetensors"
    alike.write_bytes(files["sums"].read_bytes())
    formats = ("int4", "feature-int4", *map(str, files.values()), str(alike))
    rows = run(EVALUATE, evaluation_config(folder, tps=(2,), formats=formats, sequences=2)).rows
    names = ["bf16", "int4", "feature-int4", "default", "uniform", str(files["sums"]), str(alike)]
    assert [row["format"] for row in rows] == names
    assert rows[2]["logits"] == rows[3]["logits"]
    assert rows[4]["bits_per_value"] - rows[1]["bits_per_value"] == pytest.approx((5.0 - 4.5) * 4 / 5)
    assert rows[5]["sum_error"] < rows[4]["sum_error"]


def test_a_calibration_of_another_model_is_refused_before_anything_is_measured(
    folder: Path, calibrated: Path, tmp_path: Path
):
    other = str(tmp_path / "other.safetensors")
    dataclasses.replace(Calibration.load(calibrated), model="f" * 16).save(other)
    for given in ({"formats": (other,)}, {"formats": ("feature-int4",), "calibrations": (other,)}):
        with pytest.raises(CalibrationError, match=f"the calibration is for the model {'f' * 16}, this is"):
            run(EVALUATE, evaluation_config(folder, tps=(1, 2), **given), on_rows=lambda _: pytest.fail("measured"))


def test_static_ranges_by_one_name(folder: Path, calibrated: Path, tmp_path: Path):
    """Of a calibration made with --gain static as it says; of others, the paper's format from the same averages."""
    output = tmp_path / "made" / "static"
    made = f"--text {folder / 'text.txt'} --length 32 --sequences 8 --output {output}"
    files = f"--json {tmp_path}/c.json --png {tmp_path}/c.png"
    result = invoke("calibrate", str(folder), *f"{made} {files} --features 1 --gain static".split())
    assert result.exit_code == 0, result.output
    assert "layers.1.mlp.down_proj" in result.stdout
    assert [len(row["aggregated"]) for row in json.loads((tmp_path / "c.json").read_text())["rows"]] == [32] * 4
    assert (tmp_path / "c.png").stat().st_size > 5000
    assert "bits per value, as published: no gain for each token\n" in result.stdout
    assert Calibration.load(output).gain == "static"
    ending = result.stdout.splitlines()[-4:]
    assert [line.split()[0] for line in ending] == ["ranges", "next", "results", "page"]
    assert f"lowbit evaluate {folder} --low-bit --tp 2" in " ".join(result.stdout.split())
    settings = evaluation_config(folder, tps=(2,), formats=("feature-int4-static",), dtype="bfloat16")
    theirs = run(EVALUATE, dataclasses.replace(settings, calibrations=(str(output),))).rows[1]
    derived = run(EVALUATE, dataclasses.replace(settings, calibrations=(str(calibrated),))).rows[1]
    ours = run(EVALUATE, dataclasses.replace(settings, formats=("feature-int4",))).rows[1]
    one = (16 + 4 * 32) / 32  # an outlier, and 31 codes in whole bytes; of five sums the embedding's stays in bfloat16
    assert theirs["bits_per_value"] == pytest.approx((4 * one + 16) / 5)
    assert derived["bits_per_value"] == pytest.approx((4 * 4 + 16) / 5), "E // 64 outliers: none"
    assert theirs["format"] == derived["format"] == "feature-int4-static"
    assert theirs["sum_error"] > ours["sum_error"]
    again = f"{made} --seed 1 --continue"
    for gain, wanted in (("", "static"), ("--gain token", "token")):
        result = invoke("calibrate", str(folder), *again.split(), *gain.split())
        assert result.exit_code == 0, result.output
        assert Calibration.load(output).gain == wanted
    assert (Calibration.load(output).count, Calibration.load(output).settings["k"]) == (21, 1)
    assert list(output.parent.iterdir()) == [output]


def test_static_ranges_do_not_pass_for_another_format(folder: Path, tmp_path: Path):
    config = calibration_config(folder, output=str(tmp_path / "c"), gain="static", sequences=2)
    run(CALIBRATE, config)
    for name in ("int4", "feature-int4"):
        settings = evaluation_config(folder, tps=(2,), formats=(name,), calibrations=(config.output,), sequences=1)
        line = f"format is {name}, which has a gain for each token, and the calibration was made with --gain static; "
        with pytest.raises(CalibrationError, match=line):
            run(EVALUATE, settings)


@pytest.mark.parametrize(("dtype", "own"), [("float32", 32), ("bfloat16", 16)])
def test_values_that_were_not_coded_count_with_their_dtype(folder: Path, calibrated: Path, dtype: str, own: int):
    settings = evaluation_config(folder, tps=(2,), formats=("int4",), batch=3, small=3000, dtype=dtype)
    rows = run(EVALUATE, settings).rows  # 3, 3 and 2 windows at a time: the last have 2048 values a sum
    coded = 0.75 * 4 / 5  # the embedding's sum is none of them
    assert [row["coded"] for row in rows] == pytest.approx([coded, coded])
    assert [row["bits_per_value"] for row in rows] == pytest.approx(
        [coded * bits + (1 - coded) * own for bits in (16, 4.5)]
    )
    (folder / "winogrande.jsonl").write_text("\n".join(map(json.dumps, WINOGRANDE)))
    tasks = (f"winogrande={folder / 'winogrande.jsonl'}",)
    exact, row = run(EVALUATE, dataclasses.replace(settings, formats=("feature-int4",), small=None, tasks=tasks)).rows
    assert (row["coded"], row["bits_per_value"], row["algorithm"]) == (0, own, None)
    assert row["kept"] is None
    assert (row["score_kept"], row["scores_kept"], row["scores"]) == ({}, None, exact["scores"])


def test_gemma_2_computes_with_its_own_attention(folder: Path, tmp_path: Path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    settings = evaluation_config(folder, model=str(tmp_path), tokenizer="bytes", formats=("int8",))
    rows = run(EVALUATE, settings).rows
    assert [row["tp"] for row in rows] == [1, 2, 2]
    assert all(row["kept"] == pytest.approx(1, abs=0.01) for row in rows)


def test_real_and_emulated_ranks_agree_to_the_last_bit(folder: Path, calibrated: Path, ranks: Ranks):
    (folder / "winogrande.jsonl").write_text("\n".join(map(json.dumps, WINOGRANDE)))
    settings = evaluation_config(folder, tps=(2,), formats=FORMATS, tasks=(f"winogrande={folder}/winogrande.jsonl",))
    emulated = run(EVALUATE, settings).rows
    real = ranks.run(on_a_rank, str(folder), ranks=2, timeout=120)
    # not the bits: here embeddings stay whole
    fields = ("format", "tp", "logits", "loss", "kept", "calibration", "scores", "score_kept")
    for rows, _, _ in real:
        assert [[r[f] for f in fields] for r in rows] == [[r[f] for f in fields] for r in emulated]
        assert all(row["real"] and row["sum_error"] is None for row in rows)
    assert real[0][1] == real[1][1] == Calibration.load(calibrated).fingerprint()
    assert real[0][2] == real[1][2]
    assert "No such file" in real[0][2]


def on_a_rank(folder: str) -> tuple[Any, str, str]:
    """Rows of the evaluation, the fingerprint of a calibration made on real ranks, and the error for a missing one."""
    path = Path(folder)
    file = path / ("nowhere" if torch.distributed.get_rank() else "calibration-tp2.safetensors")
    with pytest.raises(AgreementError) as missing:
        run(EVALUATE, evaluation_config(path, calibrations=(str(file),)))
    rows = run(EVALUATE, evaluation_config(path, formats=FORMATS, tasks=(f"winogrande={path}/winogrande.jsonl",))).rows
    settings = calibration_config(path, output=str(path / "real.safetensors"))
    run(CALIBRATE, settings)
    torch.distributed.barrier()
    return rows, Calibration.load(settings.path).fingerprint(), str(missing.value)


WITH_FILES = "evaluate {model} --tp 2 --low-bit --text {text} --task"
CUT = "allowed: what divides the model's heads, 1, 2, 4"
REFUSED = [
    ("calibrate nowhere", "allowed: a local folder with a Hugging Face checkpoint"),
    ("calibrate {model} --ranks 3", f"ranks is 3; {CUT}"),
    ("calibrate {model} --length 65", "length is 65; the model has 64 positions"),
    ("calibrate {model} --features E/0", "features is 'E/0'; allowed: 'E/64'"),
    ("calibrate {model} --features E/1", "features is 'E/1'; allowed: 'E/2' or another share, not all features"),
    ("calibrate {model} --features 32 --length 8 --text {text}", "features is '32'; allowed: 0 to 31, fewer than"),
    ("calibrate {model} --length 64 --text {short}", "has 9 tokens; allowed: at least one sequence of 64 (65 tokens)"),
    ("evaluate {model} --length 8 --text {text} --format int5x", "format is 'int5x'; allowed: int4, feature-int4"),
    ("evaluate {model} --length 8 --text {text} --format feature-int4-statik",
     "feature-int4, feature-int4-static, a file of `lowbit calibrate`, or a codec\n"),
    ("evaluate {model} --length 8 --text {text} --tp 4 --format {calibrated}",
     "calibration-tp2.safetensors, a calibration for 2 ranks, and tp is 4; allowed: --tp 2"),
    ("evaluate {model} --length 8 --text {text} --tp 2 --format none.safetensors", "none.safetensors: No such file"),
    ("calibrate {model} --bits uneven", "bits is 'uneven'; allowed: "),
    ("evaluate {model} --length 8 --text {text} --tp 3", f"tp is 3; {CUT}"),
    ("calibrate {model} --gain row", "error: gain is 'row'; allowed: token, static or nothing"),
    ("evaluate {model} --length 8 --calibration {short}", "not a safetensors file"),
    ("evaluate {model} --length 8 --text {text} --low-bit --tp 1,2,4 --calibration {calibrated}",
     "calibration is for 2 ranks and tp is 4; allowed: a file for each"),
    ("evaluate {model} --calibration a --calibration-text b", "allowed: one of them"),
    ("evaluate {model} --calibration a --calibration-sequences 9", "calibration-sequences is 9 and calibration is a"),
    ("calibrate {model} --length 8 --text {text} --output {short}/c",
     "short.txt/c cannot be written: File exists; allowed: a file in a folder that can be written"),
    ("calibrate {model} --length 8 --text {text} --output {model}/model.safetensors",
     "model.safetensors, which is no calibration that can be read; allowed: a new file"),
    ("evaluate {model} --task-folder here", "task-folder is 'here'; allowed: with --task"),
    ("evaluate {model} --limit 3", "limit is 3; allowed: with --task"),
    ("evaluate {model} --low-bit --format int8", "format is int8 and low-bit is given; allowed: one of them"),
    ("evaluate {encoder} --length 8 --text {text} --generate 4",
     "generate is 4; allowed for a causal language model only, and this is: encoder"),
    ("evaluate {encoder} --length 8 --text {text} --task x", "task is x; allowed for a causal"),
    ("evaluate {encoder} --length 8 --text {short}", "has 0 sentences of 40 to 400 characters; allowed: at least 12"),
    ("evaluate {encoder} --length 8 --text {encoder}/text.txt --sentences 11", "sentences is 11; allowed: at least 12"),
    ("evaluate {model} --length 8 --text {text} --sentences 30", "sentences is 30; allowed for encoders only"),
    ("calibrate {encoder} --length 8 --ranks 3", f"ranks is 3; {CUT}"),
    (f"{WITH_FILES} arc_easy=nowhere.jsonl", "arc_easy=nowhere.jsonl cannot be read: No such file or directory; all"),
    (f"{WITH_FILES} arc_easy={{text}}", "text.txt: '.txt' cannot be read; allowed: .jsonl, .json or .parquet"),
    (f"{WITH_FILES} arc_easy={{model}}", "cannot be read; allowed: .jsonl, .json or .parquet"),
    (f"{WITH_FILES} arc_easy={{files}}/odd.json", "odd.json cannot be read: Is a directory; allowed: a local file"),
    (f"{WITH_FILES} arc_easy={{model}}/config.json", "config.json line 1 is not JSON"),
    (f"{WITH_FILES} arc_easy={{files}}/list.json", "list.json line 1 is not a valid question of arc_easy"),
    (f"{WITH_FILES} boolq={{files}}/winogrande.jsonl", "line 1 is not a valid question of boolq (no 'passage'); allow"),
    (f"{WITH_FILES} arc={{files}}/list.json", "allowed with a file: NAME=FILE of arc_challenge, arc_easy, boolq"),
    (f"{WITH_FILES} boolq=", "task is 'boolq='; allowed with a file: NAME=FILE of"),
    (f"{WITH_FILES} boolq=a.json,boolq", "task is boolq=a.json, boolq; allowed: each task once"),
    (f"{WITH_FILES} boolq={{files}}/boolq.jsonl --task-folder x", "task-folder is 'x'; allowed: with --task"),
    (f"{WITH_FILES} boolq={{files}}/boolq.jsonl --length 2", "boolq question 1 has a choice of 3 tokens; allowed: 1 t"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "line"), REFUSED)
def test_bad_input_is_one_line_before_a_model_is_evaluated(
    command: str, line: str, folder: Path, encoder: Path, calibrated: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    if command.startswith("evaluate"):
        monkeypatch.setattr("lowbit_lab.evaluate.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "boolq.jsonl").write_text("\n".join(map(json.dumps, BOOLQ)))
    (tmp_path / "winogrande.jsonl").write_text("\n".join(map(json.dumps, WINOGRANDE)))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "odd.json").mkdir()
    values = {"model": folder, "encoder": encoder, "calibrated": calibrated, "files": tmp_path}
    values |= {"text": folder / "text.txt", "short": tmp_path / "short.txt"}
    more = " --length 32" if "--task" in command and "--length" not in command else ""
    result = invoke(*(command + more).format(**values).split())
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert result.stderr.count("error:") == 1
