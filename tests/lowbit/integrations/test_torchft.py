"""`lowbit.integrations.torchft`: replicas in real processes that die, stop, return and contradict each other."""

import itertools
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit.codecs import GroupInt
from tests.lowbit.integrations.replicas import Replicas, diloco, dtypes, manager, sums
from tests.refused import refused

torchft = pytest.importorskip("torchft")

from lowbit.integrations.torchft import (  # noqa: E402
    LowBitManager,
    _contradiction,
    _differences,
    _digest,
    _Feedback,
    _Stated,
)  # fmt: skip

FOUR = GroupInt(bits=4, group=64, symmetric=True)
EIGHT = GroupInt(bits=8, group=64, symmetric=True)


def pauses(replicas: Replicas, name: str) -> list[float]:
    times = [line["time"] for line in replicas.lines(name)]
    return [later - sooner for sooner, later in itertools.pairwise(times)]


def assert_identical(replicas: Replicas, names: str) -> None:
    """After each step, all replicas that committed it have the same weights."""
    weights: dict[int, set[str]] = {}
    for line in itertools.chain(*map(replicas.lines, names)):
        weights.setdefault(line["step"], set()).add(line["weights"])
    assert [step for step, values in weights.items() if len(values) > 1] == []
    assert max(pauses(replicas, "a")) < 15


def assert_learned(replicas: Replicas, name: str) -> None:
    losses = [line["loss"] for line in replicas.lines(name)]
    assert statistics.fmean(losses[-5:]) < 0.8 * statistics.fmean(losses[:5])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_killed_replica_returns(asynchronous: bool, tmp_path: Path):
    replicas = Replicas(tmp_path, codec=FOUR, steps=60, pause=0.02, timeout=5, asynchronous=asynchronous)
    replicas.start("abc", until=12)
    replicas.processes["b"].kill()
    replicas.processes["b"].join()
    replicas.start("b")
    assert replicas.wait(60) == dict.fromkeys("abc", 0)
    assert {replicas.reached(name) for name in "abc"} == {60}
    assert_identical(replicas, "abc")
    assert len({line["process"] for line in replicas.lines("b")}) == 2
    second = [line["step"] for line in replicas.lines("b") if line["process"] == replicas.lines("b")[-1]["process"]]
    assert second == list(range(second[0], 61)), "it goes on where the others are"
    assert second[0] > 12
    assert_learned(replicas, "a")


def test_a_stopped_replica_is_left_behind_and_heals(tmp_path: Path):
    """As a machine that vanishes: nothing closes its connections."""
    replicas = Replicas(tmp_path, codec=FOUR, steps=150, pause=0.05, timeout=4)
    replicas.start("abc", until=8)
    os.kill(replicas.processes["b"].pid, signal.SIGSTOP)
    stopped = replicas.reached("b")
    replicas.await_(lambda: min(replicas.reached("a"), replicas.reached("c")) >= stopped + 20)
    assert {line["replicas"] for line in replicas.lines("a") if line["step"] > stopped + 3} == {2}
    os.kill(replicas.processes["b"].pid, signal.SIGCONT)
    assert replicas.wait(60) == dict.fromkeys("abc", 0)
    steps = [line["step"] for line in replicas.lines("b")]
    assert steps[-1] == 150
    assert max(later - sooner for sooner, later in itertools.pairwise(steps)) > 15, "it takes the others' weights"
    assert_identical(replicas, "abc")


def test_a_replica_that_stops_while_others_connect_to_it(tmp_path: Path):
    replicas = Replicas(tmp_path, codec=FOUR, steps=40, pause=0.02, timeout=4)
    replicas.start("ab", until=8)
    replicas.start("c", stops=True)
    replicas.await_(lambda: max(pauses(replicas, "a")) > 2, 30)  # the others do wait for it
    codes = replicas.wait(30)
    assert (codes.get("a"), codes.get("b")) == (0, 0)
    assert_identical(replicas, "ab")


