"""Token anchors in `lowbit train`: only what the token ids do not say crosses, in training and in evaluations."""

import json
import logging
import random
import shutil
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.codecs import parse_pair
from lowbit.pipeline import Emulation, TokenAnchor, emulate_
from lowbit_run.plan.memory import MemorySettings, StageMeter
from lowbit_run.plan.predict import PipelineChoice
from lowbit_run.train import ConfigError, TrainConfig
from lowbit_run.train.checkpoints.state import ANCHOR, ends_of
from lowbit_run.train.elastic import check_elastic
from lowbit_run.train.footprint import model_bytes
from lowbit_run.train.model import build_model
from lowbit_run.train.prepare import prepare
from lowbit_run.train.pretrained import read_embedding
from lowbit_run.train.single_process import Loss, PlainGradients, train_single_process
from lowbit_run.train.trainer import Trainer
from tests.lowbit_run.train.checkpoints.test_resume import part
from tests.lowbit_run.train.runs import LIMIT, RESUME, again, answering, base, curve, losses, steps, tiny
from tests.lowbit_run.train.test_gradients import stops_after
from tests.processes import Ranks
from tests.refused import refused

FORMATS = "int4 / int6"
WARM = 2


def anchored(folder: Path, make: Any = tiny, **sections: dict[str, Any]) -> TrainConfig:
    """A run of a small pretrained model, on a text of many different bytes."""
    pipeline = {"forward": "int4", "backward": "int6", "warmup_steps": WARM, "anchor": True}
    sections["model"] = {"pretrained": base(folder, dim=16, tied=True)}
    sections["pipeline"] = pipeline | sections.get("pipeline", {})
    config = make(folder, **sections)
    letters = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=6000))
    (folder / "text.txt").write_text(letters)
    samples = [{"prompt": letters[i : i + 4], "answer": letters[i + 4 : i + 8]} for i in range(0, 480, 8)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return config


class InMicroBatches(PlainGradients):
    """The gradients of a step whose micro-batches pass the boundaries one by one, as in a pipeline."""

    def __init__(self, model: Any, emulation: Emulation) -> None:
        super().__init__(model)
        self.emulation = emulation

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        found = []
        for ids, wanted in zip(inputs.split(2), targets.split(2), strict=True):
            self.emulation.set_tokens(ids)
            found.append(loss(ids, wanted))
            (found[-1] / 4).backward()
        self.emulation.step()
        return torch.stack(found).detach().mean()


def emulated(config: TrainConfig, *, anchor: bool) -> list[float]:
    """The losses of the run in a single process, then the held-out loss through codecs."""
    prepared, (forward, backward) = prepare(config, ranks=2), parse_pair(FORMATS)
    model = build_model(config.model, vocab=256, sequence=16, seed=0)
    at = [f"model.layers.{stage}" for stage in range(1, 4, 2)][: config.pipeline.ranks - 1]
    embedding = model.get_input_embeddings().weight.detach().clone()  # pyright: ignore
    given = TokenAnchor(embedding=embedding) if anchor else None
    emulation = emulate_(model, at=at, forward=forward, backward=backward, warmup_steps=WARM, anchor=given)
    found = train_single_process(
        model.train(), prepared.data.train, config.optimizer, steps=config.run.steps, batch=8, seed=0,
        gradients=InMicroBatches(model, emulation),
    )  # fmt: skip
    held_out, total = prepared.data.held_out, 0.0
    ids, targets = held_out.batch(torch.arange(16))
    with torch.no_grad():
        for inputs, wanted in zip(ids.split(2), targets.split(2), strict=True):
            emulation.set_tokens(inputs)
            logits = model.eval()(input_ids=inputs, use_cache=False).logits
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
    return [*found, total / targets.numel()]


def trained(config: TrainConfig) -> tuple[list[float], dict[str, float]]:
    """Losses of the steps of a rank, and held-out losses."""
    trainer = Trainer(prepare(config, ranks=config.ranks))
    found = [trainer.step(done).loss for done in range(config.run.steps)]
    held_out = trainer.evaluate()
    assert trainer.evaluate() == held_out, "an evaluation changes nothing"
    assert trainer.step(config.run.steps).loss > 0, "both ends still agree"
    return found, held_out


def test_training_and_evaluations_are_those_of_a_single_process(ranks: Ranks, tmp_path: Path):
    """The weights stay, so that even the last bits are the same."""
    config = anchored(tmp_path, optimizer={"lr": 0.0}, run={"steps": 4})
    [(found, held_out), other] = ranks.run(trained, config, timeout=LIMIT)
    assert other == (found, held_out)
    *expected, expected_held_out = emulated(config, anchor=True)
    *without, without_held_out = emulated(config, anchor=False)
    assert found == expected
    assert found[:WARM] == without[:WARM]
    assert found[WARM] != without[WARM]
    coded, exact = held_out["held_out_loss_codecs"], held_out["held_out_loss"]
    assert coded == pytest.approx(expected_held_out, rel=1e-7)
    assert coded != pytest.approx(without_held_out, rel=1e-7)
    assert abs(coded - exact) < abs(without_held_out - exact) / 2


@pytest.mark.parametrize(
    ("make", "sections"),
    [
        pytest.param(answering, {"pipeline": {"forward": "transform", "backward": []}}, marks=pytest.mark.slow),
        (tiny, {"pipeline": {"data_parallel": 2, "microbatches": 2}}),
        pytest.param(tiny, {"pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2}}, marks=pytest.mark.slow),
    ],
    ids=["packed samples", "two pipelines", "interleaved"],
)
def test_only_steps_after_the_warm_up_change(ranks: Ranks, tmp_path: Path, make: Any, sections: dict[str, Any]):
    config = anchored(tmp_path, make, run={"steps": 4, "eval_every": 1}, **sections)
    without = again(config, pipeline={"anchor": False})
    found, plain = (ranks.run(losses, each, ranks=config.ranks, timeout=LIMIT)[0] for each in (config, without))
    assert found[:WARM] == plain[:WARM]
    assert found[WARM] != plain[WARM]


@pytest.mark.parametrize(
    ("after", "forward"),
    [pytest.param(1, "int4", marks=pytest.mark.slow), (3, "transform")],
    ids=["in the warm-up", "later"],
)
def test_a_run_that_resumes_is_the_same(ranks: Ranks, tmp_path: Path, after: int, forward: str):
    """Evaluations between the steps change nothing either."""
    formats = {"forward": forward, "backward": []}
    whole = anchored(tmp_path / "whole", pipeline=formats, run={"steps": 5})
    ranks.run(losses, whole, timeout=LIMIT)
    parts = anchored(tmp_path / "parts", pipeline=formats, run={"steps": 5, "eval_every": 1, "checkpoint_every": 1})
    ranks.outcomes(stops_after, parts, after, timeout=LIMIT)
    ranks.run(losses, again(parts, run=RESUME), timeout=LIMIT)
    assert curve(parts) == curve(whole)


@pytest.mark.slow
def test_other_stages_keep_fits_or_fit_them_again(ranks: Ranks, tmp_path: Path):
    config = anchored(tmp_path, pipeline={"ranks": 3, "layers": [1, 1, 2]}, run={"steps": 6, "checkpoint_every": 1})
    ranks.outcomes(stops_after, config, 3, ranks=3, timeout=LIMIT)
    resumed = again(config, run=RESUME | {"steps": 4, "allow_change": ["run.steps", "pipeline.warmup_steps"]})
    kept = again(resumed, pipeline={"ranks": 2, "layers": [2, 2]})  # after layer 1, where a boundary was
    found = ranks.run(steps, kept, timeout=LIMIT)[0]
    assert [metrics.step for metrics in found] == [4]
    longer = again(kept, pipeline={"warmup_steps": 5}, run={"steps": 6, "output": str(tmp_path / "longer")})
    shutil.copytree(config.run.output, longer.run.output)
    first, _ = ranks.run(said, longer, timeout=LIMIT)
    assert first[0] == "the token anchor after layer 1 is fitted anew, in steps 5 to 5 of the warm-up", (
        "no sums are left"
    )
    moved = again(resumed, pipeline={"ranks": 2, "layers": [3, 1]}, run={"steps": 6})
    outcomes = ranks.outcomes(steps, moved, timeout=LIMIT)
    text = (
        "it has no token anchor after layer 2, where a boundary is coded now; allowed: the earlier stages and "
        "formats, or --pipeline.anchor false --allow-change pipeline.anchor"
    )
    assert [(failure.kind, text in failure.text, "\n" in failure.text) for failure in outcomes] == [
        ("CheckpointError", True, False)
    ] * 2
    first, second = ranks.run(said, again(moved, pipeline={"warmup_steps": 5}), timeout=LIMIT)
    assert first[0] == "the token anchor after layer 2 is fitted anew, in steps 5 to 5 of the warm-up"
    assert ["token anchor is on" in line for line in (*first[1:], *second)] == [True] * 2


def test_boundaries_that_send_plain_numbers_need_none_of_a_checkpoint(tmp_path: Path):
    config = anchored(tmp_path, pipeline={"ranks": 3, "layers": [1, 1, 2], "forward": ["bf16", "int4"]})
    prepared = prepare(config, ranks=3)
    pipeline: Any = SimpleNamespace(
        layout=prepared.layout, codecs=prepared.codecs, anchor=prepared.anchor, config=prepared.config
    )
    assert [end.after_layer for _, end, _ in ends_of(pipeline, 1) if end.direction == ANCHOR] == [1]


def said(config: TrainConfig) -> list[str]:
    """Train as a rank; what anchors log, and a run about them."""
    lines: list[str] = []
    handler, logs = logging.Handler(), [logging.getLogger(f"lowbit{each}") for each in (".pipeline.anchors", "_run")]
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logs[0].level
    logs[0].setLevel(logging.INFO)
    for log in logs:
        log.addHandler(handler)
    try:
        losses(config)
    finally:
        for log in logs:
            log.removeHandler(handler)
        logs[0].setLevel(before)
    return [line for line in lines if "anchor" in line]


@pytest.mark.slow
def test_a_change_of_anchors_on_a_resume_drops_what_formats_have_learned(ranks: Ranks, tmp_path: Path):
    run = {"steps": 5, "checkpoint_every": 1}
    config = anchored(tmp_path, pipeline={"forward": "transform", "backward": []}, run=run)
    ranks.outcomes(stops_after, config, 3, timeout=LIMIT)
    off = again(config, run=RESUME, pipeline={"anchor": False})
    [failure, _] = ranks.outcomes(steps, off, timeout=LIMIT)
    assert "pipeline.anchor was True and is False now" in failure.text
    allowed = again(off, run={"allow_change": ["pipeline.anchor"]})
    [lines, _] = ranks.run(part, allowed, 100, timeout=LIMIT)
    assert any("codecs start without their earlier state at boundary 0 forward" in line for line in lines), lines


def test_the_warm_up_has_enough_tokens_and_is_said(ranks: Ranks, tmp_path: Path):
    """A quarter of the run at most, and a warning if that is not much."""
    for count, batch, expected in ((1200, 8, 256), (200, 8, 50), (5000, 64, 32)):
        config = anchored(tmp_path, data={"batch": batch}, pipeline={"warmup_steps": None}, run={"steps": count})
        assert config.codec_warmup_steps == expected
        assert again(config, pipeline={"anchor": False}).codec_warmup_steps == 0
        two = again(config, pipeline={"data_parallel": 2, "microbatches": 2})
        assert two.codec_warmup_steps == expected, "a resume may have more pipelines"
    config = anchored(tmp_path, pipeline={"warmup_steps": None}, run={"steps": 4})
    lines = [[line for line in each if "anchor" in line] for each in ranks.run(part, config, 100, timeout=LIMIT)]
    assert lines == [
        [
            "pipeline.anchor: the warm-up has 1 of 4 steps, and token anchors are fitted to its 128 tokens; with fewer "
            "than 32,768, they help less"
        ],
        [],
    ]


def counted(config: TrainConfig) -> tuple[list[int], list[int]]:
    """Bytes that a rank's stage keeps in the warm-up and after it, and what is predicted."""
    prepared = prepare(config, ranks=config.ranks)
    trainer, found = Trainer(prepared), []
    for done in range(config.run.steps):
        trainer.step(done)
        found.append(sum(stage.state_bytes() for stage in trainer.pipeline.lowbit_stages.values()))
    kept = model_bytes(config, vocab=256, autocast=prepared.autocast)
    return found, [kept.rank(prepared.layout, rank).anchors for rank in range(config.ranks)]


def test_bytes_are_predicted(ranks: Ranks, tmp_path: Path):
    """Those of a tied embedding's rank, and of one between two boundaries."""
    config = anchored(tmp_path, pipeline={"ranks": 3, "layers": [1, 1, 2]}, run={"steps": 4})
    (first, predicted), (middle, _), _ = ranks.run(counted, config, ranks=3, timeout=LIMIT)
    sums = 4 * 17 * (17 + 16) + 256
    assert first[:WARM] == [sums] * WARM
    assert middle == [2 * nbytes for nbytes in first]
    assert max(first) < predicted[0] < 4 * max(first) + 40_000
    assert predicted[1] > predicted[0] == predicted[2]
    assert max(middle) < predicted[1]


def test_plans_count_them(tmp_path: Path):
    """On a stage between two boundaries; a plan whose formats send plain numbers has none."""
    run = anchored(tmp_path, pipeline={"ranks": 3, "layers": [1, 1, 2]})
    every = (run, again(run, pipeline={"anchor": False}))
    settings = [MemorySettings(model=one.model, data=one.data, pipeline=one.pipeline) for one in every]
    meter, without = map(StageMeter, settings)
    layout = settings[0].layout
    taken = meter.stage(layout, 1)[0].fixed - without.stage(layout, 1)[0].fixed
    assert taken == meter.kept.anchors(layout, [1]) > 0
    choice = PipelineChoice(schedule="1F1B", stages_per_rank=1, microbatches=4)
    formats = (("int4",), ("bf16",), ("bf16", "int4"))
    made = [replace(choice, formats=each).pipeline(len(each) + 1, run.pipeline).anchor for each in formats]
    assert made == [True, False, True]


def of_another_file(config: TrainConfig) -> None:
    """Rank 1 has read something else."""
    with mock.patch.object(TokenAnchor, "__repr__", return_value=f"of rank {dist.get_rank()}"):
        losses(config)


def test_ranks_with_other_embeddings_do_not_begin(ranks: Ranks, tmp_path: Path):
    config = anchored(tmp_path)
    for failure in ranks.outcomes(of_another_file, config, timeout=LIMIT):
        assert failure.kind == "AgreementError"
        assert "token anchor: of rank 0 on rank 0 (stage 0); of rank 1 on rank 1 (stage 1)" in failure.text


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_is_that_of_the_file(tmp_path: Path, kind: str, tied: bool):
    config = tiny(tmp_path, model={"pretrained": base(tmp_path, kind, dim=16, tied=tied)})
    model = build_model(config.model, vocab=256, sequence=16, seed=0)
    path = Path(config.model.pretrained) / "model.safetensors"
    weights = load_file(path)
    wanted = model.get_input_embeddings().weight  # pyright: ignore
    assert torch.equal(read_embedding(config.model.pretrained, model.config, vocab=256), wanted)
    (pickled := tmp_path / "pickled").mkdir()
    (pickled / "config.json").write_bytes(path.with_name("config.json").read_bytes())
    torch.save({each: torch.nn.Parameter(x) for each, x in weights.items()}, pickled / "pytorch_model.bin")
    assert TokenAnchor(embedding=read_embedding(str(pickled), model.config, vocab=256)).features == 16
    [name] = [name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if tied:  # a file may hold either name
        save_file({each if each != name else "lm_head.weight": x for each, x in weights.items()}, path)
        assert torch.equal(read_embedding(config.model.pretrained, model.config, vocab=256), wanted)
        name = "lm_head.weight"
    save_file(load_file(path) | {name: torch.zeros(256, 16, dtype=torch.uint8)}, path)
    with pytest.raises(ConfigError, match=rf"embedding {name} is U8 \(256, 16\); allowed: at least 256 rows in float"):
        read_embedding(config.model.pretrained, model.config, vocab=256)


def test_what_cannot_be_is_one_line(tmp_path: Path):
    config = anchored(tmp_path)

    def changed(**sections: dict[str, Any]) -> Any:
        return lambda: prepare(again(config, **sections), ranks=2)

    elastic = again(config, elastic={"lighthouse": "http://here:1", "name": "a"})
    refused(
        (
            changed(model={"pretrained": ""}),
            ConfigError,
            "anchor is true and model.pretrained is empty; allow",
        ),
        (changed(pipeline={"warmup_steps": 0}), ConfigError, "pipeline.warmup_steps is 0; allowed: at least 1, since"),
        (
            changed(pipeline={"warmup_steps": None}),
            ConfigError,
            r"is 0, a quarter of run.steps \(3\); allowed: ",
        ),
        (changed(pipeline={"forward": "bf16"}), ConfigError, r"forward is \['bf16'\], where it has no effect; allowed"),
        (changed(pipeline={"anchor": "yes"}), ConfigError, "pipeline.anchor is 'yes'; allowed: true or false"),
        (
            lambda: check_elastic(elastic, ()),
            ConfigError,
            "anchor is true; allowed with elastic.lighthouse: f",
        ),
    )
    assert prepare(again(config, pipeline={"ranks": 1, "schedule": "GPipe"}), ranks=1).anchor is None
