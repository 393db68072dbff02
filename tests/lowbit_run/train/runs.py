"""Training runs small enough for tests, and functions that the ranks of a test execute."""

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit_run.train import StepMetrics, TrainConfig, from_mapping, members, train
from lowbit_run.train.metrics import read_metrics

# Always the same, so that no change elsewhere moves a sum by its last bit.
_WORDS = ("a", "bit", "is", "the", "unit", "of", "what", "few", "words", "tell", "and", "all", "links", "take")
ONE: dict[str, Any] = {"ranks": 1, "stages_per_rank": 1, "schedule": "GPipe", "data_parallel": 1, "layers": ()}
RESUME: dict[str, Any] = {"resume": True, "overwrite": False}
LIMIT = 110  # seconds, where everything else runs at the same time
TEXT = " ".join(random.Random(0).choices(_WORDS, k=2500))


def tiny(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    """A run of a few seconds in `folder`, on text that is written there."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text(TEXT)
    values: dict[str, dict[str, Any]] = {
        "model": {"dim": 32, "layers": 4, "heads": 2, "ffn": 64},
        "data": {"text": str(text), "sequence": 16, "batch": 8},
        "pipeline": {"microbatches": 4, "warmup_steps": 0, "forward": "fp32", "tied_rows": "fp32"},
        "optimizer": {"lr": 3e-3, "lr_warmup_steps": 2, "clip": 0.5},
        "run": {
            "output": str(folder / "run"), "steps": 3, "checkpoint_every": 0, "eval_batches": 2, "overwrite": True,
            "tensorboard": False, "progress": False, "save_model": False, "report": False, "prompt": "",
            "precision": "fp32", "threads": 1, "timeout_seconds": 60,
        },
    }  # fmt: skip
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    return from_mapping(values)


def base(folder: Path, family: str = "llama", *, seed: int = 7, **model: Any) -> str:
    """A folder with a model of random weights."""
    from lowbit_run.train.model import build_model
    from lowbit_run.train.pretrained import ByteTokenizer

    config = tiny(folder, model={"family": family, **model}).model
    built = build_model(config, vocab=256, sequence=24, seed=seed)
    path = folder / "base"
    built.save_pretrained(path)
    ByteTokenizer().hugging_face().save_pretrained(path)
    return str(path)


def questions(folder: Path, count: int = 60) -> Path:
    """A file of samples whose answers have between one and five letters."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    words = ["".join(generator.choices("abc", k=generator.randint(1, 5))) for _ in range(count)]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{word}=", "answer": word[::-1]}) + "\n" for word in words))
    return path


def answering(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    """A `tiny` run on `questions`, a sixth of which are held out."""
    data = {"format": "jsonl", "text": str(questions(folder)), "held_out_share": 0.2, "sequence": 24, "batch": 8}
    return tiny(folder, **sections | {"data": data | sections.get("data", {})})


def again(config: TrainConfig, **sections: dict[str, Any]) -> TrainConfig:
    """The same run with changes."""
    values = json.loads(config.to_json())
    for section, changes in sections.items():
        values[section] |= changes
    return from_mapping(values)


def stopped(config: TrainConfig, after: int) -> TrainConfig:
    """Train and stop after so many steps; returns the run that resumes."""

    def stop(metrics: StepMetrics) -> None:
        if metrics.step == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, on_step=stop)
    return again(config, run=RESUME)


@contextlib.contextmanager
def own_machines() -> Iterator[None]:
    """Each rank seems to be on a machine of its own."""
    with mock.patch.object(members, "machine_name", return_value=f"machine of rank {dist.get_rank()}"):
        yield


def steps(config: TrainConfig) -> list[StepMetrics]:
    """Train as a rank; the metrics of every step."""
    found: list[StepMetrics] = []
    train(config, on_step=found.append)
    return found


def losses(config: TrainConfig) -> list[float]:
    """Train as a rank; the loss of every step, then the held-out losses."""
    training: list[float] = []
    summary = train(config, on_step=lambda metrics: training.append(metrics.loss))
    assert summary.held_out_loss is not None
    return [*training, summary.held_out_loss]


def curve(config: TrainConfig) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step that a finished or broken run wrote down."""
    lines = read_metrics(Path(config.run.output) / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
