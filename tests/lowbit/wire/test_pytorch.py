"""Which versions of PyTorch are taken, and what a user of another one reads before any rank starts."""

import platform
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from lowbit.pipeline import LowBitStage
from lowbit.wire.pytorch import SUPPORTED_TORCH, TorchVersionError, check_torch
from lowbit_lab.network import SlowLink
from tests.command_line import invoke
from tests.lowbit_run.train.runs import tiny

LINE = "PyTorch {} is installed; lowbit works with 2.11 to 2.15: pip install 'torch>=2.11,<2.16'"


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3", "2.15.0a0+git1234567"])
def test_versions_that_work_are_taken(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(torch, "__version__", version)
    check_torch()


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "2.16.0.dev20261101+cu132", "3.0.0"])
def test_others_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(TorchVersionError) as caught:
        check_torch()
    assert str(caught.value) == LINE.format(version)


def test_the_package_asks_for_the_same_versions():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    oldest, newest = SUPPORTED_TORCH
    assert f"torch>=2.{oldest[1]},<2.{newest[1] + 1}" in project["dependencies"]


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["train", "--supervise"],
        ["demo", "--output", "demo"],
        ["bench", "pipeline", "--link", "unlimited"],
        ["bench", "gradients", "--link", "unlimited"],
        ["bench", "tensor-parallel", "--link", "unlimited"],
    ],
    ids=" ".join,
)
def test_commands_say_so_before_any_rank_starts(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.json").write_text(tiny(tmp_path).to_json())
    SlowLink.available()  # this and the next start processes at their first call only, which are no ranks
    platform.processor()
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    monkeypatch.setattr(subprocess, "Popen", None)
    result = invoke(*command)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: {LINE.format('2.16.0')}"


def test_a_stage_says_so_before_it_talks_to_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(TorchVersionError):
        LowBitStage(torch.nn.Identity(), 0, 2, "cpu")
