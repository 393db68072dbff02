from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lowbit_run.config import ConfigError
from lowbit_run.train.config import PipelineConfig, RunConfig, TrainConfig
from lowbit_run.train.device import choose_backend, choose_device
from tests.lowbit_run.train.runs import again, losses, tiny
from tests.processes import Ranks

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be a local rank on a machine with so many ranks and devices."""

    def pretend(*, devices: int, here: int, rank: int = 0, nccl: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    return pretend


@pytest.mark.parametrize(
    ("name", "devices", "here", "rank", "expected"),
    [
        ("auto", 0, 2, 0, "cpu"),
        ("auto", 1, 2, 1, "cpu"),
        ("auto", 2, 2, 1, "cuda:1"),
        ("cuda", 1, 2, 1, "cuda:0"),
        ("cuda", 2, 2, 1, "cuda:1"),
        ("cpu", 2, 2, 1, "cpu"),
    ],
)
def test_each_rank_has_its_device(machine, name, devices, here, rank, expected):
    machine(devices=devices, here=here, rank=rank)
    assert str(choose_device(name, ranks=4)) == expected


@pytest.mark.parametrize(("name", "text"), [("LOCAL_RANK", "x"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "0")])
def test_numbers_of_a_launcher_are_checked(machine, monkeypatch, name: str, text: str):
    machine(devices=2, here=2)
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is '{text}' in the environment; allowed: an int"):
        choose_device("cuda", ranks=2)


def test_devices_that_are_not_used_are_told_of(machine, caplog: pytest.LogCaptureFixture):
    machine(devices=1, here=2)
    choose_device("auto", ranks=2)
    assert "1 CUDA devices for 2 ranks: computing on the CPU" in caplog.text


def backend(device: torch.device, name: str, pipelines: int) -> str:
    config = TrainConfig(run=RunConfig(backend=name), pipeline=PipelineConfig(data_parallel=pipelines))  # pyright: ignore
    return choose_backend(config, device, ranks=4)


@pytest.mark.parametrize(
    ("name", "pipelines", "here", "devices", "nccl", "expected"),
    [
        ("auto", 2, 4, 4, True, "nccl"),  # one machine
        ("auto", 2, 2, 2, True, "gloo"),  # several
        ("auto", 2, 4, 1, True, "gloo"),  # shared
        ("auto", 2, 4, 4, False, "gloo"),
        ("auto", 1, 4, 4, True, "gloo"),  # no sums over pipelines
        ("nccl", 2, 2, 2, True, "nccl"),
        ("gloo", 2, 4, 4, True, "gloo"),
        ("gloo", 1, 4, 4, True, "gloo"),
    ],
)
def test_slow_networks_get_gloo(machine, name, pipelines, here, devices, nccl, expected):
    machine(devices=devices, here=here, nccl=nccl)
    assert backend(CUDA, name, pipelines) == expected


def test_impossible_backends_are_errors(machine):
    for device, pipelines, devices, nccl, problem in [
        (CUDA, 2, 4, False, "this PyTorch has no NCCL"),
        (CUDA, 2, 1, True, "NCCL needs a device for each rank, and 4 ranks share 1"),
        (CUDA, 1, 4, True, r"there is one pipeline, whose messages go over Gloo \(pipeline.data_parallel is 1\)"),
        (torch.device("cpu"), 2, 4, True, "the ranks compute on the CPU"),
    ]:
        machine(devices=devices, here=4, nccl=nccl)
        with pytest.raises(ConfigError, match=f"^run.backend is nccl; {problem}; allowed: auto or gloo$"):
            backend(device, "nccl", pipelines)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(("schedule", "per_rank"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_ranks_that_share_a_gpu_train_as_on_the_cpu(tmp_path: Path, ranks: Ranks, schedule: str, per_rank: int):
    config = tiny(tmp_path, pipeline={"schedule": schedule, "stages_per_rank": per_rank})
    cpu, cuda = (ranks.run(losses, again(config, run={"device": name}), timeout=180) for name in ("cpu", "cuda"))
    for rank in range(2):
        assert cuda[rank] == pytest.approx(cpu[rank], rel=1e-3)
