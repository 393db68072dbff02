from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lowbit.config import ConfigError
from lowbit.train.config import FAMILIES, ModelConfig
from lowbit.train.model import (
    StageModule,
    architecture,
    build_model,
    check_pretrained,
    count_layers,
    hugging_face_config,
    vocabulary,
)

IDS = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(3))


def _model(family: str = "llama", **values):
    values = {"dim": 32, "layers": 5, "heads": 4, "ffn": 64} | values
    return build_model(ModelConfig(family=family, **values), vocab=99, sequence=12, seed=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [{}, {"ffn": 48, "tied": True, "heads": 2}], ids=str)
def test_the_architecture_is_known_without_the_model(tmp_path, family: str, given: dict):
    """From the configuration alone, and from that of a saved model."""
    config = ModelConfig(family=family, dim=32, layers=2, **given)
    made = hugging_face_config(config, vocab=99, sequence=12)
    found = architecture(config, vocab=99)
    ffn = made.n_inner if family == "gpt2" else made.intermediate_size
    assert (found["ffn"], found["tied"]) == (ffn, bool(made.tie_word_embeddings))
    assert found["kv_heads"] == getattr(made, "num_key_value_heads", found["heads"])
    made.save_pretrained(tmp_path)
    saved = architecture(ModelConfig(pretrained=str(tmp_path)), vocab=99)
    known = {key: value for key, value in saved.items() if value is not None}
    assert known == {key: found[key] for key in known}
    assert {"dim", "layers", "heads", "vocab", "family"} <= known.keys()


def _stages(model, cuts: list[int], **kwargs) -> list[StageModule]:
    """Stages that end before these layers."""
    bounds = [0, *cuts, model.config.num_hidden_layers]
    return [
        StageModule(model, layers=range(low, high), first=low == 0, last=high == bounds[-1], **kwargs)
        for low, high in itertools.pairwise(bounds)
    ]


def _through(stages: list[StageModule], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 4]])
def test_stages_compute_what_the_whole_model_computes(family, cuts):
    model = _model(family, kv_heads=0 if family == "gpt2" else 2)
    for parameter in model.parameters():  # biases and norms that do something
        torch.nn.init.normal_(parameter, std=0.2)
    assert torch.equal(_through(_stages(model, cuts), IDS), model(input_ids=IDS).logits)


def test_layers_with_different_attention_keep_their_own_kind():
    from transformers import AutoModelForCausalLM

    config = _model("qwen2").config
    config.layer_types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    config.sliding_window = 3
    model = AutoModelForCausalLM.from_config(config)
    logits = model(input_ids=IDS).logits
    assert torch.equal(_through(_stages(model, [1, 3]), IDS), logits)
    config.layer_types = ["full_attention"] * 5  # the model reads it at every call
    assert not torch.equal(model(input_ids=IDS).logits, logits)


@pytest.mark.parametrize(("family", "tied"), [("gpt2", None), ("llama", False), ("qwen3", True)])
def test_every_parameter_has_its_name_in_the_whole_model(family, tied):
    model = _model(family, tied=tied)
    stages = _stages(model, [2, 3])
    named = {name: p for stage in stages for p, name in stage.names.items()}
    assert sum(len(list(stage.parameters())) for stage in stages) == len(named)
    copied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(named) == {name for name, _ in model.named_parameters()} | copied
    for name, parameter in model.named_parameters():
        assert named[name] is parameter
    for name in copied:
        assert torch.equal(named[name], model.get_input_embeddings().weight)
        assert named[name] is not model.get_input_embeddings().weight


def test_a_single_stage_keeps_the_tie():
    (whole,) = _stages(_model("gpt2"), [])
    assert whole.head.weight is whole.decoder.get_input_embeddings().weight  # pyright: ignore


def test_weights_depend_on_the_seed_alone():
    first = _model().state_dict()
    torch.manual_seed(99)
    assert all(torch.equal(first[k], v) for k, v in _model().state_dict().items())
    other = build_model(ModelConfig(dim=32, layers=5, ffn=64), vocab=99, sequence=12, seed=1)
    assert not torch.equal(other.get_input_embeddings().weight, first["model.embed_tokens.weight"])


def test_activations_leave_in_the_dtype_of_the_wire_and_can_be_detached():
    for family in ("llama", "gpt2"):
        first, last = _stages(_model(family), [2], boundary_dtype=torch.bfloat16)
        activations = first(IDS)
        assert activations.dtype == torch.bfloat16
        assert last(activations).dtype == torch.float32
        activations.detach_()  # what zero-bubble schedules do


def test_autocast_computes_in_bfloat16_and_sends_float32():
    model = _model()
    first, last = _stages(model, [2], autocast=torch.bfloat16)
    assert first(IDS).dtype == torch.float32
    logits = last(first(IDS))
    assert logits.dtype == torch.bfloat16
    exact = model(input_ids=IDS).logits
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_saved_model_is_measured_and_loaded(tmp_path):
    model = _model("gpt2")
    model.save_pretrained(tmp_path)
    config = ModelConfig(pretrained=str(tmp_path), dropout=0.25)
    assert count_layers(config) == 5
    assert vocabulary(config, 99) == 99
    with pytest.raises(ConfigError, match="data.sequence is 13; the model knows 12 positions"):
        check_pretrained(config, 13)
    loaded = build_model(config, vocab=99, sequence=12, seed=0)
    assert (loaded.config.attn_pdrop, loaded.config.embd_pdrop) == (0.25, 0.25)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in loaded.state_dict().items())


def test_what_can_not_be_loaded_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.pretrained is 'absent'; .* allowed: a folder"):
        count_layers(ModelConfig(pretrained="absent"))
    (tmp_path / "config.json").write_text('{"model_type": "t5", "vocab_size": 9}')
    with pytest.raises(ConfigError, match="a model of type 't5'; allowed: llama"):
        count_layers(ModelConfig(pretrained=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    with pytest.raises(ConfigError, match="vocabulary has 9 entries, the tokenizer 256"):
        vocabulary(ModelConfig(pretrained=str(tmp_path)), 256)
    with pytest.raises(ConfigError, match=r"model.pretrained .* holds no weights"):
        build_model(ModelConfig(pretrained=str(tmp_path)), vocab=9, sequence=8, seed=0)
    with pytest.raises(ConfigError, match="vocabulary has 9 entries"):
        vocabulary(ModelConfig(vocab=9), 256)
