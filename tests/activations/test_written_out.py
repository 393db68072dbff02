"""Activation functions and adapters that models write out: quick GELU, Bloom's GELU, squared ReLU, DoRA, LayerScale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted
from tests.activations.models import distance, gradients

DIM, LENGTH, VOCAB = 64, 128, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "hidden_size": DIM, "num_hidden_layers": 2, "n_layer": 2,
    "num_attention_heads": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "intermediate_size": 4 * DIM, "num_key_value_heads": 2, "head_dim": 32,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip


def language_model(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    attention = "eager" if family in ("bloom", "gemma2", "mpt") else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().train()


def with_dora() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(language_model("llama"), LoraConfig(r=8, target_modules="all-linear", use_dora=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def images() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": DIM, "intermediate_size": 4 * DIM, "num_hidden_layers": 2}
    config = CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=64, patch_size=8)
    return CLIPVisionModel(config).float().train()


def model_of(family: str) -> Any:
    return {"dora": with_dora, "clip": images}.get(family, lambda: language_model(family))()


def loss_of(model: Any, family: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=family != "exact"):
        if hasattr(model.config, "image_size"):
            return model(pixel_values=torch.randn(4, 3, 64, 64, generator=generator)).last_hidden_state.square().mean()
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        logits = model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())


FLOORS = {"clip": 0.3, "bloom": 0.3, "nemotron": 0.3, "arcee": 0.3, "dora": 0.3, "gemma2": 0.3, "mpt": 0.3}


@pytest.mark.parametrize("family", FLOORS)
def test_kept_and_gradients(family: str):
    plain = model_of(family)
    exact, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    compress_saved_(exact, LayerAware(bits=16))
    expected = gradients(plain, loss_of(plain, "exact"))
    assert distance(gradients(exact, loss_of(exact, "exact")), expected) < 1e-5
    compress_saved_(ours)
    kept = []
    for model in (plain, ours):
        loss_of(model, family).backward()  # counts, and caches
        with counted(model) as saved:
            loss = loss_of(model, family)
        kept.append(saved.total)
        del loss
    assert kept[1] < FLOORS[family] * kept[0]
    ours.zero_grad(set_to_none=True)
    assert distance(gradients(ours, loss_of(ours, "exact")), expected) < 0.03


class Scaled(nn.Module):
    """LayerScale after a squared ReLU."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(40, 72), nn.Linear(72, 40)
        self.scale = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        self.inside = functional.relu(self.up(x))
        return self.down(torch.square(self.inside)) * self.scale


@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40)])
@pytest.mark.parametrize(("bits", "limit"), [(16, 1e-6), (8, 0.02)])
def test_channels_times_a_trained_factor(shape: tuple[int, ...], bits: int, limit: float):
    model = Scaled(shape)
    x = torch.randn(3, 9, 40)
    expected = gradients(model, model(x).square().sum())
    compress_saved_(model, LayerAware(bits=bits, smallest=0))
    assert distance(gradients(model, model(x).square().sum()), expected) < limit


def test_hooks_between_relu_and_its_square_are_called():
    model = Scaled((40,))
    compress_saved_(model)
    x = torch.randn(3, 9, 40, requires_grad=True)
    y = model(x)
    model.inside.register_hook(lambda grad: grad * 0)
    y.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()
