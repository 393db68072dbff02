"""Jobs whose group is not Gloo's, as on GPUs with NCCL: stages make a Gloo group next to it, by themselves."""

import gc
import logging
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # pyright: ignore
from torch.testing._internal.distributed import fake_pg  # registers a backend that carries nothing

from lowbit.collectives import PeerError
from lowbit.pipeline import connect_more
from lowbit.wire import connections
from lowbit.wire.connections import connections_of, gloo_of
from lowbit.wire.pytorch import default_group
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.test_staged import FIT
from tests.processes import Ranks, on_ranks

assert fake_pg
ON_GPUS = "cuda:fake"  # as in an NCCL job, nothing in the default group carries tensors on the CPU


def over(backend: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function on a rank whose default group has this backend."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("stand-in", default_group().get_group_store())
    dist.destroy_process_group()
    limit = timedelta(seconds=20)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    return function(*args)


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        connections.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(schedule: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Losses of some steps and outputs of the evaluations between them, of two pipelines; and what was logged."""
    said, losses, outputs = Said(), [], []
    for _ in range(2):
        run = toy.Run(schedule, toy.lowbit(warmup_steps=1, timeout=20.0, **FIT))
        for step in range(2):
            run.train(step)
            outputs.append(run.evaluate(step))
        losses += run.losses
    return losses, [y for y in outputs if y is not None], said.lines


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-2", "zbv"])
def test_losses_are_those_over_gloo_and_the_other_group_is_told_of_once(ranks: Ranks, schedule: str):
    found, expected = ranks.run(over, ON_GPUS, trained, schedule), ranks.run(trained, schedule)
    for ours, theirs in zip(found, expected, strict=True):
        assert toy.same(ours[0], theirs[0])
        assert toy.same(ours[1], theirs[1])
    assert [lines for *_, lines in expected] == [[], []], "a group over Gloo is used as it is"
    assert [lines for *_, lines in found] == [
        [
            "messages of pipelines go over a Gloo group, made next to that of cuda:fake (2 ranks); tensors on a GPU "
            "pass through the memory of the host"
        ],
        [],
    ]


def dropped() -> None:
    gc.disable()  # a group that waits for it keeps its connections
    try:
        run = toy.Run("1f1b", toy.lowbit(**FIT))
        run.train(0)
        left = weakref.ref(run.stages[0].lanes.transport.group)
        assert left() is gloo_of(default_group(), 20.0)
        assert left() is not default_group()
        dist.destroy_process_group()
        assert left() is not None, "the pipeline may still report why it fails"
        del run
        assert left() is None
    finally:
        gc.enable()
        dist.init_process_group("fake", store=HashStore(), rank=0, world_size=1)  # for the end of the test


def test_it_goes_with_the_group_and_the_pipeline(ranks: Ranks):
    ranks.run(over, ON_GPUS, dropped)


def alone() -> str:
    if dist.get_rank() == 0:
        toy.Run("1f1b", toy.lowbit(timeout=2.0, **FIT))
    return "never came"


@pytest.mark.slow
def test_a_rank_that_makes_no_stage_is_named_in_time(ranks: Ranks):
    found, other = toy.timely(ranks, over, ON_GPUS, alone)
    assert found.kind == "AgreementError"
    assert found.text.startswith("rank 1 did not report within 2 s: not started, ended early, busy for longer")
    assert "\n" not in found.text
    assert other == "never came"


@on_ranks
def test_a_group_that_cannot_connect_is_an_error_in_one_line() -> None:
    refused = RuntimeError("[enforce fail at tcp/device.cc:1] rv != -1.\nC++ CapturedCall: frame 0")
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(dist, "ProcessGroupGloo", side_effect=refused),
        pytest.raises(PeerError) as caught,
    ):
        gloo_of(default_group(), 5.0)
    assert str(caught.value) == (
        "the Gloo group next to that of cuda:nccl did not connect within 5 s (RuntimeError: [enforce fail at "
        "tcp/device.cc:1] rv != -1.); allowed: firewalls that let the ranks connect to each other on all ports, and "
        "GLOO_SOCKET_IFNAME with the network interface to use"
    )


def widened() -> None:
    connect_more(None, 3, timeout=20)
    assert len(connections_of(gloo_of(default_group(), 20.0))) == 3
    run = toy.Run("1f1b", toy.lowbit(timeout=20.0, **FIT))
    run.train(0)


def test_it_can_have_several_connections(ranks: Ranks):
    ranks.run(over, ON_GPUS, widened)
