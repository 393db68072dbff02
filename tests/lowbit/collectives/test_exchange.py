"""Exchanges between real ranks: lanes, memory, checksums; groups that torch.distributed has not made, as torchft's."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from lowbit.codecs import GroupInt
from lowbit.collectives import (
    AgreementError,
    PeerError,
    agree,
    algorithms,
    all_gather,
    all_reduce,
    all_reduce_bytes,
    reduce_scatter,
)
from lowbit.collectives.calls import CollectiveCall, Transport, queue_of
from lowbit.collectives.exchange import PayloadExchange, Scratch
from lowbit.gradients import all_reduce_hook
from lowbit.wire import pytorch
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit.wire.messages import gather_json
from lowbit.wire.pytorch import default_group
from tests.damage import Flip, Replay, on_the_way, secret
from tests.lowbit.collectives.traffic import sent_bytes
from tests.processes import Ranks, impatient, on_ranks


def crossed(sizes: list[list[int]], transport: Transport) -> None:
    """Rank s sends `sizes[s][r]` bytes to rank r."""
    group, rank = default_group(), dist.get_rank()
    incoming, taken = [row[rank] for row in sizes], []

    def work(exchange: PayloadExchange) -> None:
        exchange.open(0, incoming, sizes[rank])
        for to in range(exchange.ranks):
            exchange.box(0, to).fill_(10 * rank + to)
            exchange.send(0, to)
        taken.extend(exchange.take(0, source).tolist() for source in range(exchange.ranks))

    facts = {"collective": "crossing", "sizes": str(sizes)}
    call = CollectiveCall(
        facts=facts, group=group, device=torch.device("cpu"), timeout=20, work=work, transport=transport
    )
    queue_of(group).submit(call).wait()
    assert taken == [[10 * source + rank] * size for source, size in enumerate(incoming)]


UNEVEN = [[3, 500, 0], [0, 7, 2], [40, 0, 0]]


@pytest.mark.parametrize(
    ("sizes", "transport"), [([[0, 0]] * 2, "messages"), ([[0, 0]] * 2, "collectives"), (UNEVEN, "messages")]
)
def test_messages_to_each_rank_may_have_any_size(ranks: Ranks, sizes: list[list[int]], transport: Transport):
    ranks.run(crossed, sizes, transport, ranks=len(sizes))


# Memory for payloads.

CPU = torch.device("cpu")
MB = 1 << 20


def take_all(scratch: Scratch, sizes: list[int]) -> None:
    """One call's payloads: each has its own memory."""
    taken = [scratch.take(size, CPU) for size in sizes]
    for i, payload in enumerate(taken):
        assert payload.numel() == sizes[i]
        assert payload.data_ptr() % 64 == 0
        payload.fill_(i)
    for i, payload in enumerate(taken):
        assert bool((payload == i).all())
    scratch.reset()


def test_as_much_is_held_as_the_largest_call_needed() -> None:
    scratch = Scratch()
    for sizes in ([3 * MB, 5], [2 * MB, 2 * MB, 2 * MB], [5 * MB, 1], [100] * 50, [0], [6 * MB]):
        take_all(scratch, sizes)
    take_all(scratch, [2 * MB, 2 * MB, 2 * MB])
    assert 6 * MB <= scratch.nbytes() <= 6 * MB + 64
    held = scratch.take(MB, CPU).data_ptr()
    scratch.reset()
    assert scratch.take(2 * MB, CPU).data_ptr() == held, "no fresh pages"


INT8, EVEN = GroupInt(bits=8, group=64), GroupInt(bits=8, group=128, symmetric=True)
TIMEOUT = 8.0


def data(rank: int) -> Tensor:
    return torch.randn(20_001, generator=torch.Generator().manual_seed(rank))


def called(kind: str, **options: Any) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if kind == "reduce_scatter":
        out, whole = torch.empty(600), torch.cat([data(rank)[:600]] * ranks)
        reduce_scatter(out, whole, INT8, chunk=320, timeout=10, **options)
    elif kind == "all_gather":
        out = torch.empty(600 * ranks)
        all_gather(out, data(rank)[:600], INT8, chunk=320, timeout=10, **options)
    else:
        out = data(rank)[:9001]
        how: Any = {"algorithm": kind, "chunk": 2000, "small": 0, "timeout": 10}
        all_reduce(out, INT8, **(how | options))
    return out


