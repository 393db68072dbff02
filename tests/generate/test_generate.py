"""Answers over several ranks: the tokens of Transformers' `generate` in one process, with the same weights."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from lowbit.generate.prepare import Prepared, prepare
from lowbit.generate.rank import Answering
from lowbit.generate.settings import GenerateSettings
from lowbit.train.cut import CUT, attention_of
from lowbit.train.pretrained import ByteTokenizer
from lowbit.train.weights import quantization
from tests.processes import Ranks
from tests.train.test_families import _config, _model

peft = pytest.importorskip("peft")
QUICK = ("gemma3_text", "gpt2", "qwen3_next")
PROMPTS = [[7, 9, 11, 13, 8, 22, 41], [50, 3, 17, 17, 5, 33, 9], [30, 31, 32, 33]]
NEW = 8


def saved(folder: Path, kind: str, **sizes: int) -> str:
    """A folder with a tiny random model of this type, and a tokenizer."""
    config = _config(kind, **sizes)
    config._attn_implementation = attention_of(config)
    _model(config).save_pretrained(folder)
    ByteTokenizer().hugging_face().save_pretrained(folder)
    return str(folder)


def settings(folder: str | Path, **given: Any) -> GenerateSettings:
    return GenerateSettings(
        folder=str(folder),
        **{"weights": "fp32", "format": "fp32", "tokens": NEW, "threads": 1, "device": "cpu"} | given,
    )


def answers(given: GenerateSettings, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The answers of a rank, in the order of the prompts."""
    prepared = prepare(given, rank=1, ranks=dist.get_world_size())  # as on a rank without prompts of its own
    return [ids for _, ids in sorted(Answering(prepared).answers(prompts))]


def in_one_process(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """What Transformers' own `generate` writes to each prompt alone."""
    usual = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    texts = [model.eval().generate(torch.tensor([ids]), **usual | options) for ids in prompts]
    return [text[0, len(ids) :].tolist() for text, ids in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(CUT - {*QUICK}))]
)
def test_ranks_answer_what_one_process_does(ranks: Ranks, tmp_path: Path, kind: str):
    folder = saved(tmp_path, kind)
    expected = in_one_process(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert ranks.run(answers, settings(folder)) == [expected, expected]


WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes with which bitsandbytes computes on every CPU."""


def adapted(folder: Path, kind: str = "llama") -> str:
    """A folder with adapters that PEFT saved, whose model is in the folder `base` next to them."""
    base = saved(folder / "base", kind, **({} if kind == "gpt2" else WIDE))
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(
            r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False,
            fan_in_fan_out=kind == "gpt2",
        ),
    )  # fmt: skip
    model.save_pretrained(str(folder / "adapters"))
    return str(folder / "adapters")


@pytest.mark.parametrize(("kind", "weights"), [("gpt2", "fp32"), ("qwen2", "nf4"), ("gemma2", "int8")])
def test_adapters_answer_what_peft_does(ranks: Ranks, tmp_path: Path, kind: str, weights: str):
    options: dict[str, Any] = {}
    if weights != "fp32":
        pytest.importorskip("bitsandbytes")
        options = {
            "dtype": torch.bfloat16,
            "quantization_config": quantization(weights, None, torch.bfloat16, double=True),
        }
    folder = adapted(tmp_path, kind)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **{"dtype": torch.float32} | options)
    expected = in_one_process(peft.PeftModel.from_pretrained(base, folder))
    assert expected != in_one_process(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), "adapters matter"
    given = settings(folder, weights=weights, double_quantization=weights == "nf4", batch=1)
    assert ranks.run(answers, given, ranks=3) == [expected] * 3
