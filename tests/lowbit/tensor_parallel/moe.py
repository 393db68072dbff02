"""Tiny mixture-of-experts models with random weights, and how Transformers cuts them."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.lowbit.tensor_parallel.models import VOCAB, WIDTH, randomized

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
    "deepseek_v3": _LATENT,
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "head_dim": 16,
        "interleave_moe_layer_step": 1,
    },
}  # fmt: skip

_ATTENTION = "model.layers.*.self_attn"
GPT_OSS = {
    **{f"{_ATTENTION}.{name}_proj": "colwise" for name in "qkv"},
    f"{_ATTENTION}.o_proj": "rowwise",
    f"{_ATTENTION}.sinks": "colwise",
    _ATTENTION: "local_params",
    "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
    "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
    "model.layers.*.mlp.experts.down_proj": "colwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "lm_head": "colwise_gather_output",
}
"""A plan for GPT-OSS, which has none: its weights are stored transposed, and features of gate and up alternate."""


def moe(kind: str) -> Any:
    """Return a model of a family with random weights and biases."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return randomized(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_SIZES, **_KINDS[kind]})))


def plan_of_case(model: Any, case: str) -> dict[str, str]:
    """Return the plan of a case: "own", "experts" (whole experts on each rank) or "gpt_oss"."""
    if case == "gpt_oss":
        return GPT_OSS
    plan = dict(model.tp_plan)
    if case == "experts":
        experts = [name for name, style in model.ep_plan.items() if style == "ep_dispatch_experts"]
        plan = {name: style for name, style in plan.items() if not name.startswith(tuple(experts))} | model.ep_plan
    return plan


def cut(model: nn.Module, case: str = "own", implementation: str = "auto") -> Any:
    """Cut a whole model as Transformers does after loading it, as `from_pretrained(folder, tp_plan="auto")`."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = model._expand_parallel_plan(plan_of_case(model, case))
    of_experts = {name: style for name, style in styles.items() if style in ("ep_dispatch_experts", "grouped_gemm")}
    apply_tensor_parallelism(model, mesh, {k: s for k, s in styles.items() if k not in of_experts})
    if of_experts:
        apply_expert_parallelism(model, mesh, mesh, of_experts, implementation)
    return model