def damages(kind: str, transport: str, change: Any) -> tuple[str, str, int]:
    """Two calls, in the second of which something that rank 0 sends is changed on its way."""
    with on_the_way(0, change):
        called(kind, transport=transport)
        try:
            with impatient(0.5):
                called(kind, transport=transport)
        except Exception as error:
            return type(error).__name__, str(error), getattr(error, "rank", -1)
    return "", "", -1


MESSAGES = {"two_shot": 3 + 3, "one_shot": 5, "reduce_scatter": 2, "all_gather": 2}
"""Sealed by a rank in a call of two ranks that sends messages."""


@pytest.mark.parametrize(
    ("kind", "transport"), [*((kind, "messages") for kind in MESSAGES), ("two_shot", "collectives")]
)
def test_a_flipped_bit_is_an_error_that_names_its_sender(ranks: Ranks, kind: str, transport: str):
    count = MESSAGES[kind]
    if transport == "collectives":  # which seal what a rank sends to itself, too
        count = 6 + 3
    _, (error, text, culprit) = ranks.run(damages, kind, transport, Flip(count))
    assert error == "DamagedError"
    name = "all_reduce" if "shot" in kind else kind
    assert text.startswith(f"{name}, call 1, lane 0: the message from rank 0 is damaged: "), text
    assert culprit == 0


@pytest.mark.parametrize("transport", ["messages", "collectives"])
def test_a_message_of_an_earlier_call_is_noticed(ranks: Ranks, transport: str):
    outcome = ranks.run(damages, "one_shot", transport, Replay(1, 6))[1]
    assert outcome[0] == "DamagedError"
    assert "all_reduce, call 1, lane 1: the message from rank 0 is damaged" in outcome[1]


def with_settings(checksums: dict[int, bool], secrets: dict[int, str], transport: str) -> str:
    rank = dist.get_rank()
    with secret(secrets.get(rank, "same")):
        try:
            called("one_shot", checksums=checksums.get(rank, True), transport=transport)
        except AgreementError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("transport", ["messages", "collectives"])
def test_ranks_must_agree_on_checksums_and_secret(ranks: Ranks, transport: str):
    errors = ranks.run(with_settings, {1: False}, {}, transport)
    assert errors == ["the ranks do not agree:\n  checksums: on on rank 0; off on rank 1"] * 2
    errors = ranks.run(with_settings, {}, {1: "another"}, transport, ranks=3)
    assert len(set(errors)) == 1
    assert "LOWBIT_SECRET: one with digest" in errors[0]
    assert "on rank 0, rank 2" in errors[0] or "on rank 0 and rank 2" in errors[0]
    assert ranks.run(with_settings, {0: False, 1: False}, {}, transport) == ["", ""]


def bytes_and_sums(checksums: bool) -> tuple[list[int], list[Tensor]]:
    with sent_bytes() as sent:
        sums = [called(kind, checksums=checksums) for kind in MESSAGES]
    for kind in ("two_shot", "one_shot"):
        how: Any = {"algorithm": kind, "chunk": 2000, "small": 0, "checksums": checksums}
        rank, ranks = dist.get_rank(), dist.get_world_size()
        more = CHECKSUM_BYTES * (ranks - 1) * MESSAGES[kind] * checksums
        plain = all_reduce_bytes(9001, INT8, rank=rank, ranks=ranks, **how | {"checksums": False})
        assert all_reduce_bytes(9001, INT8, rank=rank, ranks=ranks, **how) == plain + more
    return sent, sums


def test_without_checksums_nothing_is_added_and_with_them_nothing_changes(ranks: Ranks):
    off, on = (ranks.run(bytes_and_sums, checksums) for checksums in (False, True))
    for (few, plain), (more, checked) in zip(off, on, strict=True):
        assert [size + CHECKSUM_BYTES for size in few] == more
        assert len(few) == sum(MESSAGES.values())
        assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))


