import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.codecs import TransformQuant, parse
from lowbit.train import StepMetrics, TrainConfig, loop, train
from lowbit.train.checkpoints import state
from lowbit.train.checkpoints.manifest import newest_step
from lowbit.train.loop import Run
from lowbit.train.metrics import read_metrics, read_summary
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from lowbit.wire.checksum import CHECKSUM_BYTES
from tests.damage import Flip, on_the_way, secret
from tests.processes import Failure, Ranks
from tests.train.runs import LIMIT, ONE, again, base, curve, losses, tiny


@pytest.mark.parametrize(
    ("family", "tied", "schedule", "per_rank", "layers"),
    [
        ("llama", None, "GPipe", 1, ()),
        ("gpt2", None, "1F1B", 1, ()),
        ("llama", None, "1F1B", 1, (3, 1)),
        ("qwen2", True, "Interleaved1F1B", 2, ()),
        ("qwen3", None, "InterleavedZeroBubble", 2, ()),
        ("gpt2", None, "ZBVZeroBubble", 2, ()),
        ("mistral", None, "LoopedBFS", 2, ()),
        ("llama", None, "DualPipeV", 2, ()),
    ],
)
def test_a_pipeline_has_the_losses_of_a_single_process(
    ranks: Ranks, tmp_path: Path, family: str, tied: bool | None, schedule: str, per_rank: int, layers: tuple[int, ...]
):
    model = {"family": family} | ({} if tied is None else {"tied": tied}) | ({"layers": sum(layers)} if layers else {})
    pipeline = {"schedule": schedule, "stages_per_rank": per_rank, "layers": layers}
    config = tiny(tmp_path, model=model, pipeline=pipeline)
    alone = losses(again(config, pipeline=ONE | {"layers": ()}))
    # Gradients of the two copies add up in another order; without AVX2, products may differ in the last bit.
    if family == "gpt2" or tied or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        alone = pytest.approx(alone, rel=1e-6)
    assert ranks.run(losses, config, timeout=LIMIT) == [alone, alone]


def _steps(config: TrainConfig) -> list[StepMetrics]:
    found: list[StepMetrics] = []
    train(config, on_step=found.append)
    return found


def test_stock_stages_and_float32_codecs_are_the_same_run(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path)
    ours = ranks.run(_steps, config, timeout=LIMIT)[0]
    told = json.loads((tmp_path / "run" / "config.json").read_text())["pipeline"]
    assert told["backward"] == ["Cast(dtype=torch.float32)"], "the default beside fp32"
    stock = ranks.run(_steps, again(config, pipeline={"boundary": "stock-fp32"}), timeout=LIMIT)[0]
    assert [m.loss for m in ours] == [m.loss for m in stock]
    elements, checksums = 8 * 16 * 32, 4 * CHECKSUM_BYTES
    for runs, more in ((ours, checksums), (stock, 0)):  # PyTorch's own stage sends none
        for metrics in runs:
            bits = 32 + 8 * more / elements
            assert (metrics.bits_forward, metrics.bits_backward) == (bits, bits)
            assert metrics.parts["boundaries"] == 2 * (4 * elements + more)
            assert metrics.bytes_sent == sum(metrics.parts.values())
            assert metrics.bytes_saved == -2 * more
    halved = ranks.run(_steps, again(config, pipeline={"boundary": "stock-bf16"}), timeout=LIMIT)[0]
    assert [m.loss for m in halved] == pytest.approx([m.loss for m in ours], abs=0.01)
    assert halved[-1].loss != ours[-1].loss
    for metrics in halved:
        assert (metrics.bits_forward, metrics.bits_backward) == (16, 16)
        assert metrics.bytes_saved == metrics.parts["boundaries"] == 2 * 2 * elements


AUTO = "TransformQuant(bits='auto')"
FORWARD, BACKWARD = "TransformQuant(bits=5)", "TransformQuant(bits=6, step='message')"


