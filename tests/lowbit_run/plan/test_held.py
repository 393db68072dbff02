"""Predicted bytes of pipeline stages, compared with what autograd and PyTorch's stages really hold."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from lowbit.activations import compress_saved_, counted
from lowbit.activations.counting import SavedBytes
from lowbit.codecs import Cast
from lowbit.pipeline import LowBitStage
from lowbit.wire.pytorch import version
from lowbit_run.plan import actions_of, in_flight
from lowbit_run.plan.budget import plan_bits
from lowbit_run.plan.memory import MemorySettings, StageMeter
from lowbit_run.train.config import DataConfig, ModelConfig, PipelineConfig
from lowbit_run.train.model import StageModule, build_model, next_token_loss
from tests.lowbit.pipeline.toy import SCHEDULES
from tests.processes import on_ranks

ERRORS = {kind: {bits: 2.0**-bits for bits in range(2, 9)} for kind in ("norm", "mlp", "linear")}
NAMES = {"1f1b": "1F1B", "zero-bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}
if version() < (2, 13):  # which loses what is saved between the passes of a backward
    NAMES = {"1f1b": "1F1B"}


def held_by(stages: list[LowBitStage]) -> Iterator[torch.Tensor]:
    """Tensors that stages of PyTorch hold, and their gradients; token ids aside."""
    for stage in stages:
        forward = getattr(stage, "_forward_chunk_states", None) or stage.fwd_cache  # since 2.15, before
        saved = [getattr(one, "__dict__", one) for one in forward.values()]
        for leaf in tree_leaves([saved, *stage.backward_state.values(), *stage._handed_over.values()]):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                yield leaf
                if leaf.is_leaf and leaf.grad is not None:
                    yield leaf.grad


def watch(stages: list[LowBitStage], saved: SavedBytes) -> list[int]:
    """The bytes that all stages of this rank and autograd hold, before and after everything that they do from now."""
    seen = []

    def look() -> None:
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held_by(stages)}
        seen.append(saved.now + sum(size for key, size in sizes.items() if key not in saved._storages))

    def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        look()
        result = function(*args, **kwargs)
        look()
        return result

    for stage, name in product(stages, ("forward_one_chunk", "backward_one_chunk")):
        setattr(stage, name, partial(watched, getattr(stage, name)))
    return seen


@pytest.mark.parametrize("name", NAMES)
@on_ranks
def test_predicted_bytes_are_those_that_are_saved(name: str) -> None:
    kind, each = SCHEDULES[name]
    settings = MemorySettings(
        pipeline=PipelineConfig(schedule=NAMES[name], ranks=2, stages_per_rank=each, microbatches=4),
        data=DataConfig(batch=8, sequence=32),
        model=ModelConfig(dim=32, layers=6, heads=2),
        error_tokens=32,
    )
    layout, held, meter, rank = settings.layout, settings.held, StageMeter(settings), dist.get_rank()
    costs = [meter.stage(layout, stage)[0] for stage in range(layout.stages)]
    most = plan_bits(held, costs, ERRORS, device_bytes=1 << 50)
    plan = plan_bits(held, costs, ERRORS, device_bytes=(most.least + max(most.device_bytes.values())) // 2)
    assert len({tuple(stage.bits.values()) for stage in plan.stages}) > 1

    model = build_model(settings.model, vocab=256, sequence=32, seed=0).train()
    modules = {
        stage: StageModule(
            model, layers=layout.layers_of(stage), first=stage == 0, last=stage == layout.stages - 1,
            autocast=torch.bfloat16,
        ).train()
        for stage in layout.stages_of(rank)
    }  # fmt: skip
    compressed = [compress_saved_(m, plan.bits.policy(stage)) for stage, m in modules.items()]
    stages = [
        LowBitStage(m, stage, layout.stages, torch.device("cpu"), forward=Cast(), backward=Cast())
        for stage, m in modules.items()
    ]
    schedule: Any = kind(stages if each > 1 else stages[0], 4, loss_fn=next_token_loss)
    assert in_flight(actions_of(schedule)).moments == held.moments
    ids = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
    mine: Any = [ids] if 0 in modules else []
    last = {"target": ids, "losses": []} if layout.stages - 1 in modules else {}
    schedule.step(*mine, **last, return_outputs=False)  # finds the shapes, by passes of its own
    with counted(nn.ModuleList(modules.values())) as saved:
        seen = watch(stages, saved)
        schedule.step(*mine, **last, return_outputs=False)
    del compressed
    fixed = sum(costs[stage].fixed for stage in modules)
    assert max(seen) == pytest.approx(plan.device_bytes[rank] - fixed, rel=0.01)
    assert saved.now == 0, "nothing is left after the step"
