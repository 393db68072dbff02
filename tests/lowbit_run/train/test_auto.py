"""Formats that choose themselves: the choice, its agreement, resumes, and links whose rate changes."""

import contextlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.changing_link import follow
from lowbit.codecs import Cast, parse_pair
from lowbit.codecs.speed import coding_speed
from lowbit_lab.network import SlowLink
from lowbit_run.report.run_files import read_run
from lowbit_run.report.training import run_page
from lowbit_run.simulate.predict import share_of_rates
from lowbit_run.train import TrainConfig, auto, links, train
from lowbit_run.train.auto import _USUAL, FormatChoice, Watch, forecast, pick_formats, why
from lowbit_run.train.boundaries import AUTO_FORMATS, usable
from lowbit_run.train.checkpoints.manifest import read_manifest
from lowbit_run.train.config import PipelineConfig
from lowbit_run.train.identity import CHOSEN
from lowbit_run.train.layout import make_layout
from lowbit_run.train.metrics import Work, read_metrics, step_metrics
from tests.lowbit_run.train.runs import LIMIT, RESUME, again, curve, own_machines, stopped, tiny
from tests.processes import Ranks

SIZES = {"a": (16, 16), "b": (8, 8), "c": (4, 4), "d": (2, 2)}
BOTH = [True, True]


def _slow(*rates: float) -> Callable[[tuple[str, ...], float], float]:
    """A step of a second, or as long as the busiest link; formats with few bits take a hundredth more to code."""

    def seconds(mix: tuple[str, ...], factor: float) -> float:
        links = max(SIZES[name][0] / (factor * rate) for name, rate in zip(mix, rates, strict=True))
        return max(1.0, links) + 0.01 * sum("abcd".index(name) for name in mix)

    return seconds


def _chosen(*rates: float, current: tuple[str, ...] | None = None, crosses: list[bool] = BOTH) -> tuple[str, ...]:
    return pick_formats(_slow(*rates), SIZES, crosses, current)[0]


def test_each_boundary_takes_the_most_exact_format_that_its_link_can_carry():
    assert _chosen(100, 100) == ("a", "a")
    assert _chosen(8, 100) == ("b", "a")
    assert _chosen(100, 4) == ("a", "c")
    assert _chosen(1, 1) == ("d", "d"), "too slow for all: the fewest bits"
    assert _chosen(15.6, 15.6) == ("a", "a"), "within 3 % of the fastest, at both boundaries alike"
    assert _chosen(15, 15) == ("b", "b")
    assert _chosen(8, 0.1, crosses=[True, False])[1] == "a", "nothing travels within a rank"


def test_a_choice_says_why_in_the_same_line():
    """Somebody who was promised 3 bits sees 16."""
    values: dict[str, Any] = {"step": 5, "round_trip": 0.1, "compute": [3.0], "mbit": {"0 to 1": 82.0, "1 to 0": 80.0}}
    predicted = {"bf16": 3.35, "int8 / int8": 3.33, "transform": 3.3}
    metrics = step_metrics(
        step=5, loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, seconds=4.0, ranks=2, work=Work(),
        links={"0 to 1": 1_100_000, "1 to 0": 1000},
    )  # fmt: skip
    exact = FormatChoice(formats=("bf16",), predicted=predicted | {"these": 3.35}, **values)
    saved = "fewer bits would save 1% of a step"
    assert why(exact, metrics) == f"link 0 to 1 carries 2.2 of its 82 Mbit/s, and {saved}"
    assert why(exact) == saved
    few = FormatChoice(formats=("transform",), predicted=predicted | {"bf16": 9.0, "these": 3.3}, **values)
    assert why(few) == "a step takes 3.30 s by forecast, 9.00 s with bf16"
    here = FormatChoice(formats=("bf16",), predicted=predicted | {"these": 3.35}, **values | {"mbit": {}})
    assert why(here, metrics) == "all ranks are on one machine, where few bits save nothing"


