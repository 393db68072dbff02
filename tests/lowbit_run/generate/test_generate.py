"""Answers over several ranks: the tokens of Transformers' `generate` in one process, with the same weights."""

import io
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from lowbit.collectives import AgreementError, PeerError
from lowbit_run.config import ConfigError
from lowbit_run.generate.prepare import prepare
from lowbit_run.generate.prompts import read_prompts
from lowbit_run.generate.rank import Answering, answer
from lowbit_run.generate.settings import GenerateSettings
from lowbit_run.train.answers import Encoded
from lowbit_run.train.cut import CUT, attention_of
from lowbit_run.train.device import choose_autocast
from lowbit_run.train.pretrained import ByteTokenizer
from lowbit_run.train.weights import quantization
from tests.command_line import invoke
from tests.lowbit_run.train.test_families import _config, _model
from tests.processes import Ranks

peft = pytest.importorskip("peft")
QUICK = ("gemma3_text", "gpt2", "longcat_flash", "minimax")
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
    layers = (2, 3) if kind == "glm_moe_dsa" else ()  # its fourth layer needs the third
    assert ranks.run(answers, settings(folder, layers=layers)) == [expected, expected]


LONG = [[5] * 3, [9] * 10, [30] * 58]
"""Prompts of which only the last one leaves fewer positions than an answer may take."""


