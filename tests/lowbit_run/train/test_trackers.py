"""Curves in W&B and trackio, by Accelerate's trackers; their packages are stand-ins here."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowbit_run.train import ConfigError, train
from lowbit_run.train.prepare import prepare
from tests.lowbit_run.train.runs import ONE, again, losses, tiny


class Service:
    """Stands in for `wandb` and `trackio`, with the functions that Accelerate calls."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.lines, self.begun, self.ended = fails_at, list[tuple[int, dict[str, float]]](), {}, False
        self.settings: dict[str, Any] = {}
        self.config = SimpleNamespace(update=lambda values, **_: self.settings.update(values))

    def init(self, **about: Any) -> "Service":
        self.begun = about
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the service is gone")
        self.lines.append((step, values))

    def finish(self) -> None:
        self.ended = True


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    made = {"wandb": Service(), "trackio": Service(fails_at=2)}
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name in made or found(name, *rest))
    for name, service in made.items():
        monkeypatch.setitem(sys.modules, name, service)  # pyright: ignore[reportArgumentType]
    return made


def test_services_get_the_curves_of_a_run_and_may_fail(
    tmp_path: Path, services: dict[str, Service], caplog: pytest.LogCaptureFixture
):
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 3, "trackers": ["wandb", "trackio"]})
    summary = train(config)
    kept, failed = services["wandb"], services["trackio"]
    assert kept.begun == failed.begun == {"project": "lowbit", "name": Path(config.run.output).name}
    assert kept.settings["optimizer.lr"] == str(config.optimizer.lr)
    steps = [(step, values["train/loss"]) for step, values in kept.lines if "train/loss" in values]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert kept.lines[-1][1]["evaluation/held_out_loss"] == summary.held_out_loss
    assert kept.ended
    assert [step for step, _ in failed.lines] == [1]
    assert caplog.text.count("trackio gets no more curves: ConnectionError: the service is gone") == 1
    without = again(config, run={"trackers": [], "output": str(tmp_path / "without")})
    assert losses(without)[:3] == [loss for _, loss in steps]


def test_a_missing_package_is_one_line_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest)
    )
    with pytest.raises(
        ConfigError, match=r"^run\.trackers is wandb, and wandb cannot be imported; .*pip install wandb$"
    ):
        prepare(tiny(tmp_path, run={"trackers": ["wandb"]}), ranks=2)
    with pytest.raises(ConfigError, match=r"run\.trackers"):
        tiny(tmp_path, run={"trackers": ["mlflow"]})