class Wrapper(dist.ProcessGroup):
    """As torchft's: a group that PyTorch does not know around one that changes."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.inside: dist.ProcessGroup | None = None

    @property
    def parent(self) -> dist.ProcessGroup:
        assert self.inside is not None, "not connected"
        return self.inside


def bare(name: str, ranks: list[int]) -> dist.ProcessGroup:
    store: Any = PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, limit = ranks.index(dist.get_rank()), timedelta(seconds=TIMEOUT)
    group: Any = dist.ProcessGroup(store, rank, len(ranks))
    gloo: Any = dist.ProcessGroupGloo
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = gloo(store, rank, len(ranks), limit)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@pytest.mark.parametrize("transport", ["messages", "collectives"])
@on_ranks(3)
def test_sums_in_a_group_in_another_order(transport: Any) -> None:
    group, job = bare(f"other-{transport}", [2, 1, 0]), dist.get_rank()
    known = dist.new_group([0, 1, 2])
    expected = torch.stack([data(rank) for rank in range(3)]).sum(0)
    for algorithm in ("two_shot", "one_shot"):
        x = data(job)
        all_reduce(x, EVEN, group, algorithm=algorithm, transport=transport, small=0)  # pyright: ignore
        assert (x - expected).abs().max() < 0.2
        assert len(set(gather_json(x.double().sum().item(), group))) == 1
    small = data(job)[:100]
    all_reduce(small, EVEN, group)  # by PyTorch's own sum
    assert torch.allclose(small, expected[:100], atol=1e-5)
    gathered, again = torch.empty(3, 20_001), torch.empty(3 * 20_001)
    all_gather(gathered, data(job), EVEN, group, transport=transport, chunk=640)
    all_gather(again, data(job), EVEN, group, transport=transport, chunk=640, async_op=True).wait()
    for place, rank in enumerate([2, 1, 0]):  # the ranks of the group, not of the job
        assert (gathered[place] - data(rank)).abs().max() < 0.05
    assert torch.equal(again.view(3, -1), gathered)
    part = torch.empty(6667, dtype=torch.bfloat16)
    reduce_scatter(part, data(job), EVEN, group, op="avg", chunk=4096, transport=transport)
    assert (part - expected.view(3, -1)[2 - job] / 3).abs().max() < 0.1
    assert gather_json(job, group) == [2, 1, 0]
    agree(group, {"format": "int8"})
    all_reduce(data(job), EVEN, known)  # PyTorch's groups go on beside it


@on_ranks(4)
def test_a_rank_without_a_shard_waits_for_what_is_sent_to_it() -> None:
    """The next call gets the same memory, which an exchange that goes on would still write to."""
    works: list[Any] = []

    def recorded(*args: Any) -> Any:
        works.append(mock.Mock(wraps=exchange(*args)))
        return works[-1]

    exchange = pytorch.exchange
    x = torch.arange(40.0) + dist.get_rank()
    with mock.patch.object(pytorch, "exchange", recorded):
        all_reduce(x, GroupInt(bits=8, group=32), small=0, transport="collectives")
    assert [work.wait.call_count for work in works] == [1], f"of rank {dist.get_rank()}; the last has no elements"
    assert (x - (4 * torch.arange(40.0) + 6)).abs().max() < 1.5


@on_ranks
def test_a_rank_that_stays_away_from_collectives_is_noticed_within_the_limit() -> None:
    x = torch.ones(100)
    all_reduce(x, EVEN, small=0, transport="collectives", timeout=20)
    store = default_group().get_group_store()
    if dist.get_rank():
        return store.wait(["noticed"], timedelta(seconds=50))
    start = time.monotonic()
    with pytest.raises(PeerError, match="did not take part within 1 s"):
        all_reduce(x, EVEN, small=0, transport="collectives", timeout=1)
    assert time.monotonic() - start < 30, "less than the limit of the group"
    store.set("noticed", "")


@on_ranks
def test_after_a_disagreement_no_rank_goes_on_alone() -> None:
    """One rank makes a call that both know, the other a new one."""
    x = torch.ones(1000)
    all_reduce(x, EVEN, small=0, timeout=20)
    for numel in (500 if dist.get_rank() else 1000, 1000):
        start = time.monotonic()
        with pytest.raises(AgreementError, match=r"float32 \(1000,\) on rank 0; float32 \(500,\) on rank 1"):
            all_reduce(torch.ones(numel), EVEN, small=0, timeout=20)
        assert time.monotonic() - start < 10


def test_groups_whose_backends_are_not_named_use_gloo_between_cpus() -> None:
    """`init_process_group()` without a backend, as PyTorch recommends."""
    program = """
