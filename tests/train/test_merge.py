"""Adapters merged into the weights that they were trained on: what PEFT merges, and what other programs load."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lowbit.config import ConfigError
from lowbit.train import train
from tests.processes import Ranks
from tests.refused import refused
from tests.train.runs import ONE, answering, base, losses

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
        ("llama", False, "int8", "bf16", ONE),
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
        tmp_path, model={"pretrained": path, "weights": weights}, lora={"rank": 4}, data={"batch": 4}, run=run,
        pipeline=pipeline,
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