def test_a_replica_that_contradicts_leaves(tmp_path: Path):
    replicas = Replicas(tmp_path, codec=FOUR, steps=40, pause=0.02)
    replicas.start("ab", until=4)
    replicas.start("d", codec=EIGHT, width=32, small=7)
    assert replicas.wait(60) == {"a": 0, "b": 0, "d": 1}
    assert replicas.lines("d") == []
    codec = f"codec is {EIGHT.identity()} on d, {FOUR.identity()} on the others"
    assert re.fullmatch(
        f"AgreementError: replicas do not agree, and d must leave: {re.escape(codec)}; model is .* on d, .* on the "
        "others; small is 7 on d, 0 on the others",
        replicas.written("d")[-1]["error"],
    )
    assert_identical(replicas, "ab")


def test_wrong_arguments_and_a_lighthouse_that_cannot_be_reached():
    def ours(**wrong: Any) -> Any:
        group = torchft.ProcessGroupGloo()
        return lambda: LowBitManager(group, load_state_dict=None, state_dict=None, min_replica_size=1, **wrong)

    began = time.monotonic()
    *_, unreached = refused(
        (ours(codec="int4"), TypeError, "codec"),
        (ours(codec=FOUR, error_feedback=1), TypeError, "error_feedback is 1; allowed: True or False"),
        (ours(codec=FOUR, small=-1), ValueError, "small is -1"),
        (
            lambda: manager("http://127.0.0.1:9", "a", {"codec": FOUR, "timeout": 2}),
            ConnectionError,
            "torchft's manager does not start: .*; allowed: the address",
        ),
    )
    assert "\n" not in unreached
    assert time.monotonic() - began < 10


def test_dtypes_and_operations(tmp_path: Path):
    """Floats are averaged in few bits; float64, integers and other operations by torchft itself, exactly."""
    replicas = Replicas(tmp_path, at_least=2, codec=FOUR, timeout=20)  # no step follows: the first compiles kernels
    replicas.start("ac", dtypes)
    assert replicas.wait(60) == {"a": 0, "c": 0}
    assert replicas.written("a") == replicas.written("c"), "the same bits on both"
    (line,) = replicas.written("a")
    *coded, double, integers, largest = torch.tensor(line["values"], dtype=torch.float64)
    mean = torch.linspace(-98, 98, 512, dtype=torch.float64)
    for values in coded:
        # Steps of a group are max / 7: half of one is lost of each of two contributions' mean, and half of the sum's.
        assert 0 < (values - mean).abs().max() < 98 / 7 * (1 / 2 + 1 / 2) + 0.5
    assert torch.equal(double, torch.full_like(mean, 98))
    assert torch.equal(integers, torch.arange(512).double() * (97 + 99))
    assert torch.equal(largest, torch.maximum(torch.linspace(-97, 97, 512), torch.linspace(-99, 99, 512)).double())
    assert line["committed"]


