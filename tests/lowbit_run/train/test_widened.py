"""Frozen weights in few bits, and products in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit_run.train.cut import Share
from lowbit_run.train.weights import build_share
from lowbit_run.train.widened import widen_
from tests.lowbit_run.train.runs import ONE, answering, base

pytest.importorskip("peft")
IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))


def step(folder: Path, family: str, weights: str) -> tuple[Any, dict[str, Any]]:
    """Loss, and gradients of adapters."""
    path = folder / family
    if not path.exists():
        file = Path(base(path, family, dim=64, ffn=128)) / "model.safetensors"
        save_file({name: x.bfloat16().float() for name, x in load_file(file).items()}, file, {"format": "pt"})
    config = answering(
        folder, model={"pretrained": str(path / "base"), "weights": weights}, lora={"rank": 4}, pipeline=ONE
    )
    share = Share(layers=frozenset(range(4)), first=True, last=True)
    model = build_share(config, share, vocab=256, device=torch.device("cpu"), autocast=None)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(2)
    for parameter in adapters.values():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 10
    logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.dtype == torch.float32
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()
    return loss, {name: p.grad for name, p in adapters.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_frozen_weights_in_bfloat16_train_adapters_as_the_same_ones_in_float32(tmp_path: Path, family: str):
    wide, narrow = (step(tmp_path, family, weights) for weights in ("fp32", "bf16"))
    assert narrow[0].item() == pytest.approx(wide[0].item(), abs=1e-6)
    for name, gradient in wide[1].items():
        torch.testing.assert_close(narrow[1][name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_products_with_quantized_weights_are_computed_in_float32(tmp_path: Path, weights: str):
    bnb = pytest.importorskip("bitsandbytes")
    config = answering(
        tmp_path, model={"pretrained": base(tmp_path, dim=64, ffn=128), "weights": weights}, lora={"rank": 4},
        pipeline=ONE,
    )  # fmt: skip
    share = Share(layers=frozenset(range(4)), first=True, last=True)
    model = build_share(config, share, vocab=256, device=torch.device("cpu"), autocast=None)
    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    assert len(layers) == 4 * 7
    for layer in layers[:7]:
        x = torch.randn(5, layer.in_features, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        if weights == "nf4":
            whole = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            assert whole.dtype == torch.float32
        else:
            whole = layer.weight.data.float() * layer.state.SCB[:, None] / 127
        torch.testing.assert_close(y, x @ whole.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x.grad, whole.sum(0).expand(5, -1), rtol=1e-4, atol=1e-5)


def test_no_float32_copy_of_a_matrix_is_kept():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32)).bfloat16().requires_grad_(False)
    widen_(model)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        x = torch.randn(3, 4, 64, requires_grad=True)
        model(x).sum().backward()
    assert {each.dtype for each in kept if each.dim() == 2} == {torch.bfloat16}
    expected = model[1].weight.float().sum(0) @ model[0].weight.float()  # pyright: ignore
    torch.testing.assert_close(x.grad, expected.expand(3, 4, 64))
