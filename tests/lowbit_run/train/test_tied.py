"""A tied embedding in a pipeline: rows cross the link, and training is that of a single process."""

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowbit.codecs import parse
from lowbit.wire.messages import Messages
from lowbit_run.train import ConfigError, TrainConfig, train
from lowbit_run.train.metrics import Work
from lowbit_run.train.prepare import prepare
from lowbit_run.train.tied import expected_rows, row_bytes
from lowbit_run.train.trainer import Trainer
from tests.damage import on_the_way
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, base, curve, losses, tiny
from tests.lowbit_run.train.test_gradients import stops_after, weights
from tests.processes import Failure, Ranks

THREE = {"ranks": 3, "layers": (1, 2, 1)}


def tied(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    return tiny(folder, **{"model": {"tied": True}, **sections})


def _handed_over(config: TrainConfig) -> tuple[int, Work, int]:
    """Bytes that this rank hands to its process groups in a step, beside those of stages; what is counted of them; and
    different tokens of the step."""
    trainer, sent = Trainer(prepare(config, ranks=2)), []
    reduce, send = dist.all_reduce, Messages.send

    def counted_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return reduce(tensor, *args, **kwargs)

    def counted_send(self: Messages, *args: Any, **kwargs: Any) -> Any:
        message = send(self, *args, **kwargs)
        sent.append(message.message.nbytes)
        return message

    trainer.step(0)
    with mock.patch.object(Messages, "send", counted_send), mock.patch.object(dist, "all_reduce", counted_reduce):
        trainer.step(1)
    dist.barrier()  # a rank that ends would take its message along
    inputs, _ = trainer.members.prepared.data.train.batch(trainer.order.ids(1))
    return sum(sent), trainer.model.tied.sent, len(inputs.unique())


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_only_rows_of_the_tokens_that_occur_cross(ranks: Ranks, tmp_path: Path, name: str):
    config = tied(tmp_path, pipeline={"tied_rows": name})
    own = ranks.run(_handed_over, again(config, model={"tied": False}), timeout=LIMIT)
    found = ranks.run(_handed_over, config, timeout=LIMIT)
    for (whole, traffic, rows), (without, none, _) in zip(found, own, strict=True):
        assert 1 < rows < 30  # of 256
        assert traffic.tied_bytes == row_bytes(rows, 32, parse(name))
        assert traffic.tied_elements == rows * 32
        assert whole - without == traffic.tied_bytes
        assert none == Work()


@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("gpt2", THREE),
        ("qwen3", {"data_parallel": 2, "microbatches": 2}),
        ("llama", {"warmup_steps": 4, "tied_rows": "bf16"}),
        ("mistral", {}),
    ],
)
def test_rows_in_float32_are_the_training_of_a_single_process(
    ranks: Ranks, tmp_path: Path, family: str, pipeline: dict[str, Any]
):
    """Rows that no text holds decay as well, which the saved weights show."""
    run, gradients = {"steps": 4, "save_model": True}, {"all_reduce": "fp32"}
    config = tied(tmp_path, model={"family": family, "tied": True}, run=run, pipeline=pipeline, gradients=gradients)
    alone = again(config, pipeline=ONE | {"microbatches": 4})
    expected, whole = losses(alone), _saved(alone)
    for outcome in ranks.run(losses, config, ranks=config.ranks, timeout=LIMIT):
        assert outcome == pytest.approx(expected, rel=2e-5)
    found = _saved(config)
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=2e-4, msg=name)


def _saved(config: TrainConfig) -> dict[str, Tensor]:
    return load_file(Path(config.run.output) / "model" / "model.safetensors")


def _copies(config: TrainConfig) -> tuple[list[float], Tensor, list[Tensor], Tensor]:
    """Losses; this rank's weight, the first stage's as both know it, and the tokens of the step that begins."""
    trainer = Trainer(prepare(config, ranks=2))
    found = [trainer.step(step).loss for step in range(5)]
    inputs, _ = trainer.members.prepared.data.train.batch(trainer.order.ids(5))
    trainer.model.tied.begin_step(inputs, exact=False)
    dist.barrier()  # a rank that ends would take its message along
    state = [rows.clone() for rows in trainer.model.tied.state.values()]
    return found, trainer.model.tied.copies[0].detach().clone(), state, inputs.unique()


