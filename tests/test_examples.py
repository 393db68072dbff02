"""The examples run as they are."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from lowbit.codecs import parse
from lowbit.wire.checksum import CHECKSUM_BYTES
from tests.forked import run_script

pytestmark = pytest.mark.docs
EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name: str, *arguments: str, folder: Path, ranks: int = 0) -> str:
    done = run_script(EXAMPLES / name, *arguments, ranks=ranks, folder=folder)
    assert done.code == 0, done.output
    return done.output


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_the_pipeline_learns_in_few_bits(tmp_path: Path):
    output = output_of("pipeline.py", "--steps", "20", ranks=2, folder=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 2
    assert losses[-1] < 3.6, output  # guessing costs log(256) = 5.5
    # A quarter of the steps at 32 bits, the rest at 3.2.
    assert re.search(r"rank 0 sent [\d.]+ MB, 10\.\d bits", output), output


def test_data_parallel_ranks_learn_the_same():
    """Under torchrun itself, and to the very end of the interpreter, which a DDP hook might hold up."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLES / "data_parallel.py"), "--steps", "16"]
    done = subprocess.run([sys.executable, *command, *script], text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) == 4
    assert losses[-1] < 3.6, done.stdout
    assert "bit for bit: yes" in done.stdout


def test_one_line_makes_autograd_keep_less(tmp_path: Path):
    output = output_of("fine_tune.py", "--steps", "8", "--sequence", "64", "--output", "tuned", folder=tmp_path)
    after, before = re.findall(r"([\d.]+) MB", output)
    assert float(after) < 0.4 * float(before)
    losses = losses_in(output)
    assert losses[-1] < 4.5 < 5 < losses[0], output
    tuned = LlamaForCausalLM.from_pretrained(tmp_path / "tuned")
    ids = torch.tensor([list((EXAMPLES / "fine_tune.py").read_bytes()[:64])])
    assert tuned(input_ids=ids, labels=ids).loss < 4.5


@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
def test_frameworks_train_with_stored_gradients(framework: str, tmp_path: Path):
    output = output_of("frameworks.py", framework, "--steps", "8", folder=tmp_path)
    ((first, last),) = re.findall(r"loss ([\d.]+) at first, ([\d.]+) after 8 steps", output)
    assert float(last) < 4.8 < 5.3 < float(first), output
    assert float(re.findall(r"([\d.]+) bytes per parameter", output)[0]) < 1.1


def test_a_sequence_longer_than_the_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script = str(EXAMPLES / "fine_tune.py")
    monkeypatch.setattr(sys, "argv", [script, "--sequence", "100000"])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert "--sequence is 100000; allowed: 2 to" in capsys.readouterr().err


def test_an_own_codec_is_compared_with_others(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(EXAMPLES / "own_codec.py"))
    compare = example["main"]
    compare.__globals__.update(STEPS=4, WARMUP=1, BATCH=2)
    compare()
    rows = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert list(rows) == ["fp32", "tah-quant-published", "aq-sgd", "transform", "your own"]
    assert rows["fp32"][:2] == ["32.00", "32.00"]
    assert rows["your own"][:2] == ["3.50", "6.50"]
    assert all(float(loss) < 5.6 for _, _, loss in rows.values())  # guessing costs log(256) = 5.5


def test_learned_boundaries_send_what_their_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example = runpy.run_path(str(EXAMPLES / "learned_boundary.py"))
    compare = example["main"]
    compare.__globals__.update(LENGTH=32)
    monkeypatch.setattr(sys, "argv", ["learned_boundary.py", "--steps", "2"])
    compare()
    rows = {
        line[:24].strip(): [float(x) for x in line[24:].split()] for line in capsys.readouterr().out.splitlines()[1:]
    }
    assert list(rows) == list(example["ROWS"])
    checksums = 2 * CHECKSUM_BYTES / (compare.__globals__["BATCH"] * 32)  # one forward, one backward, of each message
    sent = {name: each[0] for name, each in rows.items()}
    assert sent["FP32"] == pytest.approx(8 * 128 + checksums, abs=0.05)
    assert sent["rank 16"] == pytest.approx(8 * 16 + checksums, abs=0.05)
    assert sent["rank 16 + ids"] == pytest.approx(8 * 16 + checksums + 2, abs=0.05)
    assert sent["rank 16 + ids + INT4"] == pytest.approx(2 * 16 * 4.5 / 8 + checksums + 2, abs=0.05)
    assert sent["ids only"] == 2
    assert all(5 < loss < 9 for *_, loss in rows.values())  # guessing costs log(1024) = 6.9


def test_the_notebook_measures_formats(capsys: pytest.CaptureFixture[str]):
    notebook = json.loads((EXAMPLES / "measure_format.ipynb").read_text(encoding="utf-8"))
    settings, *cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in (settings, *cells))
    names: dict[str, Any] = {}
    exec("".join(settings["source"]), names)
    assert not names["MODEL"]
    assert not names["TEXT"]
    small = {"FORMATS": ["int8", "int2", "transform"], "STAGES": [2, 4], "WINDOWS": 2, "LENGTH": 128}
    names |= small
    for cell in cells:
        exec("".join(cell["source"]), names)
    rows = {(name, stages): (bits, ratio) for name, stages, bits, _, ratio in names["rows"]}
    assert list(rows) == [(name, stages) for name in small["FORMATS"] for stages in small["STAGES"]]
    for (name, stages), (bits, _) in rows.items():
        shape = torch.Size((1, 128, names["model"].config.hidden_size))
        sent = parse(name).nbytes(shape) + CHECKSUM_BYTES
        assert bits == pytest.approx(8 * sent / shape.numel()), (name, stages)
    for stages in small["STAGES"]:
        assert rows["int8", stages][1] == pytest.approx(1, abs=0.01)
        assert abs(rows["int2", stages][1] - 1) > 5 * abs(rows["int8", stages][1] - 1), "the codecs are in the model"
    assert names["held_out_loss"]() == names["exact"], "the codecs are out of the model again"
    assert f"int8{2:27}" in capsys.readouterr().out
