"""An option that another one leaves without effect is an error that names both; a default never is."""

from pathlib import Path

import pytest

from lowbit_run.train import ConfigError, TrainConfig, load
from lowbit_run.train.effects import _RULES, _TYPED, check_effects
from tests.command_line import invoke

JSONL = "--data.format jsonl --data.text x"
PRETRAINED = "--model.pretrained folder"
ADAPTERS = f"{PRETRAINED} --lora.rank 4"
IGNORED = {  # the option, and the one that makes it one without effect
    f"{PRETRAINED} --model.family qwen3": "model.pretrained is 'folder'",
    f"{PRETRAINED} --model.dim 128": "model.pretrained",
    f"{PRETRAINED} --model.layers 4": "model.pretrained is 'folder', where it has no effect; allowed: one of the two",
    f"{PRETRAINED} --model.layers 8": "model.pretrained",  # equals the default
    f"{PRETRAINED} --model.heads 8": "model.pretrained",
    f"{PRETRAINED} --model.kv_heads 2": "model.pretrained",
    f"{PRETRAINED} --model.ffn 64": "model.pretrained",
    f"{PRETRAINED} --model.vocab 512": "model.pretrained",
    f"{PRETRAINED} --model.tied": "model.pretrained",
    "--model.family gpt2 --model.kv_heads 2": "model.family is 'gpt2'",
    "--model.double_quantization": "model.weights",
    "--lora.alpha 4": "lora.rank is 0",
    "--lora.alpha 16": "lora.rank is 0",
    f"{PRETRAINED} --lora.dropout 0.1": "lora.rank is 0",
    f"{PRETRAINED} --lora.targets q_proj": "lora.rank is 0",
    "--data.text x --data.packing false": "data.format is 'text'",
    "--data.date 2026-07-24": "data.format",
    "--data.dataset_config en": "data.dataset is ''",
    "--data.dataset_split test": "data.dataset is ''",
    "--data.column body": "data.dataset is ''",
    "--data.dataset . --data.dataset_config en": "data.dataset is '.'",
    "--data.held_out a --data.held_out_share 0.1": "data.held_out is ['a']",
    "--run.steps 100 --pipeline.warmup_steps 500": "run.steps is 100",
    "--run.steps 100 --pipeline.warmup_steps 100": "run.steps is 100",
    f"{ADAPTERS} --pipeline.tied_rows fp8": "lora.rank is 4",
    "--pipeline.tied_rows fp8": "model.tied is None",
    "--model.family gpt2 --model.tied false --pipeline.tied_rows fp8": "model.tied is false",
    "--activations.group 32": "activations.bits is [16]",
    "--activations.rounding stochastic": "activations.bits is [16]",
    "--activations.plan p --activations.checkpoint false": "activations.plan is 'p'",
    "--activations.bits 4 --activations.checkpoint": "activations.bits",
    "--gradients.all_reduce int8": "pipeline.data_parallel is 1",
    "--gradients.all_reduce fp8": "pipeline.data_parallel is 1",
    "--elastic.name a": "elastic.lighthouse is ''",
    "--elastic.at_least 2": "elastic.lighthouse is ''",
    "--elastic.error_feedback": "elastic.lighthouse is ''",
    "--run.restarts 9": "run.supervise is false",
    "--run.rejoin_seconds 60": "run.supervise is false",
    "--run.trace_steps 9": "run.trace is false",
    "--run.keep 3 --run.checkpoint_every 0": "run.checkpoint_every is 0",
    "--run.save_dtype bf16 --run.no_save_model": "run.save_model is false",
    f"{ADAPTERS} --run.save_dtype bf16": "run.save_merged is false",
    "--run.save_merged": "lora.rank is 0",
    "--run.eval_every 9 --data.held_out_share 0": "data.held_out_share is 0.0",
    "--run.eval_batches 9 --data.held_out_share 0": "data.held_out_share is 0.0",
    "--ranks 1 --pipeline.forward int4": "pipeline.ranks is 1",
    "--ranks 1 --pipeline.schedule GPipe": "pipeline.ranks is 1",
    "--run.allow_change run.steps": "run.resume",
}
EFFECTIVE = (
    "--data.text x --pipeline.warmup_steps 99 --run.steps 100", f"{ADAPTERS} --lora.alpha 16", "--ranks 1",
    f"{PRETRAINED} --model.dropout 0.1", f"{JSONL} --data.packing false", "--data.dataset hub/name --data.column body",
    "--activations.bits 4 --activations.group 32", "--run.method agoq --activations.rounding stochastic",
    "--pipeline.data_parallel 2 --gradients.all_reduce int8", "--run.supervise --run.restarts 9",
    f"{ADAPTERS} --run.save_merged --run.save_dtype bf16", "--model.tied --pipeline.tied_rows fp8",
    "--elastic.lighthouse http://x:1 --elastic.name a --run.rejoin_seconds 60 --gradients.all_reduce int8",
    "--ranks 1 --pipeline.forward int4 --resume",
    "--pipeline.forward fp32 --pipeline.warmup_steps 500",
)  # fmt: skip


@pytest.mark.parametrize("words", IGNORED)
def test_an_option_without_effect_is_an_error(words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    result = invoke("config", *words.split())
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert IGNORED[words] in result.stderr
    assert "; allowed: " in result.stderr


def test_other_options_are_taken():
    for words in EFFECTIVE:
        result = invoke("config", *words.split())
        assert result.exit_code == 0, (words, result.stderr)
    check_effects(TrainConfig(), ())


def test_defaults_that_a_file_spells_out_are_taken(tmp_path: Path):
    """`lowbit config > run.toml` writes all keys; whoever then names a model changes none of the others."""
    file = tmp_path / "run.toml"
    file.write_text(invoke("config").stdout)
    assert load(file, ["model.pretrained=folder"]).model.pretrained == "folder"
    file.write_text(file.read_text().replace("\nlayers = 8", "\nlayers = 4"))
    with pytest.raises(ConfigError, match=r"model.layers is 4 and model.pretrained is 'folder', where"):
        load(file, ["model.pretrained=folder"])


def test_each_rule_is_about_keys_that_exist():
    keys = {f"{section}.{key}" for section, values in vars(TrainConfig()).items() for key in vars(values)}
    assert {key for rule in (*_RULES, *_TYPED) for key in (rule[0], rule[2])} <= keys
