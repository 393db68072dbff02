"""Tiny models for tensor-parallel tests: a toy with a plan of its own, and a Llama."""

import functools
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.codecs import GroupInt
from lowbit.tensor_parallel import Calibration, SumSettings, calibrate, emulate_tensor_parallel_, low_bit_, model_sums

VOCAB, WIDTH, HEADS = 61, 64, 4
INT8 = GroupInt(bits=8, group=64, symmetric=True)
ONE = SumSettings(small=0, algorithm="one_shot")
LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("attn.o", "mlp.down")]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=i == 0) for i in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Mlp(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp(inner)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first(x))
        return x + self.mlp(self.second(x))


class Toy(nn.Module):
    """As Hugging Face's models: a plan, an output matrix that is cut, biases; 101 inner features do not divide."""

    _tp_plan: ClassVar = {
        **{f"layers.*.attn.{name}": "colwise" for name in "qkv"},
        "layers.*.attn.o": "rowwise",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "head": "colwise_gather_output",
        "embed": "embedding_rowwise",
    }

    def __init__(self, seed: int = 0, inner: int = 101):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(inner) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            self.layers[0].mlp.down.weight[5] *= 30  # an outlier feature
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def llama(inner: int = 90, key_value_heads: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=key_value_heads, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def randomized(model: nn.Module) -> Any:
    """The model, without gradients, with weights and biases of a size at which all of them matter."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        elif name.endswith(("bias", "sinks")):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def sequences(count: int = 4, length: int = 11, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for _ in range(count)]


def ids(rows: int = 2, length: int = 9) -> Tensor:
    return torch.stack(sequences(rows, length, seed=11))


@functools.cache
def calibrated(**options: Any) -> Calibration:
    """Of a fresh `Toy`, on two ranks, without a budget unless one is given."""
    return calibrate(Toy(), sequences(), ranks=2, text="toy text", **{"bits": None, **options})


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def sums_of(
    low_bit: Any, *tokens: Tensor, model: Any = None, settings: SumSettings = ONE, **options: Any
) -> list[tuple[str, Tensor, Tensor]]:
    """Of each call of a layer on two emulated ranks: its name, their partial sums, and what they take for the total."""
    model, seen = model or Toy(), []

    def watch(name: str, partials: Any, total: Tensor) -> None:
        seen.append((name, torch.stack(list(partials)), total))

    with emulate_tensor_parallel_(model, 2, low_bit, settings=settings, watch=watch, **options):
        for batch in tokens:
            logits(model, batch)
    return seen


def on_a_rank(model: Any, calibration: Calibration | str) -> dict[str, Any]:
    """What a rank computes by the engine's sums, in 8 bits and calibrated, and how far 8 bits are from the engine."""
    sums, calls = model_sums(model), {}
    hooks = [
        summed.module.register_forward_hook(lambda _, args, y, name=name: calls.update({name: (args, y.clone())}))
        for name, summed in sums.items()
    ]
    engine = logits(model, ids())
    for hook in hooks:
        hook.remove()
    with low_bit_(model, INT8, settings=ONE):
        errors = {name: _error(sums[name], *call) for name, call in calls.items()}
    with low_bit_(model, calibration, settings=ONE) as installed:
        coded = logits(model, ids())
    assert not torch.equal(coded, engine)
    assert torch.equal(logits(model, ids()), engine)  # removed without a trace
    return {"engine": engine, "errors": errors, "coded": coded, "traffic": installed.traffic}


def _error(summed: Any, args: tuple[Tensor, ...], engine: Tensor) -> float:
    """Of a sum in 8 bits: each rank's values are off by half a step at most, which is a 127th of the largest one."""
    if summed.partial is None:
        weight, (x,) = summed.module.weight.to_local(), args
        mine = x if x.shape[-1] == weight.shape[1] else x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        largest = (mine @ weight.mT).abs().max()
    else:
        largest = summed.partial(*args).abs().max()
    dist.all_reduce(largest)
    with torch.no_grad():
        coded = summed.module(*args)
    return float((coded - engine).abs().max() / (largest / 127 / 2 + 1e-5 * engine.abs().max()))