def test_a_long_prompt_leaves_the_answers_to_shorter_ones_whole(ranks: Ranks, tmp_path: Path):
    folder = saved(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [in_one_process(model, [p], max_new_tokens=min(20, 64 - len(p)))[0] for p in LONG]
    assert [len(ids) for ids in expected] == [20, 20, 6]
    assert ranks.run(answers, settings(folder, tokens=20), LONG) == [expected, expected]


def test_padding_does_not_count_as_repeated(ranks: Ranks, tmp_path: Path):
    folder = saved(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = in_one_process(model, repetition_penalty=9.0)
    pad = expected[2][0]  # the likeliest one after the prompt that is shorter than the others
    assert pad not in PROMPTS[2]
    GenerationConfig(repetition_penalty=9.0, pad_token_id=pad).save_pretrained(folder)
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
    autocast = choose_autocast("auto", torch.device("cpu"))
    if weights != "fp32":
        pytest.importorskip("bitsandbytes")
        options = {
            "dtype": torch.bfloat16,
            "quantization_config": quantization(weights, None, autocast or torch.float32, double=True),
        }
    folder = adapted(tmp_path, kind)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **{"dtype": torch.float32} | options)
    if options and autocast is None:  # products in float32
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    expected = in_one_process(peft.PeftModel.from_pretrained(base, folder))
    assert expected != in_one_process(AutoModelForCausalLM.from_pretrained(tmp_path / "base")), "adapters matter"
    given = settings(folder, weights=weights, double_quantization=weights == "nf4", batch=1)
    assert ranks.run(answers, given, ranks=3) == [expected] * 3


def test_machines_may_have_the_model_in_different_folders(tmp_path: Path):
    """What all ranks must agree on does not name them; without `base`, one that lacks the folder says what to give."""
    folder = adapted(tmp_path)
    named = prepare(settings(folder), rank=1, ranks=2).facts()
    shutil.copytree(tmp_path / "base", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "base")
    given = settings(folder, base=str(tmp_path / "elsewhere"))
    assert prepare(given, rank=1, ranks=2).facts() == named
    with pytest.raises(ConfigError, match=r"^base is empty, and the adapters name '.*/base' .*\(--base FOLDER\)$"):
        prepare(settings(folder), rank=1, ranks=2)


def test_a_folder_in_4_bits_answers_as_it_is(ranks: Ranks, tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    nf4 = quantization("nf4", None, torch.bfloat16, double=False)
    plain, folder = saved(tmp_path / "plain", "qwen3", **WIDE), tmp_path / "quantized"
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=nf4).save_pretrained(folder)
    ByteTokenizer().hugging_face().save_pretrained(folder)
    expected = in_one_process(AutoModelForCausalLM.from_pretrained(folder))
    assert ranks.run(answers, settings(folder, weights="bf16", batch=1)) == [expected, expected]


def scores(given: GenerateSettings, samples: list[Encoded]) -> tuple[float, float]:
    return Answering(prepare(given, rank=1, ranks=dist.get_world_size())).scores(samples)


def test_samples_are_scored_as_one_process_does(ranks: Ranks, tmp_path: Path):
    folder = saved(tmp_path, "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right, wrong = (prompt + in_one_process(model, [prompt])[0] for prompt in PROMPTS[:2])
    wrong[-1] = (wrong[-1] + 1) % 64
    samples = [Encoded(np.array(ids, np.uint32), np.arange(len(ids)) >= 7) for ids in (right, wrong)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([right, wrong])).logits[:, 6:-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor([right[7:], wrong[7:]]).flatten())
    for got in ranks.run(scores, settings(folder, batch=1), samples):
        assert got == (pytest.approx(float(loss), rel=1e-5), 0.5)


def dying(given: GenerateSettings) -> str:
    """End rank 1 while it computes its third token; return the other's error."""
    answering, calls = Answering(prepare(given, rank=1, ranks=2)), itertools.count()
    if dist.get_rank():
        answering.module.decoder.register_forward_hook(lambda *_: os._exit(3) if next(calls) == 2 else None)
    try:
        list(answering.answers(PROMPTS))
    except PeerError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_is_named(ranks: Ranks, tmp_path: Path):
    outcome = ranks.outcomes(dying, settings(saved(tmp_path, "llama"), batch=1, timeout_seconds=5))[0]
    assert isinstance(outcome, str), outcome
    assert "rank 1" in outcome


def told(given: GenerateSettings) -> str:
    try:
        answer(prepare(given, rank=1, ranks=2))
    except AgreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("option", ["weights", "format"])
def test_ranks_with_other_settings_get_the_same_error(ranks: Ranks, tmp_path: Path, option: str):
    given = settings(saved(tmp_path, "llama"))
    texts = ranks.run(_told_apart, given, option)
    assert texts[0] == texts[1]
    assert option in texts[0]


def _told_apart(given: GenerateSettings, option: str) -> str:
    return told(replace(given, **{option: "bf16"}) if dist.get_rank() else given)


def _with_weights(given: GenerateSettings, other: str) -> str:
    return told(replace(given, folder=other) if dist.get_rank() else given)


def test_ranks_with_other_weights_get_the_same_error(ranks: Ranks, tmp_path: Path):
    """Of the same model: one before and one after it was trained; adapters of another strength."""
    shutil.copytree(folder := saved(tmp_path / "model", "llama"), other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: x + 1 for name, x in weights.items()}, other / "model.safetensors", metadata={"format": "pt"})
    texts = ranks.run(_with_weights, settings(folder), str(other))
    assert texts[0] == texts[1]
    assert "model: " in texts[0]
    shutil.copytree(folder := adapted(tmp_path), other := tmp_path / "stronger")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 64}))
    texts = ranks.run(_with_weights, settings(folder), str(other))
    assert texts[0] == texts[1]
    assert "adapters: " in texts[0]


TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool['function']['name'] }}>{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }};{% endfor %}"
)


def test_a_conversation_is_read_with_its_tools(tmp_path: Path):
    tokenizer = ByteTokenizer().hugging_face()
    tokenizer.chat_template = TEMPLATE
    (file := tmp_path / "p.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": "clock"}}]})
    )
    [prompt] = read_prompts(settings("", prompts=str(file)), tokenizer, longest=None)
    assert tokenizer.decode(prompt.ids) == "<clock>user:hi;"
    for line, said in [
        ({"messages": []}, r"messages is \[\]; allowed: a list of messages"),
        ({"messages": [{"role": "user", "text": "hi"}]}, "message 1 is .*allowed: an object with role and content"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "role 'assistant'; allowed: another role"),
        ({"messages": [{"role": "user", "content": "hi"}], "answer": "ho"}, "has an answer, which that of the model"),
        ({"prompt": "a", "answer": "b"}, "has an answer, which that of the model would replace"),
    ]:
        file.write_text(json.dumps(line))
        with pytest.raises(ConfigError, match=f"p.jsonl line 1.*{said}"):
            read_prompts(settings("", prompts=str(file)), tokenizer, longest=None)


