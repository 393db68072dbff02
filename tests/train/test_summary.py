from __future__ import annotations

from lowbit.codecs import TransformQuant, parse
from lowbit.train.config import PipelineConfig, RunConfig, TrainConfig
from lowbit.train.layout import make_layout
from lowbit.train.metrics import StepMetrics, Summary, Work, step_metrics, summarize

CHOSEN = {"boundary 0 forward, tensor 0, width 256": "TransformQuant(bits=5.0)"}


def _step(step: int, *, seconds: float = 1.0, nbytes: int = 500) -> StepMetrics:
    return step_metrics(
        step=step, loss=float(step), lr=0.1, grad_norm=1.0, tokens=2048, seconds=seconds, ranks=2,
        work=Work(nbytes, 1000, nbytes, 1000, 1.0, 0.5, 0.25),
    )  # fmt: skip


def _summary(steps: list[StepMetrics], **pipeline: object) -> Summary:
    config = TrainConfig(pipeline=PipelineConfig(warmup_steps=3, **pipeline), run=RunConfig(steps=20))  # pyright: ignore[reportArgumentType]
    layout = make_layout(config.pipeline, ranks=2, layers=8)
    return summarize(config, layout, steps, {"held_out_loss": 2.0}, chosen=CHOSEN, model=None)


def test_pace_and_bits_are_those_of_the_settled_run():
    warmup = [_step(step, seconds=9.0, nbytes=4000) for step in range(1, 4)]
    settled = [_step(4, seconds=50.0), *(_step(step) for step in range(5, 21))]
    summary = _summary(warmup + settled)
    assert (summary.seconds_per_step, summary.tokens_per_second) == (1.0, 2048)
    assert (summary.bits_forward, summary.bytes_per_step) == (4.0, 1000)
    assert summary.bytes_sent == 3 * 8000 + 17 * 1000
    assert summary.loss == sum(range(11, 21)) / 10
    assert (summary.held_out_loss, summary.held_out_loss_codecs) == (2.0, None)
    stock = _summary(warmup + settled, boundary="stock-fp32")
    assert stock.bits_forward != 4.0  # it has no warm-up to leave out


def test_the_summary_has_the_backward_formats():
    (backward,) = _summary([], forward="TransformQuant(bits=8)").backward
    assert parse(backward) == TransformQuant(bits=8, step="message")
    assert _summary([], backward="int6").backward == ("int6",)


def test_a_run_that_ends_in_its_warmup_or_before_has_a_summary():
    assert _summary([_step(1)]).bits_forward == 4.0
    nothing = _summary([])
    assert nothing.loss is None
    assert nothing.tokens_per_second is None
    assert nothing.steps_here == 0
