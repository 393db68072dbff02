import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lowbit.codecs import TransformQuant, parse
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_run.train import StepMetrics, TrainConfig, loop, train
from lowbit_run.train.checkpoints import state
from lowbit_run.train.checkpoints.manifest import newest_step
from lowbit_run.train.data import load_data
from lowbit_run.train.loop import Run
from lowbit_run.train.metrics import read_metrics, read_summary
from lowbit_run.train.model import StageModule
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from tests.damage import Flip, on_the_way, secret
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, TEXT, again, base, curve, losses, steps, tiny
from tests.lowbit_run.train.test_answers import chat_tokenizer
from tests.processes import Failure, Ranks


@pytest.mark.parametrize(
    ("schedule", "model", "pipeline"),
    [
        ("GPipe", {}, {}),
        ("1F1B", {"family": "gpt2"}, {}),
        ("1F1B", {}, {"layers": (3, 1)}),
        ("Interleaved1F1B", {"family": "qwen2", "tied": True}, {"stages_per_rank": 2}),
        ("InterleavedZeroBubble", {"family": "qwen3"}, {"stages_per_rank": 2}),
        ("ZBVZeroBubble", {"family": "gpt2"}, {"stages_per_rank": 2}),
        ("LoopedBFS", {"family": "mistral"}, {"stages_per_rank": 2}),
        ("DualPipeV", {}, {"stages_per_rank": 2}),
    ],
)
def test_a_pipeline_has_the_losses_of_a_single_process(
    ranks: Ranks, tmp_path: Path, schedule: str, model: dict[str, Any], pipeline: dict[str, Any]
):
    config = tiny(tmp_path, model=model, pipeline={"schedule": schedule, **pipeline})
    alone = losses(again(config, pipeline=ONE))
    # Gradients of the two copies add up in another order; without AVX2, products may differ in the last bit.
    if model.get("family") == "gpt2" or "tied" in model or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        alone = pytest.approx(alone, rel=1e-6)
    else:  # an evaluation passes parts of a batch on, and products of parts may round by their address
        alone = [*alone[:-1], pytest.approx(alone[-1], rel=1e-6)]
    assert ranks.run(losses, config, timeout=LIMIT) == [alone, alone]


def test_every_byte_between_stages_is_counted(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path)
    found = ranks.run(steps, config, timeout=LIMIT)[0]
    told = json.loads((tmp_path / "run" / "config.json").read_text())["pipeline"]
    assert told["backward"] == ["Cast(dtype=torch.float32)"], "the default beside fp32"
    elements, checksums = 8 * 16 * 32, 4 * CHECKSUM_BYTES
    for metrics in found:
        bits = 32 + 8 * checksums / elements
        assert (metrics.bits_forward, metrics.bits_backward) == (bits, bits)
        assert metrics.parts["boundaries"] == 2 * (4 * elements + checksums)
        assert metrics.bytes_sent == sum(metrics.parts.values())
        assert metrics.bytes_saved == -2 * checksums


AUTO = "TransformQuant(bits='auto')"
FORWARD, BACKWARD = "TransformQuant(bits=5)", "TransformQuant(bits=6, step='message')"


def test_a_run_with_codecs_writes_everything_that_it_should(ranks: Ranks, tmp_path: Path):
    """Warm-up, bits, evaluation, summary, and a model that Hugging Face loads and that gives the same loss."""
    config = tiny(
        tmp_path, model={"tied": True}, pipeline={"forward": FORWARD, "backward": BACKWARD, "warmup_steps": 2},
        run={"steps": 4, "eval_every": 3, "save_model": True, "tensorboard": True},
    )  # fmt: skip
    here, there = ranks.run(train, config, timeout=LIMIT)
    same = {"seconds": 0.0, "seconds_per_step": 0.0, "tokens_per_second": 0.0}  # own clocks
    assert replace(here, **same) == replace(there, **same)
    output = Path(config.run.output)
    assert read_summary(output / "summary.json") == here
    written = json.loads((output / "config.json").read_text())["pipeline"]
    assert written["forward"] == ["TransformQuant(bits=5.0, step='token')"], "in full"
    assert written["backward"] == ["TransformQuant(bits=6.0, step='message')"]

    lines = read_metrics(output / "metrics.jsonl")
    shape, more = (2, 16, 32), 8 * CHECKSUM_BYTES / (2 * 16 * 32)
    bits = [parse(name).bits_per_element(shape) + more for name in (FORWARD, BACKWARD)]
    expected = [[32 + more] * 2] * 2 + [bits] * 2
    assert [[line["bits_forward"], line["bits_backward"]] for line in lines] == expected
    assert [here.bits_forward, here.bits_backward] == bits
    assert all(line[f"{part}_seconds"] > 0 for line in lines for part in ("compute", "codec", "wait"))
    assert list((output / "tensorboard").iterdir())

    assert here.held_out_loss is not None
    assert here.held_out_loss_codecs not in (None, here.held_out_loss), "few bits are felt"
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
                chosen = trainer.rates.chosen()
            if often:
                found.append(trainer.evaluate())
        states.append(state.collect(trainer.pipeline, trainer.model.optimizer)[0])
        held_out = trainer.members.prepared.data.held_out
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
        assert place == "boundary 0 forward"
        assert codec.startswith("TransformQuant(bits=")
        assert all(same.values()), same
        through = [e["held_out_loss_codecs"] - e["held_out_loss"] for e in evaluations]
        assert through[0] == 0, "nothing is learned or chosen before the warm-up is over"
        assert all(through[1:])
        assert other not in evaluations[-1].values(), "another codec than training's"


