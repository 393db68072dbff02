"""What the model writes before and after training: the words of the whole model, whatever its layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from lowbit_run.train import TrainConfig, train
from lowbit_run.train.metrics import Summary
from lowbit_run.train.model import StageModule
from lowbit_run.train.prepare import prepare
from lowbit_run.train.trainer import Trainer
from lowbit_run.train.words import Words
from tests.lowbit_run.train.runs import LIMIT, ONE, again, answering, base, tiny
from tests.processes import Ranks

PROMPT = "what few words"


def _written(config: TrainConfig) -> tuple[dict[str, str], list[float]]:
    """The words after two steps, and the losses of steps before and after them."""
    trainer = Trainer(prepare(config, ranks=config.ranks))
    losses = [trainer.step(step).loss for step in range(2)]
    words = Words(trainer).write()
    return words, [*losses, trainer.step(2).loss]


def _whole(config: TrainConfig) -> str:
    """The same words from the whole model, one token after the other, without a pipeline."""
    trainer = Trainer(prepare(config, ranks=1))
    for step in range(2):
        trainer.step(step)
    [module] = trainer.model.modules.values()
    assert isinstance(module, StageModule)
    ids = list(PROMPT.encode())
    with torch.no_grad():
        module.eval()
        for _ in range(config.data.sequence // 2):
            ids.append(int(module(torch.tensor([ids[-config.data.sequence :]]))[0, -1].argmax()))
    return repr(bytes(ids[len(PROMPT) :]).decode(errors="replace"))


@pytest.mark.parametrize(
    ("model", "pipeline"),
    [
        ({}, {}),
        ({"tied": True}, {}),
        ({"family": "gpt2"}, {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}),
    ],
)
def test_a_pipeline_writes_the_words_of_the_whole_model_and_trains_as_without_them(
    ranks: Ranks, tmp_path: Path, model: dict[str, Any], pipeline: dict[str, Any]
):
    rest: dict[str, Any] = {"data": {"sequence": 48}, "optimizer": {"lr": 3e-2}, "run": {"prompt": PROMPT}}
    config = tiny(tmp_path, model=model, pipeline=pipeline, **rest)
    [(first, losses), other] = ranks.run(_written, config, timeout=LIMIT)
    assert other == (first, losses)
    [whole] = ranks.run(_whole, again(config, pipeline=ONE), ranks=1)
    assert first == {"prompt": repr(PROMPT), "words": whole}
    [(nothing, silent), _] = ranks.run(_written, again(config, run={"prompt": ""}), timeout=LIMIT)
    assert (nothing, silent) == ({}, losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TransformQuant(bits=5)", "tah-quant", "int4", "TransformQuant(bits='auto')"])
def test_the_formats_of_training_carry_words(ranks: Ranks, tmp_path: Path, name: str):
    pipeline = {"forward": name, "warmup_steps": 1}
    config = tiny(tmp_path, data={"sequence": 32}, pipeline=pipeline, run={"prompt": "auto"})
    (words, losses), other = ranks.run(_written, config, timeout=LIMIT)
    assert other == (words, losses)
    assert words["words"] != "''"
    [(_, silent), _] = ranks.run(_written, again(config, run={"prompt": ""}), timeout=LIMIT)
    assert losses == silent


def _summary(config: TrainConfig) -> Summary:
    return train(config)


@pytest.mark.parametrize("weights", ["fp32", "nf4"])
def test_adapters_answer_a_held_out_prompt_before_and_after(ranks: Ranks, tmp_path: Path, weights: str):
    pytest.importorskip("peft")
    if weights == "nf4":
        pytest.importorskip("bitsandbytes")
    model = {"pretrained": base(tmp_path, dim=64), "weights": weights}
    rest: dict[str, Any] = {"lora": {"rank": 2}, "optimizer": {"lr": 1.0}, "run": {"prompt": "auto"}}
    config = answering(tmp_path, model=model, **rest)
    first, second = ranks.run(_summary, config, timeout=LIMIT)
    assert first.words == second.words
    assert first.words["prompt"].endswith("='"), "a whole prompt, and no part of its answer"
    assert first.words["before training"] != first.words["after training"]


def test_progress_and_summary_have_the_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = tiny(tmp_path, pipeline=ONE, run={"prompt": PROMPT, "progress": True})
    enable_progress_bar()
    words, shown = train(config).words, capfd.readouterr().err
    assert list(words) == ["prompt", "before training", "after training"]
    for when in ("before training", "after training"):
        assert f"{when}, after {PROMPT[-8:]!r} the model writes {words[when]}\n" in shown
    assert "%|" not in shown, "bars of Transformers"


def test_a_run_without_held_out_text_says_why_it_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = tiny(tmp_path, data={"held_out_share": 0}, pipeline=ONE, run={"prompt": "auto"})
    assert train(config).words == {}
    assert [r.getMessage() for r in caplog.records].count(
        "the model writes no words: there is no held-out text (run.prompt)"
    ) == 1