import torch, torch.distributed as dist
from lowbit.wire.pytorch import carries
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() != "gloo"
for group in (dist.group.WORLD, dist.new_group(), dist.new_group(backend="gloo")):
    assert carries(group, "gloo", torch.device("cpu"))
    assert not carries(group, "nccl", torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@on_ranks
def test_what_differs_is_said_on_all_ranks() -> None:
    group, job = bare("differ", [1, 0]), dist.get_rank()
    with pytest.raises(AgreementError, match=r"codec: .* on rank 0; .* on rank 1"):
        all_reduce(data(job), EVEN if job else GroupInt(bits=4, group=64, symmetric=True), group, timeout=TIMEOUT)
    with pytest.raises(TypeError, match="allowed: a ProcessGroup, such as"):
        all_reduce(data(job), EVEN, "world")
    with pytest.raises(ValueError, match="which has no store in this process; allowed"):
        all_reduce(data(job), EVEN, Wrapper())


@on_ranks
def test_a_hook_follows_a_wrapper_to_its_next_group() -> None:
    wrapper, job = Wrapper(), dist.get_rank()
    wrapper.inside = bare("first", [1, 0])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(200, 200, bias=False))
    model.register_comm_hook(None, all_reduce_hook(EVEN, group=wrapper, error_feedback=True, small=0))
    for name in ("first", "second"):
        if name == "second":
            wrapper.inside = bare(name, [0, 1])
        model.zero_grad()
        model(data(job)[:200]).sum().backward()
        mean = (data(0)[:200] + data(1)[:200]) / 2
        grad = model.module.weight.grad
        assert (grad - mean).abs().max() < 0.05  # type: ignore[operator]


def die() -> None:
    group, job = bare("die", [2, 1, 0]), dist.get_rank()
    all_reduce(data(job), EVEN, group, timeout=TIMEOUT)
    if job == 2:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 0 closed its connection") as caught:  # of the group
        all_reduce(data(job), EVEN, group, timeout=TIMEOUT)
    assert caught.value.rank == 0
    assert time.monotonic() - start < TIMEOUT


def die_between() -> None:
    """Rank 2 dies when rank 0 has its part of the sum, and rank 1 has not: rank 0 then waits for rank 1."""
    job, patient, parts = dist.get_rank(), 60.0, []
    all_reduce(data(job), EVEN, small=0, timeout=patient)
    encode = algorithms._encode

    def dying(*args: Any, **settings: Any) -> None:
        parts.append(args)
        if len(parts) == 2:
            time.sleep(1)  # the first has left
            os.kill(os.getpid(), 9)
        encode(*args, **settings)

    if job == 2:  # its process ends with it
        algorithms._encode = dying
    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 2") as caught:
        all_reduce(data(job), EVEN, small=0, timeout=patient)
    assert caught.value.rank == 2
    assert time.monotonic() - start < 0.3 * patient


@pytest.mark.parametrize("dying", [die, die_between])
def test_a_rank_that_dies_is_named(ranks: Ranks, dying: Any):
    outcomes = ranks.outcomes(dying, ranks=3)
    assert [getattr(outcome, "kind", outcome) for outcome in outcomes] == [None, None, "ended"]


@on_ranks
def test_sums_beyond_float16_are_infinite_at_any_size() -> None:
    """As with PyTorch's own all-reduce: loss scaling looks for them."""
    for numel in (100, 1 << 15):
        for algorithm in ("two_shot", "one_shot"):
            x = torch.full((numel,), 60000.0).half()
            x[::2] *= -1
            all_reduce(x, EVEN, algorithm=algorithm)  # pyright: ignore
            assert (x[::2] == -torch.inf).all()
            assert (x[1::2] == torch.inf).all()
    mean = torch.full((1 << 15,), 65504.0).half()
    all_reduce(mean, EVEN, op="avg")
    assert mean.isfinite().all()