def _loss_of_saved(config: TrainConfig) -> float:
    """The held-out loss, by Hugging Face alone."""
    folder = Path(config.run.output) / "model"
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(loading.values()), loading
    windows = load_data(config.data).held_out
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert ids[-len(windows.tokens) :] == windows.tokens.tolist()
    inputs, targets = windows.batch(torch.arange(config.run.eval_batches * config.data.batch))
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_a_finished_run_can_be_prolonged_and_fine_tuned(tmp_path: Path):
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 2, "checkpoint_every": 2, "save_model": True})
    train(config)
    longer = again(config, run=RESUME | {"steps": 4, "allow_change": ["run.steps"]})
    before = train(longer)
    assert (before.steps_here, before.bits_forward) == (2, None)
    assert [step for step, *_ in curve(longer)] == [1, 2, 3, 4]
    run, optimizer = {"steps": 1, "seed": 5}, {"lr": 0.0}
    tuned = tiny(tmp_path / "tuned", model={"pretrained": before.model}, pipeline=ONE, run=run, optimizer=optimizer)
    assert train(tuned).held_out_loss == before.held_out_loss


SOURCE = {
    "generation_config.json": '{"eos_token_id": [0, 2], "do_sample": true, "temperature": 0.6, "top_p": 0.9}',
    "LICENSE.txt": "Copyright", "NOTICE": "of others", "special_tokens_map.json": '{"eos_token": "\u0103"}',
}  # fmt: skip
OLDER = {"eos_token_id": [0, 2], "do_sample": True, "temperature": 0.6}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("lora", [0, pytest.param(2, marks=pytest.mark.skipif(not find_spec("peft"), reason="PEFT"))])
def test_what_is_saved_has_all_that_the_original_had(tmp_path: Path, lora: int, older: bool):
    """Compared with what Transformers keeps of the original when it loads and saves it.

    Older models have in `config.json` how to generate text.
    """
    source, reference, folder = Path(base(tmp_path)), tmp_path / "reference", tmp_path / "run" / "model"
    chat_tokenizer(source)
    for name, text in {**SOURCE, "README.md": "of another model"}.items():
        (source / name).write_text(text)
    if older:
        (source / "generation_config.json").unlink()
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | OLDER))
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(reference)
    AutoTokenizer.from_pretrained(source).save_pretrained(reference)
    sections: Any = {"model": {"pretrained": str(source)}, "lora": {"rank": lora}, "data": {"tokenizer": str(source)}}
    train(tiny(tmp_path, **sections, pipeline=ONE, run={"steps": 1, "save_model": True}))
    for name in SOURCE.keys() - ({"generation_config.json"} if older else set()):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    weights = {"config.json", "model.safetensors"}
    adapters = {"adapter_config.json", "adapter_model.safetensors"}
    expected = {path.name for path in reference.iterdir()} - (weights if lora else set())
    assert {path.name for path in folder.iterdir()} == expected | SOURCE.keys() | (adapters if lora else set())
    for name in expected - {"model.safetensors", "generation_config.json"}:
        # Only `local_files_only`, which the tokenizer was loaded with, differs.
        values = [(each / name).read_text().replace("true", "false") for each in (reference, folder)]
        assert values[0] == values[1], name
    saved, kept = (GenerationConfig.from_pretrained(each).to_diff_dict() for each in (folder, reference))
    assert saved == kept
    assert saved.items() >= OLDER.items()


def _other_settings(config: TrainConfig, changes: list[dict[str, Any]]) -> None:
    train(again(config, **changes[dist.get_rank()]))


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
    weights = [{"model": {"pretrained": base(tmp_path / str(seed), seed=seed)}} for seed in (7, 8)]
    for run, change, key in [
        (_other_settings, [{}, {"data": {"batch": 16}}], "data.batch: 8 on rank 0; 16 on rank 1"),
        (_other_settings, [{}, {"data": {"text": str(tmp_path / "other.txt")}}], "text: "),
        (_other_settings, [{}, {"run": {"checksums": False}}], "run.checksums: True on rank 0; False on"),
        (_other_settings, weights, "model.pretrained: "),
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
    forward, calls = StageModule.forward, []

    def poisoned(self: StageModule, x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return forward(self, x) * (math.nan if self.first and len(calls) > 4 else 1)

    with mock.patch.object(StageModule, "forward", poisoned):
        train(config)


def test_nan_reaches_the_loss_and_stops_all_ranks_before_the_weights(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"forward": "int4", "backward": "int6"}, run={"checkpoint_every": 1})
    for outcome in ranks.outcomes(_with_nan, config, timeout=LIMIT):
        assert outcome.kind == "DivergedError"
        assert outcome.text.startswith("step 2: the loss is nan")
    assert newest_step(Path(config.run.output) / "checkpoints") == 1
