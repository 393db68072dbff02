import dataclasses
import json
from pathlib import Path

import pytest

from lowbit.codecs import TransformQuant, parse
from lowbit_run.train.config import PipelineConfig, RunConfig, TrainConfig
from lowbit_run.train.layout import make_layout
from lowbit_run.train.metrics import Recorder, StepMetrics, Summary, Work, bits, read_metrics, step_metrics, summarize
from lowbit_run.train.progress import describe


def one_step(step: int, loss: float = 2.5) -> StepMetrics:
    work = Work(1000, 2000, 700, 800, 3.0, 1.0, 0.2, 0.5)
    return step_metrics(step=step, loss=loss, lr=0.1, grad_norm=1.0, tokens=512, seconds=2.0, ranks=2, work=work)


def test_metrics_follow_from_the_sums_over_ranks():
    metrics = one_step(3)
    assert metrics.tokens_per_second == 256
    assert (metrics.bits_forward, metrics.bits_backward) == (4.0, 7.0)
    assert (metrics.bytes_sent, metrics.bytes_saved) == (1700, 4 * 2800 - 1700)
    assert (metrics.compute_seconds, metrics.codec_seconds, metrics.wait_seconds) == (1.5, 0.5, 0.25)
    assert metrics.checksum_seconds == 0.1
    assert metrics.bits_gradients is None
    assert bits(0, 0) is None


def test_gradients_between_pipelines_and_saved_activations_count():
    work = Work(1000, 2000, 700, 800, gradient_bytes=300.0, gradient_elements=300.0)
    metrics = step_metrics(
        step=0, loss=2.0, lr=0.1, grad_norm=1.0, tokens=9, seconds=2.0, ranks=2, work=work, bytes_activations=2_500_000
    )
    assert metrics.bits_gradients == 8.0
    assert (metrics.bytes_sent, metrics.bytes_saved) == (2000, 4 * 3100 - 2000)
    assert {"gradients 8.00", "activations 2.5 MB"} <= {*describe(metrics)}


def _recorder(folder: Path, start: int, tensorboard: bool = False) -> Recorder:
    return Recorder(folder, start=start, tensorboard=tensorboard)


def test_each_step_is_a_line_and_a_resumed_run_rewrites_what_it_repeats(tmp_path):
    recorder = _recorder(tmp_path, 0)
    for step in range(1, 6):
        recorder.record(one_step(step))
    recorder.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed while writing
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5]
    recorder = _recorder(tmp_path, 3)
    recorder.record(one_step(4, loss=9.0))
    recorder.close()
    lines = read_metrics(path)
    assert [line["loss"] for line in lines] == [2.5, 2.5, 2.5, 9.0]
    assert lines[0] == dataclasses.asdict(one_step(1))


def test_bad_lines_and_values_of_another_type_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "metrics.jsonl"
    lines = [dataclasses.asdict(one_step(step)) for step in (1, 3)]
    good = [json.dumps(line).encode() for line in lines]
    path.write_bytes(good[0] + b'\n{"step": 2, "lo\xff\n[]\n{"step": "x"}\n' + good[1] + b"\n")
    assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert caplog.messages == [f"{path}: left out lines that cannot be read: 2, 3, 4"]
    _recorder(tmp_path, 2).close()
    assert path.read_bytes() == good[0] + b"\n"
    path.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], lines[0] | {"tokens": "x"})))
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "held_out_loss": 2.5, "bytes_sent": "x"}\n')
    recorder = _recorder(tmp_path, 3)
    recorder.close()
    assert recorder.history == [one_step(1)]
    assert recorder.evaluations == {0: {"step": 0, "held_out_loss": 2.5}}


def _scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_every_metric(tmp_path):
    pytest.importorskip("tensorboard")
    recorder = _recorder(tmp_path, 0, tensorboard=True)
    recorder.record(one_step(1))
    recorder.record(one_step(2, loss=1.5))
    recorder.record_evaluation(2, {"held_out_loss": 3.0})
    recorder.record(dataclasses.replace(one_step(3), links={"0 to 2": 700}, waiting={"0": 0.5}))
    recorder.close()
    assert _scalars(tmp_path, "train/links/0_to_2") == [(3, 700.0)]
    assert _scalars(tmp_path, "train/waiting/0") == [(3, 0.5)]
    assert _scalars(tmp_path, "train/loss") == [(1, 2.5), (2, 1.5), (3, 2.5)]
    assert _scalars(tmp_path, "evaluation/held_out_loss") == [(2, 3.0)]
    assert _scalars(tmp_path, "train/bits_forward")
    recorder = _recorder(tmp_path, 2, tensorboard=True)
    recorder.record(one_step(3, loss=1.0))
    recorder.close()
    assert _scalars(tmp_path, "train/loss") == [(1, 2.5), (2, 1.5), (3, 1.0)]
    assert _scalars(tmp_path, "evaluation/held_out_loss") == [(2, 3.0)]


def _step(step: int, *, seconds: float = 1.0, nbytes: int = 500) -> StepMetrics:
    work = Work(nbytes, 1000, nbytes, 1000, 1.0, 0.5, 0.25)
    return step_metrics(
        step=step, loss=float(step), lr=0.1, grad_norm=1.0, tokens=2048, seconds=seconds, ranks=2, work=work
    )


def _summary(steps: list[StepMetrics], **pipeline: object) -> Summary:
    config = TrainConfig(pipeline=PipelineConfig(warmup_steps=3, **pipeline), run=RunConfig(steps=20))  # pyright: ignore[reportArgumentType]
    layout = make_layout(config.pipeline, ranks=2, layers=8)
    return summarize(config, layout, steps, {"held_out_loss": 2.0}, chosen={}, model=None)


def test_pace_and_bits_are_those_of_the_settled_run():
    warmup = [_step(step, seconds=9.0, nbytes=4000) for step in range(1, 4)]
    settled = [_step(4, seconds=50.0), *(_step(step) for step in range(5, 21))]
    summary = _summary(warmup + settled, forward="TransformQuant(bits=8)")
    assert (summary.seconds_per_step, summary.tokens_per_second) == (1.0, 2048)
    assert (summary.bits_forward, summary.bytes_per_step) == (4.0, 1000)
    assert summary.bytes_sent == 3 * 8000 + 17 * 1000
    assert summary.loss == sum(range(11, 21)) / 10
    assert (summary.held_out_loss, summary.held_out_loss_codecs) == (2.0, None)
    assert [*map(parse, summary.backward)] == [TransformQuant(bits=8, step="message")]
    assert _summary([_step(1)], forward="bf16", backward="int6").bits_forward == 4.0, "it ended in its warm-up"
    nothing = _summary([], forward="bf16", backward="int6")
    assert (nothing.loss, nothing.tokens_per_second, nothing.steps_here) == (None, None, 0)
    assert nothing.backward == ("int6",)