def test_a_format_with_more_bits_stays_until_it_is_much_slower():
    assert _chosen(15, 15, current=("b", "b")) == ("b", "b")
    assert _chosen(15, 15, current=("a", "a")) == ("a", "a"), "7 % slower"
    assert _chosen(12, 12, current=("a", "a")) == ("b", "b"), "33 % slower"
    assert _chosen(100, 100, current=("d", "d")) == ("a", "a")
    predicted = pick_formats(_slow(8, 8), SIZES, BOTH)[1]
    assert predicted == pytest.approx({"a": 2.0, "b": 1.02, "c": 1.04, "d": 1.06, "these": 1.02})


def test_formats_do_not_follow_a_wobble():
    for low in (2.0, 5.0, 9.0, 11.0, 14.0, 17.0, 30.0):
        current, kept = ("d", "d"), set[tuple[str, ...]]()
        for i in range(20):
            current = _chosen(*[low * (1.35 if i % 2 else 1)] * 2, current=current)
            kept |= {current} if i >= 2 else set()
        assert len(kept) == 1, f"{low}: {kept}"
    assert _chosen(16 * 1.4, 16 * 1.4, current=("d", "d")) == ("a", "a"), "fast enough by a margin"


class Steps:
    """Steps of a run, as all ranks see them; time passes as they last, and looks cost some."""

    def __init__(self, cost: float = 1.0, seed: int = 0) -> None:
        self.watch, self.random, self.cost = Watch(), random.Random(seed), cost
        self.passed, self.steps = 0.0, 0

    def until(self, computes: float, waits: Callable[[int], float], most: int = 400) -> tuple[int, float, int | None]:
        """Take steps until there is a look: their number, their seconds, and what `Watch.note` said."""
        seconds = 0.0
        for i in range(1, most + 1):
            waited, computed = waits(i), computes * self.random.uniform(0.8, 1.3)
            seconds += computed + waited
            if (span := self.watch.note(computed + waited, waited + 0.2 * computed)) is not None:
                self.watch.looked(self.cost)
                return i, seconds, span
        return most, seconds, None

    def usual(self, computes: float, waits: float) -> None:
        """Take the steps after a choice, whose durations are the usual ones."""
        self.watch.restart()
        for _ in range(11):
            self.watch._elapsed = 0.0  # regular looks are not what is tested
            assert self.watch.note(computes + waits, waits + 0.2 * computes) is None
        self.watch._elapsed = 5.0


def test_messages_that_take_longer_or_shorter_are_noticed_soon():
    late: list[tuple[float, ...]] = []
    for before, after, most_steps, most_seconds in [
        (0.1, 1.5, 4, 8),  # steps of half a second, and messages that take 15 times as long
        (0.05, 0.3, 25, 20),
        (1.0, 6.0, 4, 22),
        (2.0, 0.2, 6, 5),
        (0.8, 0.2, 25, 20),
    ]:
        for seed in range(50):
            run = Steps(seed=seed)
            run.usual(0.5, before)
            count, passed, span = run.until(0.5, lambda i, after=after: after)
            if not span or count > most_steps or passed > most_seconds:  # not by the regular look
                late.append((before, after, seed, count, passed))
    assert not late


def test_a_faster_link_that_nobody_waits_for_is_looked_at_within_a_minute():
    run = Steps()
    run.usual(1.0, 0.0)
    for seconds in (25, 30):
        assert run.until(1.0, lambda i: 0.0)[1:] == (pytest.approx(seconds, abs=2), 0)
    exact = Steps()
    exact.watch.restart()
    for pause in (30, 300):
        assert [exact.watch.note(1.0, 0.0, exact=True) for _ in range(pause)] == [None] * (pause - 1) + [0]
        exact.watch.looked(1.0)
    run.watch.restart()
    assert run.until(20.0, lambda i: 0.0)[0] == 2, "long steps do not make it later"


def test_noise_and_a_wobbling_link_cause_no_looks_but_the_regular_ones():
    for seed in range(10):
        run = Steps(seed=seed)
        run.usual(0.5, 0.5)
        looks = [run.until(0.5, lambda i: 0.5 / (1 + 0.15 * math.sin(0.7 * i))) for _ in range(20)]
        assert {span for *_, span in looks} == {0}
        assert all(seconds >= 30 for _, seconds, _ in looks[1:])
        run.usual(0.5, 0.1)
        assert run.until(0.5, lambda i: 3.0 if i % 10 == 0 else 0.1)[2] == 0, "single steps that take long"
        run.usual(0.5, 0.1)
        assert run.until(1.5, lambda i: 0.1)[2] == 0, "all machines compute more slowly"


