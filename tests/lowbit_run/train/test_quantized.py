"""Frozen weights in few bits with adapters: what bitsandbytes and PEFT compute in one process."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.qlora import by_peft
from lowbit_run.config import ConfigError
from lowbit_run.train import TrainConfig, weights
from lowbit_run.train.prepare import prepare
from tests.lowbit_run.train.runs import ONE, RESUME, again, answering, base, curve, losses
from tests.processes import Ranks
from tests.refused import refused

peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}


def quantized(folder: Path, kind: str, **sections: dict[str, Any]) -> TrainConfig:
    model = {"pretrained": base(folder, dim=64, ffn=128), "weights": kind, "double_quantization": kind == "nf4"}
    run = {"steps": 3, "save_model": True} | sections.pop("run", {})
    return answering(folder, model=model, lora={"rank": 4}, data={"batch": 4}, run=run, **sections)


@pytest.mark.parametrize(("kind", "precision"), [("nf4", "bf16"), ("nf4", "fp32"), ("int8", "bf16")])
def test_a_pipeline_trains_the_adapters_that_peft_and_bitsandbytes_do(
    ranks: Ranks, tmp_path: Path, kind: str, precision: str
):
    config = quantized(tmp_path, kind, run={"precision": precision})
    expected, (*_, adapters) = zip(*by_peft(config), strict=True)
    assert ranks.run(losses, config)[0][:-1] == pytest.approx(expected, abs=2e-4)
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert saved.keys() == adapters.keys()
    assert all(value.dtype == torch.float32 for value in saved.values())
    plain = AutoModelForCausalLM.from_pretrained(config.model.pretrained)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "run" / "model")
    assert any(torch.any(value != 0) for name, value in loaded.named_parameters() if "lora_B" in name)


def test_a_resume_with_weights_in_4_bits_has_the_same_losses(ranks: Ranks, tmp_path: Path):
    config = quantized(tmp_path, "nf4", run={"steps": 4, "checkpoint_every": 2, "save_model": False})
    ranks.run(losses, config)
    whole = curve(config)
    for rank in (0, 1):
        (tmp_path / "run" / "checkpoints" / "step-00000004" / f"rank-{rank}" / "manifest.json").write_text("{}")
    ranks.run(losses, again(config, run=RESUME))
    assert curve(config) == whole


def test_a_folder_that_is_quantized_stays_as_it_is(ranks: Ranks, tmp_path: Path):
    config = quantized(tmp_path, "nf4")
    bits = BitsAndBytesConfig(**KINDS["nf4"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        config.model.pretrained, dtype=torch.bfloat16, quantization_config=bits
    )
    model.save_pretrained(tmp_path / "small")
    text = {"tokenizer": "bytes"}  # the folder holds none
    small = {"pretrained": str(tmp_path / "small"), "weights": None, "double_quantization": False}
    assert ranks.run(losses, again(config, model=small, data=text))[0] == ranks.run(losses, config)[0]


def test_weights_in_few_bits_that_cannot_be_trained_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = quantized(tmp_path, "nf4", pipeline=ONE)
    one = "allowed: with lora.rank of at least 1"
    refused(
        (lambda: again(config, lora={"rank": 0}), ConfigError, f"model.weights is nf4 and lora.rank is 0; {one}"),
        (
            lambda: again(config, model={"weights": "int8"}),
            ConfigError,
            "double_quantization is true and model.weights",
        ),
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "lowbit_run.train.weights.find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )  # fmt: skip
    refused(
        (lambda: prepare(config, ranks=1), ConfigError, "model.weights is nf4, which needs the package bitsandbytes")
    )


@pytest.mark.parametrize("shape", [(64, 128), (50, 100), (1, 3)])
def test_weights_that_are_quantized_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]):
    functional = pytest.importorskip("bitsandbytes").functional
    matrix, pieces = torch.randn(shape, dtype=torch.bfloat16), weights._InPieces()
    monkeypatch.setattr(weights, "_PIECE", 1024)
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles for each shape
        whole, state = functional.quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
        with pieces:
            packed, others = functional.quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
        assert torch.equal(packed, whole)
        assert torch.equal(others.absmax, state.absmax)
        assert torch.equal(functional.dequantize_4bit(packed, others), functional.dequantize_4bit(whole, state))
