"""All types of decoders that Transformers has a plan of stages for: cut, loaded in parts, or refused.

Sizes are tiny, and whatever scales, caps, shares or skips something differs from its neutral value.
"""

import copy
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.activations import restore_
from lowbit_run.config import ConfigError
from lowbit_run.train import cut
from lowbit_run.train.config import DataConfig, ModelConfig, TrainConfig
from lowbit_run.train.cut import CUT, MIXES_SAMPLES, NOT_CUT, Share, attention_of, check_decoder, parts_of, whole_class
from lowbit_run.train.export import Export
from lowbit_run.train.model import (
    StageModule,
    check_pretrained,
    check_stages,
    count_layers,
    hugging_face_config,
    next_token_loss,
    save_config,
)
from lowbit_run.train.weights import build_share, checkpoint_layers
from lowbit_run.train.widened import widen_

QUICK = ("afmoe", "cohere2_moe", "gemma2", "glm_moe_dsa", "granite", "longcat_flash", "starcoder2")
EVERY = sorted(CUT)

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64, "sliding_window": 5,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "dense_intermediate_size": 48, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "moe_layer_end_index": 3, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
    "logit_scale": 0.25, "scale_emb": 3, "mup_enabled": True, "embedding_dropout": 0.5,
    "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5,
    "index_topk": 4, "index_head_dim": 16, "index_n_heads": 16, "index_block_size": 2, "index_topk_blocks": 2,
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 1, "num_experts_per_token": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8, "qk_head_dim": 24,
}  # fmt: skip
TURNS = {"layer_types": ["full_attention", "sliding_attention"] * 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {  # ...: the default
    "cohere_compass_text": TURNS | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cwm": {"bos_token_id": 0, "eos_token_id": 0},
    "dots1": TURNS,
    "dots3_note_text": {
        "per_layer_config": ..., "rope_parameters": ..., "head_dim": 24, "shared_experts_intermediate_size": 16,
        **{f"swa_{key}": LATENT[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24,
    },
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm_moe_dsa": {"num_hidden_layers": 5, "indexer_types": ["full", "full", "full", "shared", "full"]},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "helium": {"head_dim": 8},
    "inkling_text": {
        "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 5,
        "rel_extent": 16, "d_rel": 4, "unpadded_vocab_size": 62, "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "kimi_linear": {"q_lora_rank": ...},
    "laguna": TURNS | {"num_attention_heads_per_layer": [4] * 4},
    "longcat_flash": {
        "num_layers": 4, "num_hidden_layers": ..., "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2, "moe_topk": 2,
    },
    "mellum": TURNS,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "qwen2": TURNS | {"use_sliding_window": True},
    "qwen2_moe": TURNS | {"use_sliding_window": True},
    "qwen3": TURNS | {"use_sliding_window": True},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}  # fmt: skip

IDS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
PACKED = torch.tensor([[*range(7), *range(5)]] * 2)


def _config(kind: str, **more: Any) -> Any:
    """Make a configuration of this type with tiny sizes, and without dropout."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    usual = CONFIG_MAPPING[kind]()
    values, known = SIZES | (LATENT if "kv_lora_rank" in usual.to_dict() else {}), usual.to_dict().keys()
    values = {key: value for key, value in values.items() if key in known}
    if kinds := list(dict.fromkeys(getattr(usual, "layer_types", None) or ())):
        values["layer_types"] = (kinds * 4)[:4]
    values |= OWN.get(kind, {}) | more
    if kinds and values.get("num_hidden_layers", 4) > 4:
        values["layer_types"] = (kinds * 8)[: values["num_hidden_layers"]]
    config = CONFIG_MAPPING[kind](**{key: value for key, value in values.items() if value is not ...})
    for key in config.to_dict():
        if re.fullmatch(r"(?!embedding)\w*(dropout|_pdrop)", key):
            setattr(config, key, 0.0)
    return config


def _model(config: Any) -> Any:
    """Build a whole model; all of its weights and saved buffers do something."""
    torch.manual_seed(0)
    model = whole_class(config)._from_config(config, attn_implementation=attention_of(config)).float()
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor, std=0.2)
    return model


def _gradients(model: Any, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients by name; those of a tied embedding's copies are added up."""
    model.zero_grad()
    torch.manual_seed(2)
    loss, named = run()
    loss.backward()
    sums: dict[str, Tensor] = {}
    for name, parameter in named:
        if parameter.grad is not None:
            sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
            parameter.grad = None
    return loss.detach(), sums


def _loss(logits: Tensor) -> Tensor:
    return next_token_loss(logits[:, :-1], IDS[:, 1:])


def _check_cuts(model: Any) -> None:
    """Compare loss and gradients of two and of three stages with those of the whole model."""
    count, tied = len(getattr(model.base_model, parts_of(model.config)[1])), {}

    def whole() -> Any:
        return _loss(model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits), model.named_parameters()

    def cut(stages: list[StageModule]) -> Any:
        x = IDS
        for stage in stages:
            x = stage(x, PACKED)
        return _loss(x), [(tied.get(name, name), p) for stage in stages for p, name in stage.names.items()]

    loss, gradients = _gradients(model.train(), whole)
    for cuts in ([0, count // 2, count], [0, 1, count - 1, count]):
        stages = [
            StageModule(model, layers=range(a, b), first=a == 0, last=b == count) for a, b in itertools.pairwise(cuts)
        ]
        tied = stages[-1].aliases
        names = [name for stage in stages for name in stage.names.values() if name not in tied]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters()), "each is on one stage"
        found, others = _gradients(model, lambda stages=stages: cut(stages))
        assert torch.equal(found, loss)
        assert others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                others[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) * bool(tied)
            )
    checkpoint_layers(model)
    loss, gradients = _gradients(model, lambda: cut(stages))
    assert torch.equal(found, loss)
    assert [name for name, gradient in others.items() if not torch.equal(gradients[name], gradient)] == []
    restore_(model)


def _mixes_samples(model: Any) -> bool:
    """Whether the logits of a window's second sample differ from those that it has alone."""
    model.eval()
    with torch.no_grad():
        both = model(input_ids=IDS, position_ids=PACKED, use_cache=False).logits[:, 7:]
        alone = model(input_ids=IDS[:, 7:], use_cache=False).logits
    return not torch.allclose(both, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


def _check_loading(model: Any, folder: Path) -> None:
    """Save the whole model, load its stages from the folder, export these, and compare the weights."""
    model.save_pretrained(folder / "whole")
    config = TrainConfig(model=ModelConfig(pretrained=str(folder / "whole")), data=DataConfig(sequence=12))
    check_pretrained(config.model, 12)
    count = count_layers(config.model)
    assert count == len(getattr(model.base_model, parts_of(model.config)[1]))
    expected, seen = model.state_dict(), set()
    stages: list[StageModule] = []
    every = dict(model.named_buffers()) | expected  # also those that are not saved, such as scales of embeddings
    for layers in (range(count // 2), range(count // 2, count)):
        share = Share(layers=frozenset(layers), first=0 in layers, last=count - 1 in layers)
        part = build_share(config, share, vocab=64, device=torch.device("cpu"), autocast=None)
        for name, tensor in (dict(part.named_buffers()) | part.state_dict()).items():
            assert torch.equal(tensor, every[name]), name
            seen.add(name)
        stages.append(StageModule(part, layers=layers, first=share.first, last=share.last))
    assert seen >= expected.keys()
    (folder / "trained").mkdir()
    export = Export(stages, None, None, adapters=False)
    export.reserve(folder / "trained")
    export.write()
    save_config(folder / "trained", model.config, torch.float32)
    exported = whole_class(model.config).from_pretrained(folder / "trained").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def _check_widened(model: Any) -> None:
    """Compare frozen weights in bfloat16 whose products are computed in float32 with the same ones in float32."""
    narrow = copy.deepcopy(model).bfloat16().requires_grad_(False).eval()
    wide = copy.deepcopy(narrow).float()
    experts = any("experts" in name for name, _ in model.named_parameters())
    widen_(narrow)
    assert hasattr(narrow, "compute_dtype") or experts
    if hasattr(narrow, "compute_dtype"):
        inputs = [wide.get_input_embeddings()(IDS).detach().requires_grad_() for _ in range(2)]
        for each, x in zip((wide, narrow), inputs, strict=True):
            _loss(each(inputs_embeds=x, use_cache=False).logits).backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in EVERY])
def test_stages_compute_and_load_what_the_whole_model_has(tmp_path, kind: str):
    model = _model(_config(kind))
    _check_cuts(model)
    assert _mixes_samples(model) == (kind in MIXES_SAMPLES)
    _check_loading(model, tmp_path)
    _check_widened(model)


@pytest.mark.parametrize("kind", sorted(NOT_CUT))
def test_what_cannot_be_cut_is_refused_before_it_is_loaded(tmp_path, kind: str):
    """By its type, and by the check that also covers types that are not known yet."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=f"{kind}.*cannot be cut into stages: {NOT_CUT[kind]}; allowed: llama"):
        check_pretrained(ModelConfig(pretrained=str(tmp_path)), 12)
    config = _config(kind)
    with torch.device("meta"):
        model = whole_class(config)(config)
    with pytest.raises(ConfigError, match=f"^its decoder has (.* outside its|no) layers$|of this {kind} model"):
        check_decoder(model)


def test_a_decoder_that_changes_its_input_is_refused(monkeypatch):
    """As a family of a later version might do it; Granite stands for it if its multiplier is not undone."""
    config = _config("granite")
    with torch.device("meta"):
        model = whole_class(config)(config)
    check_decoder(model)
    monkeypatch.setattr(cut, "_ONCE", {})
    with pytest.raises(ConfigError, match="^its decoder changes its input outside its layers$"):
        check_decoder(model)
    config = _config("afmoe")
    with torch.device("meta"):
        model = whole_class(config)(config)
    check_decoder(model)
    assert config.mup_enabled, "only the stage's copy is changed"


def test_inputs_made_from_token_ids_are_refused(tmp_path):
    config = _config("gemma4_text", hidden_size_per_layer_input=16, vocab_size_per_layer_input=64)
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="^hidden_size_per_layer_input is 16: .* cannot be cut into stages; allowed: 0"
    ):
        check_pretrained(ModelConfig(pretrained=str(tmp_path)), 12)


@pytest.mark.parametrize(
    ("kind", "shared", "refused", "allowed"),
    [
        ("glm_moe_dsa", 0, "layer 3, which needs the selected tokens of earlier layers", "layers 1, 2, 4"),
        ("gemma4_unified_text", 1, "layer 2, which needs keys and values of earlier layers", "layers 1"),
        ("gemma4_text", 2, "layer 1, which needs keys and values of earlier layers", "a single stage"),
    ],
)
def test_a_cut_between_layers_that_share_is_refused(tmp_path, kind: str, shared: int, refused: str, allowed: str):
    config = _config(kind, **({"num_kv_shared_layers": shared} if shared else {}))
    config.save_pretrained(tmp_path)
    run = TrainConfig(model=ModelConfig(pretrained=str(tmp_path)), data=DataConfig(sequence=12))
    with pytest.raises(ConfigError, match=f"^a stage would begin with {refused}; allowed: .*{allowed}$"):
        check_stages(run, [int(refused[6])])
    if kind == "gemma4_unified_text":  # where it is allowed, it is right
        check_stages(run, [1])
        model, x = _model(config), IDS
        for layers in (range(1), range(1, 4)):
            x = StageModule(model, layers=layers, first=layers[0] == 0, last=layers[0] > 0)(x)
        assert torch.equal(x, model(input_ids=IDS, use_cache=False).logits)


def test_samples_that_affect_each_other_do_not_share_windows(tmp_path):
    _config("gpt_oss").save_pretrained(tmp_path)
    run = TrainConfig(
        model=ModelConfig(pretrained=str(tmp_path)),
        data=DataConfig(sequence=12, format="jsonl", text=("samples.jsonl",)),
    )
    with pytest.raises(ConfigError, match="^data.packing is true; in a gpt_oss model, samples .*; allowed: false$"):
        check_stages(run, [])
    check_stages(replace(run, data=replace(run.data, packing=False)), [])


def test_dropout_is_that_of_the_run(tmp_path):
    """Whatever the folder says: Seed-OSS has 0.1 behind attention and feed-forward."""
    from transformers import SeedOssConfig

    SeedOssConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    for value in (0.0, 0.2):
        config: Any = hugging_face_config(ModelConfig(pretrained=str(tmp_path), dropout=value), vocab=0, sequence=0)
        assert (config.attention_dropout, config.residual_dropout) == (value, value)


@pytest.mark.slow
def test_the_list_has_every_type_with_a_plan():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

    planned = {t for t, c in CONFIG_MAPPING.items() if c in CAUSAL and getattr(c, "base_model_pp_plan", None)}
    assert planned | {"gpt2"} == CUT | NOT_CUT.keys()
    assert CUT.isdisjoint(NOT_CUT)
    assert CUT >= MIXES_SAMPLES
    page = (Path(__file__).parents[3] / "docs/how-to/train.md").read_text("utf-8")
    assert all(f"`{kind}`" in page for kind in planned)