def test_the_first_stage_follows_the_last(ranks: Ranks, tmp_path: Path):
    """The error is one of the last change, not of the weight."""
    runs = {
        name: ranks.run(_copies, tied(tmp_path, pipeline={"tied_rows": name}), timeout=LIMIT)
        for name in ("fp32", "bf16", "fp8")
    }
    errors = {"fp32": 0, "bf16": 2e-5, "fp8": 1e-3}
    for name, ((first, following, own, tokens), (last, kept, known, _)) in runs.items():
        assert (following - kept)[tokens].abs().max() <= errors[name]
        assert not torch.equal(following, kept), "rows of other tokens are old"
        assert [rows.equal(following) for rows in (*own, *known)] == [True, True] * (name != "fp32")
        assert first == last
        assert first == pytest.approx(runs["fp32"][0][0], abs={"fp32": 0, "bf16": 1e-3, "fp8": 1e-2}[name])
    assert runs["bf16"][0][0] != runs["fp32"][0][0]


def test_a_broken_run_goes_on_bit_for_bit_with_one_copy_saved(ranks: Ranks, tmp_path: Path):
    """In two pipelines; evaluations between the steps change nothing either."""
    sections = {
        "model": {"tied": True, "dropout": 0.1}, "gradients": {"storage": "fp8"},
        "pipeline": {"tied_rows": "bf16", "forward": "int4", "data_parallel": 2, "microbatches": 2},
    }  # fmt: skip
    whole = tied(tmp_path / "whole", run={"steps": 4}, **sections)
    ranks.run(losses, whole, ranks=whole.ranks, timeout=LIMIT)
    first = tied(tmp_path / "parts", run={"steps": 4, "eval_every": 1, "checkpoint_every": 2}, **sections)
    ranks.outcomes(stops_after, first, 2, ranks=first.ranks, timeout=LIMIT)
    name = "model/model.embed_tokens.weight"
    assert [name in weights(first, rank) for rank in range(first.ranks)] == [False, True] * 2
    ranks.run(losses, again(first, run=RESUME), ranks=first.ranks, timeout=LIMIT)
    assert curve(first) == curve(whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [(ONE, {}), ({}, {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}), ({}, THREE)],
    ids=["from-one", "to-a-v", "to-three"],
)
def test_a_run_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]):
    whole = tied(tmp_path / "whole", pipeline=ONE, run={"steps": 4})
    expected = losses(whole)
    bf16 = {"tied_rows": "bf16"}
    first = tied(tmp_path / "parts", pipeline=bf16 | before, run={"steps": 4, "checkpoint_every": 2})
    ranks.outcomes(stops_after, first, 2, ranks=first.ranks, timeout=LIMIT)
    second = again(first, pipeline=after, run=RESUME)
    for outcome in ranks.run(losses, second, ranks=second.ranks, timeout=LIMIT):
        assert outcome == pytest.approx(expected[2:], abs=1e-3)


HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def _with_head(folder: Path, *, differs: bool, alone: bool = False) -> TrainConfig:
    """A run on a model whose configuration ties its head, which the file holds as well, or `alone`."""
    path = Path(base(folder, tied=True))
    weights = load_file(path / "model.safetensors")
    weights[HEAD] = weights[f"model.{EMBEDDING}"] + differs * torch.randn(256, 32) / 10
    if alone:
        del weights[f"model.{EMBEDDING}"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return tiny(folder, model={"pretrained": str(path)}, run={"steps": 4, "save_model": True, "checkpoint_every": 2})


@pytest.mark.parametrize(
    "pipeline",
    [
        {},
        pytest.param(THREE, marks=pytest.mark.slow),
        pytest.param({"schedule": "ZBVZeroBubble", "stages_per_rank": 2}, marks=pytest.mark.slow),
    ],
    ids=["two", "three", "v-shaped"],
)
def test_a_head_of_its_own_is_trained_whatever_the_configuration_says(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, pipeline: dict[str, Any]
):
    """As Transformers loads it; on one rank, several, after a resume in another layout, and when it is saved."""
    config = _with_head(tmp_path, differs=True)
    alone = again(config, pipeline=ONE)
    expected, whole = losses(alone), _saved(alone)
    assert not torch.equal(whole[HEAD], whole[f"model.{EMBEDDING}"])
    assert caplog.text.count("which ties embedding and output matrix, but has two different ones") == 1
    assert "not used" not in caplog.text
    parts = again(config, pipeline=pipeline)
    ranks.outcomes(stops_after, parts, 2, ranks=parts.ranks, timeout=LIMIT)
    for outcome in ranks.run(losses, again(parts, run=RESUME), ranks=parts.ranks, timeout=LIMIT):
        assert outcome == pytest.approx(expected[2:], rel=2e-5)
    torch.testing.assert_close(_saved(parts), whole, rtol=1e-3, atol=2e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert not model.config.tie_word_embeddings
    assert losses(again(alone, run=RESUME)) == pytest.approx(expected[4:], rel=2e-5)


@pytest.mark.parametrize("alone", [False, True])
def test_a_head_that_repeats_the_embedding_or_stands_for_it_stays_tied(ranks: Ranks, tmp_path: Path, alone: bool):
    config = _with_head(tmp_path, differs=False, alone=alone)
    assert ranks.run(losses, config, timeout=LIMIT)[0] == pytest.approx(losses(again(config, pipeline=ONE)), rel=2e-5)
    assert HEAD not in _saved(config)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.tie_word_embeddings


def _both_copies(config: TrainConfig) -> list[Tensor]:
    trainer = Trainer(prepare(config, ranks=config.ranks))
    for step in range(3):
        trainer.step(step)
    dist.barrier()  # a rank that ends would take its message along
    return [copy.detach().clone() for copy in trainer.model.tied.copies]


def test_two_copies_on_one_rank_stay_equal_when_pipelines_average_in_few_bits(ranks: Ranks, tmp_path: Path):
    """They are in different buckets, so the average of each is rounded in another way."""
    v_shaped = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2, "data_parallel": 2, "microbatches": 4}
    config = tied(tmp_path, pipeline=v_shaped, gradients={"all_reduce": "int8"}, data={"batch": 8})
    copies = [each for each in ranks.run(_both_copies, config, ranks=config.ranks, timeout=LIMIT) if each]
    assert [len(each) for each in copies] == [2, 2]
    for copy in (copies[0][1], *copies[1]):
        assert torch.equal(copy, copies[0][0])


def _with_nan(config: TrainConfig) -> None:
    """A gradient of the embedding alone is not finite."""
    trainer = Trainer(prepare(config, ranks=2))
    if trainer.model.tied.follower is not None:
        trainer.model.tied.follower.register_hook(lambda gradient: gradient * math.inf)
    trainer.step(0)


def test_a_gradient_that_is_not_finite_stops_both_ranks(ranks: Ranks, tmp_path: Path):
    for outcome in ranks.outcomes(_with_nan, tied(tmp_path, pipeline={"tied_rows": "fp8"}), timeout=LIMIT):
        assert (outcome.kind, "the norm of the gradients nan" in outcome.text) == ("DivergedError", True), outcome


def _damaged(config: TrainConfig, sender: int) -> None:
    def change(number: int, message: Tensor) -> None:
        if 500 < message.numel() < 4000:  # rows: activations are larger, all else is smaller
            message[3] ^= 16

    with on_the_way(sender, change):
        train(config)


@pytest.mark.slow
def test_damaged_rows_are_noticed(ranks: Ranks, tmp_path: Path):
    config = tied(tmp_path, run={"timeout_seconds": 10})
    for sender, about in enumerate(("gradients", "weights")):
        outcomes = ranks.outcomes(_damaged, config, sender, timeout=LIMIT)
        expected = f"tied embedding, {about}, number 0: the message from rank {sender} is damaged"
        assert expected in outcomes[1 - sender].text, outcomes[1 - sender]
        assert isinstance(outcomes[sender], Failure)


def test_a_resume_compares_the_format(tmp_path: Path):
    config = tied(tmp_path, pipeline=ONE, run={"steps": 2, "checkpoint_every": 1})
    train(config)
    changed = again(config, pipeline={"tied_rows": "bf16"}, run=RESUME)
    with pytest.raises(ConfigError, match=r"pipeline.tied_rows was Cast\(dtype=torch.float32\) and is Cast"):
        train(changed)


def test_bytes_of_many_rows():
    """Messages of at most 8 MiB of float32, each with a checksum; a text has fewer different tokens than tokens."""
    assert row_bytes(8192, 576, parse("fp32")) == 8192 * 576 * 4 + 8 * math.ceil(8192 / 3640)
    assert row_bytes(8192, 576, parse("bf16"), checksums=False) == 8192 * 576 * 2
    assert row_bytes(0, 576, parse("bf16")) == 0
    assert [expected_rows(tokens, 49152) for tokens in (1, 512, 2048, 65536)] == [1, 213, 575, 6903]
    assert expected_rows(1 << 30, 49152) == 49152
