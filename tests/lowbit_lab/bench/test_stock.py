"""Training with PyTorch's own stage: the same losses as with `LowBitStage` at full precision, other bytes."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_lab.bench.stock import StockStage, StockTrainer
from lowbit_run.train import StepMetrics, TrainConfig
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.runs import LIMIT, tiny
from tests.processes import Ranks


def trained(kind: type[Trainer], config: TrainConfig) -> tuple[list[StepMetrics], float]:
    """Metrics of three steps, and the held-out loss after them."""
    trainer = kind(prepare(config, ranks=2))
    steps = [trainer.step(step) for step in range(3)]
    assert all(isinstance(stage, StockStage) == (kind is StockTrainer) for stage in trainer.pipeline.stages)
    return steps, trainer.evaluate(with_codecs=False)["held_out_loss"]


@pytest.mark.parametrize("pipeline", [{}, {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}], ids=["1f1b", "zbv"])
def test_it_computes_what_lowbits_stage_does_in_float32(ranks: Ranks, tmp_path: Path, pipeline: dict[str, Any]):
    config = tiny(tmp_path, pipeline=pipeline)
    (ours, held_out), (stock, also_held_out) = (
        ranks.run(trained, kind, config, timeout=LIMIT)[0] for kind in (Trainer, StockTrainer)
    )
    assert [m.loss for m in stock] == [m.loss for m in ours]
    assert also_held_out == held_out
    messages = 8 * (2 if pipeline else 1)  # activations and gradients of 4 micro-batches
    for metrics, own in zip(stock, ours, strict=True):
        assert (metrics.bits_forward, metrics.bits_backward) == (32, 32)
        assert metrics.parts["boundaries"] == own.parts["boundaries"] - messages * CHECKSUM_BYTES
        assert metrics.compute_seconds > 0
        assert metrics.codec_seconds == 0


def test_it_hands_over_bfloat16(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"forward": "bf16"})
    ours, halved = (ranks.run(trained, kind, config, timeout=LIMIT)[0][0] for kind in (Trainer, StockTrainer))
    assert [m.loss for m in halved] == [m.loss for m in ours], "which a codec rounds alike"
    for metrics in halved:
        assert (metrics.bits_forward, metrics.bits_backward) == (16, 16)
        assert metrics.bytes_saved == metrics.parts["boundaries"] == 2 * 2 * 8 * 16 * 32
