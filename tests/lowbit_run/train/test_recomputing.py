"""Layers that run again in the backward pass: the gradients of a run that keeps everything, with less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import counted
from lowbit_run.config import ConfigError
from lowbit_run.train import stages
from lowbit_run.train.config import from_mapping
from lowbit_run.train.cut import Share
from lowbit_run.train.footprint import held_batches
from lowbit_run.train.layout import make_layout
from lowbit_run.train.model import StageModule, next_token_loss
from lowbit_run.train.weights import build_share
from tests.lowbit_run.train.runs import again, answering, base, curve, losses
from tests.lowbit_run.train.test_footprint import CPU, WIDE, saved, settings
from tests.processes import Ranks
from tests.refused import refused

IDS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(1))
V_SHAPED = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}


def gradients(folder: str, recompute: bool, **sections: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients of the last three layers of four, and the bytes that autograd kept."""
    config = settings(folder, activations={"checkpoint": recompute}, **sections)
    share = Share(layers=frozenset(range(1, 4)), first=False, last=True)
    autocast = None if config.run.precision == "fp32" else torch.bfloat16
    model = build_share(config, share, vocab=0, device=CPU, autocast=autocast)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, which would hide the other half of the gradients
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    stage = StageModule(model, layers=range(1, 4), first=False, last=True, autocast=autocast)
    torch.manual_seed(3)
    x = torch.randn(2, 12, stage.width, requires_grad=True)
    with counted(stage.model) as kept:
        loss = next_token_loss(stage(x), IDS)
    loss.backward()
    assert x.grad is not None
    found = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return loss.detach(), {"x": x.grad} | found, kept.total


FORMATS = {
    "all weights": {"model": {"dropout": 0.1}},
    "bf16": {"model": {"weights": "bf16"}},
    "products in float32": {"model": {"weights": "bf16"}, "run": {"precision": "fp32"}},
    "int8": {"model": {"weights": "int8"}},
    "nf4": {"model": {"weights": "nf4", "dropout": 0.1}},
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("llama", name) for name in FORMATS), ("gpt2", "nf4"), ("gemma3_text", "nf4"), ("mixtral", "bf16")],
)
def test_gradients_are_the_same_to_the_last_bit(kind: str, form: str, tmp_path: Path):
    folder, lora = saved(kind, tmp_path, **WIDE), {"rank": 4, "dropout": 0.1} if form != "all weights" else {}
    loss, exact, whole = gradients(folder, False, **FORMATS[form], lora=lora)
    again_loss, found, kept = gradients(folder, True, **FORMATS[form], lora=lora)
    assert torch.equal(again_loss, loss)
    assert found.keys() == exact.keys()
    assert [name for name, gradient in exact.items() if not torch.equal(found[name], gradient)] == []
    assert len(exact) > 20
    assert kept < 0.5 * whole


@pytest.mark.parametrize("pipeline", [{}, V_SHAPED])
def test_two_ranks_train_alike(ranks: Ranks, tmp_path: Path, pipeline: dict[str, Any]):
    config = answering(
        tmp_path, model={"pretrained": base(tmp_path), "dropout": 0.1}, lora={"rank": 4}, pipeline=pipeline
    )
    found = ranks.run(losses, config)[0], curve(config)
    assert found == (ranks.run(losses, again(config, activations={"checkpoint": False}))[0], curve(config))


def test_a_backward_pass_is_not_split():
    class Stage:
        def backward_one_chunk(self, number: int, loss: Any = None, full_backward: bool = True, **named: Any) -> None:
            calls.append((number, full_backward, named))

        def backward_weight_one_chunk(self, number: int, **named: Any) -> None:
            raise AssertionError("its first part has done everything")

    calls: list[Any] = []
    stage: Any = Stage()
    stages._never_split(stage)
    stage.backward_one_chunk(3, loss=None, full_backward=False, last_backward=True)
    stage.backward_weight_one_chunk(3, last_backward=True)
    assert calls == [(3, True, {"last_backward": True})]

    def held(recompute: bool) -> dict[int, int]:
        run = V_SHAPED | {"schedule": "InterleavedZeroBubble", "microbatches": 8}
        config = from_mapping({"pipeline": run, "activations": {"checkpoint": recompute}})
        flight = held_batches(config, make_layout(config.pipeline, ranks=2, layers=4))
        return {stage: flight.peak(stage) for stage in flight.stages}

    whole, split = held(True), held(False)
    assert all(whole[stage] <= split[stage] for stage in split)
    assert sum(whole.values()) < sum(split.values())


def test_the_default_is_on_with_adapters_only():
    lora = {"model": {"pretrained": "folder"}, "lora": {"rank": 4}}
    assert from_mapping(lora).checkpoints
    assert not from_mapping({}).checkpoints
    assert from_mapping({"activations": {"checkpoint": True}}).checkpoints
    for kept in ({"checkpoint": False}, {"bits": 4}, {"bits": [16, 4]}, {"norm": 8}, {"plan": "plan.json"}):
        assert not from_mapping(lora | {"activations": kept}).checkpoints, kept
    assert not from_mapping(lora | {"run": {"method": "agoq"}}).checkpoints
    both = r"allowed: one of the two, or a plan of `lowbit plan memory --by layer`"
    refused(*(
        (lambda kept=kept: from_mapping({"activations": {"checkpoint": True}} | kept), ConfigError, text + both)
        for kept, text in (
            ({"activations": {"checkpoint": True, "bits": 4}}, "activations.bits, or those of a kind, are below 16; "),
            ({"activations": {"checkpoint": True, "plan": "p"}}, "true and activations.plan is 'p'; "),
            ({"run": {"method": "agoq"}}, "activations.bits, or those of a kind, are below 16; "),
        )
    ))  # fmt: skip