def test_looks_take_a_small_part_of_the_time():
    run = Steps(cost=8.0)
    run.usual(0.5, 0.1)
    run.watch.looked(8.0)
    for waits in (0.1, 3.0, 0.1, 3.0):
        seconds = run.until(0.5, lambda i, waits=waits: waits)[1]
        assert seconds >= 64
        run.watch.restart()
    assert run.until(0.5, lambda i: 0.1)[1] >= 160


@pytest.mark.parametrize(("slower", "worse"), [(1.0, False), (1.08, False), (1.3, True), (2.0, True)])
def test_formats_with_which_steps_take_longer_than_before_are_noticed(slower: float, worse: bool):
    """Others' programs leave a rank little of a processor, as soon as it no longer waits for its link."""
    watch = Watch()
    watch.restart((("bf16",), 1.0))
    assert [watch.note(slower, 0.1) for _ in range(_USUAL + 1)] == [None] * _USUAL + [_USUAL if worse else None]
    assert bool(watch.worse) == worse
    if worse:
        assert watch.change(_USUAL) == pytest.approx(slower)
        watch.looked(0.0)
        assert watch.note(slower, 0.1) == _USUAL, "a look that was announced before did not choose"
    watch.restart(returned=True)
    spans = [watch.note(1.5, 0.1, exact=True) for _ in range(200)]
    assert not any(spans), "as long as with the formats before"
    assert watch.retries
    watch.restart()
    assert not watch.retries


def test_formats_that_save_nothing_at_a_shape_are_left_out():
    assert list(usable(AUTO_FORMATS, (4, 128, 256))) == list(AUTO_FORMATS)
    small = usable(AUTO_FORMATS, (2, 8, 32))
    assert "bf16" in small
    assert list(small) != list(AUTO_FORMATS)
    assert sorted(map(sum, small.values()), reverse=True) == [sum(sizes) for sizes in small.values()]
    for text in small:
        assert all(min(coding_speed(codec, (2, 8, 32), seconds=0.0)) > 0 for codec in parse_pair(text))


