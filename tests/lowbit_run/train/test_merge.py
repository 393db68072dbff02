"""Adapters merged into the weights that they were trained on: what PEFT merges, and what other programs load."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lowbit_run.config import ConfigError
from lowbit_run.train import TrainConfig, train
from lowbit_run.train.checkpoints.save import TransientError
from lowbit_run.train.merge import Merged
from tests.forked import CONTEXT
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, answering, base, losses
from tests.processes import Ranks
from tests.refused import refused

peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
V_SHAPED = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}


def in_4_bits(path: str, folder: Path) -> str:
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=bits)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "tied", "weights", "dtype", "pipeline"),
    [
        ("qwen2", True, "nf4", "fp16", V_SHAPED),
        ("gpt2", True, None, None, {}),  # Conv1D, whose matrices are transposed
        pytest.param("llama", False, "int8", "bf16", ONE, marks=pytest.mark.slow),
        ("llama", True, "stored", None, ONE),
    ],
)
def test_merged_weights_are_those_that_peft_merges(
    ranks: Ranks, tmp_path: Path, family: str, tied: bool, weights: str | None, dtype: str | None, pipeline: Any
):
    path, stored = base(tmp_path, family, tied=tied, dim=64, ffn=128), weights == "stored"
    if stored:
        path, weights = in_4_bits(path, tmp_path / "small"), None
    run = {"steps": 2, "save_model": True, "save_merged": True, "save_dtype": dtype}
    config = answering(
        tmp_path, model={"pretrained": path, "weights": weights}, lora={"rank": 4}, run=run, pipeline=pipeline,
        data={"batch": 4, "tokenizer": "bytes" if stored or family == "qwen2" else ""},
    )  # fmt: skip
    train(config) if pipeline is ONE else ranks.run(losses, config)
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if stored else torch.float32)
    plain = plain.dequantize() if stored else plain
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "run" / "model").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged", dtype="auto").state_dict()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(dtype), torch.bfloat16 if stored else torch.float32)
    assert merged.keys() == expected.keys()
    assert all(value.dtype == kind and torch.equal(value, expected[name].to(kind)) for name, value in merged.items())
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "run").rglob("*.safetensors")}
    os.umask(mask := os.umask(0))
    assert set(modes.values()) == {0o666 & ~mask}


def test_what_cannot_be_merged_is_refused(tmp_path: Path):
    path, one = base(tmp_path), "allowed: with adapters that are saved"
    given = {"run": {"save_model": True, "save_merged": True}, "model": {"pretrained": path}}
    refused(
        (lambda: answering(tmp_path, **given), ConfigError, f"save_merged is true, lora.rank is 0 .*; {one}"),
        (lambda: answering(tmp_path, lora={"rank": 2}, **given | {"run": {"save_merged": True}}), ConfigError, one),
    )


def files_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for name in ("model", "merged") for p in (run / name).iterdir()}


def no_room_for_tokens(part: Path, *_: Any) -> None:
    if "merged" in part.name:
        raise Exception("No space left on device (os error 28)")  # of no kind: as the package tokenizers raises it


def no_room_for_weights(file: int, *_: Any) -> None:
    if "merged" in os.readlink(f"/proc/self/fd/{file}"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed_in_the_middle(config: TrainConfig) -> None:
    count = 0

    def merge_(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Merged, "merge_", merge_):
        train(config)


@pytest.mark.slow
def test_an_export_that_ends_early_leaves_the_checkpoint_and_begins_again(
    tmp_path: Path,
):
    run = {"steps": 1, "save_model": True, "save_merged": True, "checkpoint_every": 1}
    model = {"pretrained": base(tmp_path, dim=64, ffn=128), "weights": "nf4"}
    config = answering(tmp_path, model=model, lora={"rank": 4}, data={"batch": 4}, run=run, pipeline=ONE)
    train(config)
    expected, resumed, folder = files_of(tmp_path / "run"), again(config, run=RESUME), tmp_path / "run"
    checkpoints = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}

    def ends_early(end: Callable[[], None]) -> None:
        for name in ("model", "merged"):
            shutil.rmtree(folder / name, ignore_errors=True)
        end()
        assert not (folder / "merged").exists()
        assert {path: path.read_bytes() for path in checkpoints} == checkpoints

    def on_a_full_disk() -> None:
        with pytest.raises(TransientError, match=r"write the model, .*\.merged\.lowbit-part: No space left on device"):
            train(resumed)
        assert not list(folder.glob("*.lowbit-part")), "the room is given back"

    def killed() -> None:
        process = CONTEXT.Process(target=killed_in_the_middle, args=(resumed,))
        process.start()
        process.join(LIMIT)
        assert process.exitcode == -signal.SIGKILL

    fails = {
        "os.posix_fallocate": no_room_for_weights,
        "lowbit_run.train.save_model.save_companions": no_room_for_tokens,
    }
    for place, fail in fails.items():
        with mock.patch(place, fail):
            ends_early(on_a_full_disk)
    ends_early(killed)
    train(resumed)
    assert files_of(folder) == expected
