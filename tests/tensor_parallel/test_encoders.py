"""Plans for encoders: emulated ranks compute what the whole model does, and real ranks what emulated ones do."""

from typing import Any

import pytest
import torch
from torch import nn

from lowbit.tensor_parallel import emulate_tensor_parallel_, model_sums, tensor_parallel_
from lowbit.tensor_parallel.plan import ENCODERS, is_row, plan_of
from tests.processes import Ranks


def encoder(kind: str, heads: int = 4) -> Any:
    """A tiny encoder with random weights."""
    from transformers import AutoConfig, AutoModel

    sizes = {"vocab_size": 61, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    if kind == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": heads, "hidden_dim": 64}
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": heads, "intermediate_size": 64}
    if kind == "electra":
        sizes["embedding_size"] = 32
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()


def ids() -> torch.Tensor:
    return torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outcome(model: nn.Module) -> torch.Tensor:
    return model(ids()).last_hidden_state


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_on_emulated_ranks_computes_what_it_does_whole(kind: str):
    model = encoder(kind)
    whole = outcome(model)
    assert len(model_sums(model)) == 4
    columns = [name for name, (_, style) in plan_of(model).items() if not is_row(style)]
    assert len(columns) == (10 if kind == "nomic_bert" else 8)
    with emulate_tensor_parallel_(model, 4):
        torch.testing.assert_close(outcome(model), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_real_ranks_give_the_bits_of_emulated_ones(kind: str, ranks: Ranks):
    model = encoder(kind)
    with emulate_tensor_parallel_(model, 2):
        expected = outcome(model)
    for got in ranks.run(on_a_rank, kind, ranks=2, timeout=60):
        assert torch.equal(torch.tensor(got), expected)


def on_a_rank(kind: str) -> Any:
    return outcome(tensor_parallel_(encoder(kind))).tolist()