def test_a_run_with_codecs_writes_everything_that_it_should(ranks: Ranks, tmp_path: Path):
    """Warm-up, bits, evaluation, summary, and a model that Hugging Face loads and that gives the same loss."""
    config = tiny(
        tmp_path,
        model={"tied": True},
        pipeline={"forward": FORWARD, "backward": BACKWARD, "warmup_steps": 2},
        run={"steps": 4, "eval_every": 3, "save_model": True, "tensorboard": True},
    )
    here, there = ranks.run(train, config, timeout=LIMIT)
    same = {"seconds": 0.0, "seconds_per_step": 0.0, "tokens_per_second": 0.0}  # own clocks
    assert replace(here, **same) == replace(there, **same)
    output = Path(config.run.output)
    assert read_summary(output / "summary.json") == here
    written = json.loads((output / "config.json").read_text())["pipeline"]
    assert written["forward"] == ["TransformQuant(bits=5.0, step='token')"], "in full"
    assert written["backward"] == ["TransformQuant(bits=6.0, step='message')"]

    lines = read_metrics(output / "metrics.jsonl")
    shape = (2, 16, 32)
    more = 8 * CHECKSUM_BYTES / math.prod(shape)
    bits = [parse(name).bits_per_element(shape) + more for name in (FORWARD, BACKWARD)]
    expected = [[32 + more] * 2] * 2 + [bits] * 2
    assert [[line["bits_forward"], line["bits_backward"]] for line in lines] == expected
    assert [here.bits_forward, here.bits_backward] == bits
    for line in lines:
        assert min(line["compute_seconds"], line["codec_seconds"], line["wait_seconds"]) > 0
    assert list((output / "tensorboard").iterdir())

    assert here.held_out_loss is not None
    assert here.held_out_loss_codecs is not None
    assert here.held_out_loss != here.held_out_loss_codecs  # 2 bits are felt
    assert here.model == str(output / "model")
    assert _loss_of_saved(config) == pytest.approx(here.held_out_loss, rel=1e-6)


def _ends_early(config: TrainConfig) -> Any:
    return train(config, on_step=lambda metrics: metrics.step == 2)