@pytest.mark.parametrize(("schedule", "per_rank"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_a_forecast_is_as_long_as_its_slowest_part(schedule: str, per_rank: int):
    pipeline = PipelineConfig(schedule=schedule, stages_per_rank=per_rank, microbatches=8)
    layout = make_layout(pipeline, ranks=2, layers=8)

    def seconds(rate: float, share: float = 1.0, compute: float = 0.8) -> float:
        stated = [[compute, 0.0, {"x": (0.0,) * 4}]] * 2
        predict = forecast(
            layout, pipeline, stated, {"x": (1_000_000, 1_000_000)}, {(0, 1): 0.02}, {(0, 1): rate, (1, 0): rate},
            checksum=0, rest=0.1, overlapped=False,
        )  # fmt: skip
        return predict(("x",) * (layout.stages - 1), share)

    assert seconds(100.0, 0.25, compute=0.1) == pytest.approx(4 * seconds(100.0, compute=0.1), rel=0.4)
    crossings = sum(map(layout.crosses, range(layout.stages - 1)))
    assert 0.9 < seconds(1e6) < 1.4
    at_least = 8 * 8 * crossings / 2 / 1 if schedule == "Interleaved1F1B" else 8 * 8 * crossings
    assert at_least < seconds(1.0) < 2.5 * 8 * 8 * crossings


def test_links_that_are_slower_in_training_explain_longer_steps():
    def seconds(share: float) -> float:
        return max(0.5, 0.4 / share)

    assert share_of_rates(seconds, 0.55) == 1.0
    assert share_of_rates(seconds, 0.8) == pytest.approx(0.5, rel=0.01)
    assert share_of_rates(seconds, 0.8) >= 0.5
    assert share_of_rates(seconds, 10.0) == 1.0, "no link explains this"
    assert share_of_rates(lambda share: 0.5, 2.0) == 1.0


def _train(config: TrainConfig, mbit: float | None) -> tuple[list[dict[str, Any]], list[float]]:
    """What a run chose, and its losses, where links seem to have a rate; None: on one machine, which is busy."""
    losses: list[float] = []
    with _busy() if mbit is None else _links(mbit):
        return train(config, on_step=lambda metrics: losses.append(metrics.loss)).formats, losses


def _busy() -> Any:
    """The format without codes seems to take longest to code."""
    speed = lambda codec, *_, **__: (1e6, 1e6) if isinstance(codec, Cast) else (1e12, 1e12)  # noqa: E731
    return mock.patch.object(auto, "coding_speed", speed)


@contextlib.contextmanager
def _links(*mbit: float) -> Iterator[None]:
    """Each rank seems to be on a machine of its own, and links to have these rates in turn; the last one stays."""
    pairs = list(itertools.permutations(range(dist.get_world_size()), 2))
    rates = (dict.fromkeys(pairs, rate) for rate in itertools.chain(mbit, itertools.repeat(mbit[-1])))
    with own_machines(), mock.patch.object(links.Probes, "measure_links", side_effect=rates):
        yield


WIDE = {"model": {"dim": 64}, "data": {"sequence": 32}}


@pytest.mark.slow
def test_one_machine_keeps_the_most_exact_format(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"forward": "auto", "warmup_steps": 3}, run={"steps": 7})
    (here, losses), (there, _) = ranks.run(_train, config, None, timeout=LIMIT)
    [choice] = here
    assert here == there
    assert (choice["step"], choice["formats"], choice["mbit"]) == (5, ["bf16"], {})
    fixed = again(config, pipeline={"forward": ["bf16"], "backward": []})
    assert ranks.run(_train, fixed, None, timeout=LIMIT)[0][1] == losses
    short = again(config, run={"steps": 5, "supervise": True, "overwrite": False, "allow_change": ["run.steps"]})
    assert ranks.run(_train, again(short, run={"output": str(tmp_path / "short")}), None, timeout=LIMIT)[0][0] == []
    alone = again(config, pipeline={"ranks": 1}, run={"steps": 2})
    assert ranks.run(_train, alone, None, ranks=1, timeout=LIMIT)[0][0] == []


@pytest.mark.parametrize(
    ("count", "pipeline"),
    [
        (2, {"schedule": "ZBVZeroBubble", "stages_per_rank": 2, "layers": [2, 1, 1, 2]}),
        (4, {"data_parallel": 2, "layers": [3, 1]}),
    ],
)
def test_all_ranks_take_the_same_formats(ranks: Ranks, tmp_path: Path, count: int, pipeline: dict[str, Any]):
    model = {"dim": 64, "layers": sum(pipeline.get("layers", [4]))}
    config = tiny(
        tmp_path, model=model, data={"sequence": 32, "batch": 16},
        pipeline={"forward": "auto", "warmup_steps": 2, **pipeline}, run={"steps": 8},
    )  # fmt: skip
    outcomes = ranks.run(_train, config, 0.05, ranks=count, timeout=LIMIT)  # much slower than any computing
    [choice] = outcomes[0][0]
    assert all(each == outcomes[0] for each in outcomes)
    stages = 2 * pipeline.get("stages_per_rank", 1)
    formats = choice["formats"]
    assert len(formats) == stages - 1
    fewest = list(usable(AUTO_FORMATS, (2, 32, 64)))[-1]
    crosses = [i != 1 for i in range(3)] if pipeline.get("schedule") == "ZBVZeroBubble" else [True] * (stages - 1)
    assert list(formats) == [fewest if does else "bf16" for does in crosses]
    assert min(choice["predicted"].values()) == choice["predicted"]["these"] < choice["predicted"]["bf16"]
    assert len(choice["compute"]) == count


def _train_until_faster(config: TrainConfig) -> list[dict[str, Any]]:
    """What a run chose whose links seem to become faster after the start, while no step becomes shorter."""
    looks, worse = (
        mock.patch.object(auto, name, value) for name, value in (("_LOOK_SECONDS", 0.05), ("_WORSE", math.inf))
    )
    with _links(0.05, 1e3), looks, worse:  # the links only seem slow
        return train(config).formats


@pytest.mark.slow
def test_all_ranks_notice_together_that_a_link_that_nobody_waits_for_is_faster(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, **WIDE, pipeline={"forward": "auto"}, run={"steps": 35})
    here, there = ranks.run(_train_until_faster, config, timeout=LIMIT)
    assert here == there
    slow, fast = here
    assert slow["formats"] != ["bf16"]
    assert (fast["formats"], fast["mbit"]) == (["bf16"], {"0 to 1": 1e3, "1 to 0": 1e3})
    rates = [line["rates"]["0 to 1"] for line in read_metrics(Path(config.run.output) / "metrics.jsonl")]
    assert rates == sorted(rates)
    assert set(rates) == {0.05, 1e3}
    assert rates.index(1e3) <= fast["step"] - auto._FRESH


def _train_on_a_busy_machine(config: TrainConfig) -> list[dict[str, Any]]:
    """What a run chose whose steps take longer with few bits, though its links seem slow."""
    note = Watch.note

    def slower(watch: Watch, seconds: float, waited: float, **more: Any) -> int | None:
        few = watch.former is not None
        return note(watch, 2.0 if few else 1.0, 0.1, **more)

    with _links(0.05), mock.patch.object(Watch, "note", slower), mock.patch.object(auto, "_RETRY_SECONDS", 15.0):
        return train(config).formats


@pytest.mark.slow
def test_all_ranks_return_to_the_formats_before_if_steps_take_longer_and_try_others_later(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, **WIDE, pipeline={"forward": "auto"}, run={"steps": 58})
    here, there = ranks.run(_train_on_a_busy_machine, config, timeout=LIMIT)
    assert here == there
    few, back, again_few = here
    assert few["formats"] == again_few["formats"] != ["bf16"] == back["formats"]
    assert back["step"] == few["step"] + _USUAL + 2
    assert back["change"] == pytest.approx(2.0)


def test_a_resumed_run_keeps_its_formats_and_its_losses(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, **WIDE, pipeline={"forward": "auto"}, run={"steps": 12, "checkpoint_every": 3})
    whole = again(config, run={"output": str(tmp_path / "whole")})
    expected = ranks.run(_train, whole, 0.05, timeout=LIMIT)[0]
    [choice] = expected[0]
    assert list(choice["formats"]) == [list(usable(AUTO_FORMATS, (2, 32, 64)))[-1]]
    manifest = read_manifest(tmp_path / "whole" / "checkpoints" / "step-00000012" / "rank-0")
    assert manifest.identity["pipeline.forward"] == ["auto"]
    assert manifest.identity[CHOSEN]["formats"] == list(choice["formats"])

    ranks.run(_interrupted, config, timeout=LIMIT)
    resumed = ranks.run(_train, again(config, run=RESUME), 1000.0, timeout=LIMIT)
    assert resumed[0] == resumed[1]
    assert [each["formats"] for each in resumed[0][0]] == [choice["formats"]], "whatever the links are now"
    assert curve(config) == curve(whole)
    assert len(resumed[0][1]) == 3

    [part] = [part for part in run_page(read_run(Path(config.run.output))).parts if part.title.startswith("Formats")]
    assert part.rows[0][:2] == ("6", choice["formats"][0])
    assert json.loads((Path(config.run.output) / "config.json").read_text())["pipeline"]["forward"] == ["auto"]


def _interrupted(config: TrainConfig) -> None:
    """Nine steps and a bit more."""
    with _links(0.05):
        stopped(config, 10)
        dist.barrier()


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(600)
@pytest.mark.skipif(SlowLink.available(distance=True) is not None, reason="no shaped link here")
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_formats_follow_a_link_that_becomes_slower(tmp_path: Path, schedule: str):
    thin = "--model.layers 2 --model.dim 256 --model.ffn 64"  # or other work on the machine hides the link
    options = ["--pipeline.schedule", schedule, "--run.connections", "1", *thin.split()]
    seen = list(follow(["400", "10"], options, tmp_path, least=20, most=150))
    first, slow = (next((each for each in seen if each.phase == phase), None) for phase in range(2))
    assert first
    assert slow, "formats never changed"
    assert slow.nbits < first.nbits
    assert slow.steps <= 30 or slow.seconds <= 90, slow  # 60 where nothing else runs
    rates = [next(iter(line["rates"].values())) for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates[0] > 50
    assert min(rates) < 15