def assert_nothing_is_lost(replicas: Replicas, names: str, replicas_in_mean: int, **where: Any) -> None:
    """All means so far and what the errors still hold are the exact means: n means lack the sum of errors over n."""
    written = [[line for line in replicas.written(name) if "exact" in line] for name in names]
    lines = [next(line for line in each if where.items() <= line.items()) for each in written]
    exact, left, means = (torch.tensor([line[key] for line in lines]).double() for key in ("exact", "left", "means"))
    exact, left = exact.sum(0), left.sum(0)
    assert left.abs().max() > 0
    torch.testing.assert_close(means[0] + left / replicas_in_mean, exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_errors_are_made_up_for_with_a_spare_replica(tmp_path: Path):
    """One of the three adds zeros; the errors of the sums that it has coded are its own to make up for."""
    replicas = Replicas(tmp_path, at_least=3, codec=FOUR, steps=8, needed=2, timeout=20)
    replicas.start("abc", sums)
    assert replicas.wait(60) == dict.fromkeys("abc", 0)
    assert sum(line["participates"] for name in "abc" for line in replicas.written(name)) == 2
    assert_nothing_is_lost(replicas, "abc", 2)


def test_diloco(tmp_path: Path):
    """Both fragments have as many elements; each makes up for its own errors."""
    replicas = Replicas(tmp_path, at_least=2, codec=FOUR, steps=64, timeout=20)
    replicas.start("ab", diloco)
    assert replicas.wait(60) == {"a": 0, "b": 0}
    for fragment in (0, 1):
        assert_nothing_is_lost(replicas, "ab", 2, fragment=fragment)
    assert_learned(replicas, "a")


# Errors of quantization and members


def step(feedbacks: Sequence[_Feedback], seed: int, committed: bool = True) -> tuple[Tensor, Tensor]:
    """A step of these replicas: the exact mean, and that of values rounded to integers, all exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    count, exact, coded = len(feedbacks), torch.zeros(64), torch.zeros(64)
    for feedback in feedbacks:
        x = torch.randint(-256, 256, (64,), generator=generator) / 64
        feedback.begin()
        rest = feedback.of(x, 0, count)
        exact += x
        x = x + rest
        coded += x.round()
        rest.copy_(x - x.round())
    for feedback in feedbacks:
        feedback.settle(committed, count)
    return exact / count, coded / count


def kept(feedbacks: Sequence[_Feedback]) -> Tensor:
    """What the means so far of these replicas lack."""
    return torch.stack([value for feedback in feedbacks for value in feedback._kept.values()]).sum(0) / len(feedbacks)


def test_means_and_errors_are_the_exact_means_whoever_is_there():
    """A mean of n replicas lacks e / n of each error e. m replicas make up for it with e m / n."""
    a, b, c, d, e, f, g = (_Feedback() for _ in range(7))
    exact, means, lost = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    seeds = itertools.count()
    for replicas, dying in ([a, b, c, d], [c, d]), ([a, b], [b]), ([a], []), ([a, e, f, g], []):
        for _ in range(3):
            one, other = step(replicas, next(seeds))
            exact += one
            means += other
        assert torch.equal(means + kept(replicas) + lost, exact)
        assert kept(replicas).abs().max() > 0
        if dying:
            lost += kept(dying) * len(dying) / len(replicas)


def test_discarded_steps_other_weights_and_other_calls():
    two = [_Feedback(), _Feedback()]
    one = two[0]
    step(two, 0)
    before = kept(two)
    step(two, 1, committed=False)
    assert torch.equal(kept(two), before)
    one.begin()
    one.of(torch.zeros(64), 0, 2).fill_(7)  # a step that nobody settled
    one.begin()
    one.settle(True, 2)
    assert torch.equal(kept(two), before)
    one.clear()  # it takes another's weights
    for fragment in (0, 1):
        one.begin()
        for value in (1.0, 2.0):
            rest = one.of(torch.ones(64), fragment, 2)
            assert torch.equal(rest, torch.zeros(64))
            rest.fill_(value + 10 * fragment)
        one.settle(True, 2)
    for fragment, replicas, errors in (1, 2, [11, 12]), (0, 4, [2, 4]):
        one.begin()
        assert [one.of(torch.zeros(64), fragment, replicas)[0].item() for _ in errors] == errors
    one.begin()
    assert torch.equal(one.of(torch.zeros(2, 32), 0, 2), torch.zeros(2, 32)), "another shape: other elements"


# Facts of replicas


def stated(name: str, batches: int = 0, **facts: str) -> _Stated:
    return _Stated(name, json.dumps({"codec": "x", "model": "m"} | facts), batches, name, "")


@pytest.mark.parametrize(
    ("replicas", "leave", "text"),
    [
        ([stated("a"), stated("b", 5)], "", ""),
        ([stated("a"), stated("b", codec="y"), stated("c")], "b", "codec is y on b, x on the others"),
        ([stated("a", 4), stated("b", 8, codec="y")], "a", "codec is x on a, y on the others"),
        ([stated("a", 4), stated("b", 4, codec="y")], "b", "codec is y on b, x on the others"),
        ([stated("a", 9, codec="y"), stated("b", 4), stated("c", 4)], "a", "codec is y on a, x on the others"),
        (
            [stated("a", codec="y", model="n"), stated("b"), stated("c", codec="z"), stated("d")],
            "ac",
            "codec is y on a, x on the others; codec is z on c, x on the others; model is n on a, m on the others",
        ),
        ([stated("a"), stated("b", lr="1"), stated("c")], "b", "lr is stated by b or by the others, not by both"),
    ],
)
def test_contradictions(replicas: list[_Stated], leave: str, text: str):
    stays, who = _contradiction(replicas)
    assert "".join(each.name for each in who) == leave
    assert _differences(stays, who, lambda each: json.loads(each.facts)) == text


@pytest.mark.parametrize(
    "handle",
    [
        "", "[", "[]", "7", "null", "{}", '{"lowbit": 7}', '{"lowbit": {"name": "c", "batches": 1}}', "[" * 100_000,
        '{"id": "c", "store": "a:1", "lowbit": {"name": "c", "facts": "", "batches": "many"}}',
        '{"id": "c", "store": "a:1", "lowbit": {"name": "c", "facts": "", "batches": 1e999}}',
    ],
)  # fmt: skip
def test_a_replica_that_states_nothing_must_leave(handle: str):
    facts = json.dumps({"manager": "LowBitManager", "codec": "x"})
    said = {"facts": _digest(facts), "batches": 1}
    good = [json.dumps({"id": n, "store": "127.0.0.1:1", "lowbit": {"name": n} | said}) for n in "ab"]
    stays, leave = _contradiction([_Stated.read(each, place) for place, each in enumerate([*good, handle])])
    assert [each.name for each in leave] == ["replica 2 of the quorum"]
    whole = {_digest(facts): json.loads(facts)}
    differences = _differences(stays, leave, lambda each: whole.get(each.facts) or each.whole(1))
    assert differences == "manager is another one on replica 2 of the quorum, LowBitManager on the others"


FACTS = json.dumps({"codec": "x"})


@pytest.mark.parametrize(
    ("held", "facts"),
    [(FACTS, {"codec": "x"}), (FACTS + " ", {}), ("[]", {}), ("{", {}), ("7", {}), ("\udc80", {}), (None, {})],
    ids=["right", "others", "list", "broken", "number", "bytes", "none"],
)
def test_facts_that_a_store_shows(held: str | None, facts: dict[str, str]):
    """What differs from the digest that the replica has stated, or is not there at all, is not taken for its facts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if held is not None:
        store.set("lowbit/facts", held.encode("utf-8", "surrogateescape"))
    digest = _digest(FACTS if held is None or held.startswith(FACTS) or "\udc80" in held else held)
    assert _Stated("b", digest, 0, "b", f"127.0.0.1:{store.port}").whole(1) == facts


@pytest.mark.parametrize("store", ["", "nowhere", "127.0.0.1:1", "127.0.0.1:99999999", "127.0.0.1:x", ":" * 99])
def test_a_store_that_cannot_be_reached(store: str):
    """The replica that leaves still says who contradicts whom."""
    away = _Stated("b", "other digest", 0, "b", store)
    assert away.whole(1) == {}
    assert _differences(stated("a"), [away], lambda each: each.whole(1)) == "the facts of the others cannot be read"
    read = {"a": {"codec": "x"}}
    text = _differences(stated("a"), [away], lambda each: read.get(each.name) or each.whole(1))
    assert text == "the facts of b cannot be read"


def test_messages_are_short(tmp_path: Path):
    """torchft logs the handles of all replicas at each step."""
    lighthouse = torchft.coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    facts = {f"setting {i}": "x" * 50 for i in range(100)}
    ours = manager(lighthouse.address(), "a", {"codec": FOUR, "timeout": 60}, facts=facts)
    ours.start_quorum()
    ours.wait_quorum()
    handle = ours._pg.get_reconfigure_handle()
    assert len(handle) < 250
    assert len(_Stated.read(handle, 0).whole(5)) == 107
    ours.shutdown(wait=False)
    lighthouse.shutdown()