def test_a_run_that_its_caller_ends_is_saved_and_evaluated_where_it_ended(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, run={"steps": 9, "checkpoint_every": 5, "save_model": True})
    here, there = ranks.run(_ends_early, config, timeout=LIMIT)
    assert (here.steps, there.steps, here.steps_here) == (2, 2, 2)
    output = Path(config.run.output)
    assert [line["step"] for line in read_metrics(output / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in (output / "checkpoints").glob("step*")] == ["step-00000002"]
    (evaluation,) = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    assert evaluation["step"] == 2
    assert here.model == str(output / "model")


def _evaluates_in_between(config: TrainConfig) -> Any:
    """Losses without codecs and with them in and after the warm-up; whether training went on as without them."""
    states, found, chosen = [], [], {}
    for often in (True, False):
        run = Run(Trainer(prepare(config, ranks=2)))
        trainer = run.trainer
        for step in range(4):
            trainer.step(step)
            if step == 1:
                chosen = trainer.chosen()
            if often:
                found.append(trainer.evaluate())
        states.append(state.collect(trainer.pipeline, trainer.optimizer)[0])
        held_out = trainer.prepared.data.held_out
        other = trainer.evaluation.scores(held_out, batch=8, batches=2, codecs=[TransformQuant(bits=9)])[0]
        run.folder.unlock()
    same = {name: torch.equal(value, states[1][name]) for name, value in states[0].items()}
    return found, same, chosen, other


def test_evaluations_leave_training_alone(ranks: Ranks, tmp_path: Path):
    pipeline = {"forward": AUTO, "backward": "transform-backward", "warmup_steps": 2}
    config = tiny(tmp_path, pipeline=pipeline)
    outcomes = ranks.run(_evaluates_in_between, config, timeout=LIMIT)
    for evaluations, same, chosen, other in outcomes:
        [[place, codec]] = chosen.items()
        assert place == "boundary 0 forward, tensor 0, width 32"
        assert codec.startswith("TransformQuant(bits=")
        assert all(same.values()), same
        through = [e["held_out_loss_codecs"] - e["held_out_loss"] for e in evaluations]
        assert through[0] == 0, "nothing is learned or chosen before the warm-up is over"
        assert all(through[1:])
        assert other not in evaluations[-1].values(), "another codec than training's"


def _loss_of_saved(config: TrainConfig) -> float:
    """The held-out loss, by Hugging Face alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lowbit.train.data import load_data

    folder = Path(config.run.output) / "model"
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(loading.values()), loading
    text = Path(config.data.text[0]).read_text()
    windows = load_data(config.data).held_out
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids[-len(windows.tokens) :] == windows.tokens.tolist()
    count = min(len(windows), config.run.eval_batches * config.data.batch)
    inputs, targets = windows.batch(torch.arange(count))
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_a_finished_run_can_be_prolonged_and_fine_tuned(tmp_path: Path):
    """In one process, whose resumed half equals the second half of a run in one go."""
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 4, "checkpoint_every": 2, "save_model": True})
    whole = again(config, run={"output": str(tmp_path / "whole")})
    train(whole)
    train(again(config, run={"steps": 2}))
    # The learning rate of the first half depends on the number of steps; so does nothing else.
    going_on = {"resume": True, "overwrite": False, "allow_change": ["run.steps"]}
    longer = again(config, run=going_on)
    summary = train(longer)
    assert summary.steps_here == 2
    assert [step for step, *_ in curve(longer)] == [1, 2, 3, 4]
    assert summary.bits_forward is None

    tuned = tiny(
        tmp_path / "tuned",
        model={"pretrained": f"{tmp_path}/whole/model"},
        pipeline=ONE,
        run={"steps": 1, "seed": 5},
        optimizer={"lr": 0.0},
    )
    before = read_summary(tmp_path / "whole" / "summary.json")
    assert train(tuned).held_out_loss == before.held_out_loss


def _other_settings(config: TrainConfig, change: dict[str, Any]) -> None:
    train(again(config, **change) if dist.get_rank() else config)


def _other_weights(config: TrainConfig, folders: list[str]) -> None:
    train(again(config, model={"pretrained": folders[dist.get_rank()]}))


def _other_secret(config: TrainConfig, change: str) -> None:
    with secret(change if dist.get_rank() else "same"):
        train(config)


def test_a_report_that_fails_leaves_nothing_locked(tmp_path: Path):
    config = tiny(tmp_path, run={"report": True}, pipeline={"ranks": 1})
    with mock.patch.object(loop, "write_report", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        train(config)
    train(config)


def test_ranks_with_other_settings_or_text_all_stop(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path)
    (tmp_path / "other.txt").write_text("x" * 5000)
    folders = [base(tmp_path / str(seed), seed=seed) for seed in (7, 8)]
    for run, change, key in [
        (_other_settings, {"data": {"batch": 16}}, "data.batch: 8 on rank 0; 16 on rank 1"),
        (_other_settings, {"data": {"text": str(tmp_path / "other.txt")}}, "text: "),
        (_other_settings, {"run": {"checksums": False}}, "run.checksums: True on rank 0; False on"),
        (_other_weights, folders, "model.pretrained: "),
        (_other_secret, "another", "LOWBIT_SECRET: one with digest "),
    ]:
        first, second = ranks.outcomes(run, config, change, timeout=LIMIT)
        assert isinstance(first, Failure)
        assert first.kind == second.kind == "AgreementError"
        assert key in first.text
        assert first.text == second.text


def _fail_on_one(config: TrainConfig, failing: int) -> None:
    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 1 and dist.get_rank() == failing:
            raise OSError("no space left")

    train(config, on_step=on_step)


def test_a_rank_that_fails_is_named_by_the_other(ranks: Ranks, tmp_path: Path):
    there, here = ranks.outcomes(_fail_on_one, tiny(tmp_path), 1, timeout=LIMIT)
    assert (here.kind, there.kind) == ("OSError", "PeerError")
    assert "rank 1 " in there.text


def _damaged(config: TrainConfig, sender: int, number: int) -> None:
    with on_the_way(sender, Flip(number)):
        train(config)


@pytest.mark.parametrize(
    ("sender", "number", "where"),
    [
        (0, 18, "boundary 0 forward, micro-batch 1, tensor 0, step 2: the message from rank 0"),
        (0, 28, "evaluation, boundary 0, number 0: the message from rank 0 is damaged"),
        (1, 31, "saving, names of weights, number 1: the message from rank 1 is damaged"),
    ],
)
def test_damage_is_noticed_wherever_it_happens(ranks: Ranks, tmp_path: Path, sender: int, number: int, where: str):
    config = tiny(tmp_path, run={"save_model": True, "timeout_seconds": 10})
    outcomes = ranks.outcomes(_damaged, config, sender, number, timeout=LIMIT)
    # Whoever raises the alarm first says it for all: the rank that noticed, or the one that it gave up on.
    assert where in outcomes[1 - sender].text, outcomes[1 - sender]
    assert isinstance(outcomes[sender], Failure)


def _with_nan(config: TrainConfig) -> None:
    from lowbit.train.model import StageModule

    forward, calls = StageModule.forward, []

    def poisoned(self: StageModule, x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return forward(self, x) * (math.nan if self.first and len(calls) > 4 else 1)

    StageModule.forward = poisoned
    try:
        train(config)
    finally:
        StageModule.forward = forward


def test_nan_reaches_the_loss_and_stops_all_ranks_before_the_weights(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"forward": "int4", "backward": "int6"}, run={"checkpoint_every": 1})
    for outcome in ranks.outcomes(_with_nan, config, timeout=LIMIT):
        assert outcome.kind == "DivergedError"
        assert outcome.text.startswith("step 2: the loss is nan")
    folder = Path(config.run.output) / "checkpoints"
    assert newest_step(folder) == 1