def test_options_without_effect_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"score": "a", "tokens": 3}, "tokens is set and score is given"),
        ({"score": "a", "chat": False}, "chat is set and score is given"),
        ({"seed": 3}, "seed is 3 and sample is false"),
    ]
    for given, said in cases:
        with pytest.raises(ConfigError, match=said):
            GenerateSettings(**given)


def test_the_command_prints_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    exact = ("--weights", "fp32", "--format", "fp32", "--device", "cpu", "--tokens", str(NEW))
    folder = saved(tmp_path / "model", "llama", vocab_size=256)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = ["three=", "one="]
    tokenizer = ByteTokenizer().hugging_face()
    expected = [tokenizer.decode(ids) for ids in in_one_process(model, [list(text.encode()) for text in texts])]
    monkeypatch.setattr("sys.stdin", io.StringIO(texts[0]))
    invoke("generate", str(tmp_path), *exact)  # the folder of a run, whose model is in `model`
    answer, errors = capfd.readouterr()
    assert answer.removesuffix("\n") == expected[0], errors
    assert "bits per element between ranks" in errors
    (tmp_path / "prompts.txt").write_text("\n".join(texts) + "\n\n")
    invoke("generate", folder, "--prompts", str(tmp_path / "prompts.txt"), "--layer", "3,1", *exact)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert lines == [{"prompt": text, "answer": answer} for text, answer in zip(texts, expected, strict=True)]


def refusal(folder: str, **given: Any) -> str:
    ranks = given.pop("ranks", 2)
    with pytest.raises(ConfigError) as caught:
        prepare(settings(folder, **{"prompt": "a"} | given), rank=0, ranks=ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_input_is_one_line_before_anything_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = saved(tmp_path / "model", "llama")
    adapters, other = adapted(tmp_path), saved(tmp_path / "other", "llama", hidden_size=128)
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "a"}\n{"messages": 3, "prompt": ""}\n')
    assert "folder is 'nowhere'; allowed: a folder that exists" in refusal("nowhere")
    assert "5 stages" in refusal(folder, ranks=5)
    assert "layers is [1, 1]" in refusal(folder, layers=(1, 1))
    assert "base is" in refusal(folder, base=other)
    assert "do not fit the model" in refusal(adapters, base=other)
    assert "do not fit the model" in refusal(adapters, base=saved(tmp_path / "gpt2", "gpt2"))
    assert "prompt is ' '" in refusal(folder, prompt=" ")
    assert "prompt has 64 tokens; allowed: fewer than the model's positions, 64" in refusal(folder, prompt="a" * 64)
    assert "holds no prompts" in refusal(folder, prompt="", prompts=str(tmp_path / "empty.txt"))
    assert "half.jsonl line 2" in refusal(folder, prompt="", prompts=str(tmp_path / "half.jsonl"))
    assert "format: codec is TransformQuant" in refusal(folder, format="transform")
    assert "no chat template" in refusal(folder, chat=True)
    with monkeypatch.context() as patch:
        patch.setattr("lowbit_run.train.fits.memory_of", lambda device: (1e4, 1e5))
        assert "the weights of ranks 0, 1 take 0.0 GB, this machine has 0.0 GB of memory; allowed: weights" in refusal(
            folder
        )
    monkeypatch.setattr("lowbit_run.train.weights.find_spec", lambda name: None)
    assert "bitsandbytes" in refusal(folder, weights="nf4")
    Path(adapters, "adapter_model.safetensors").write_bytes(b"x")
    assert "adapter_model.safetensors is cut short or cannot be read" in refusal(adapters)
