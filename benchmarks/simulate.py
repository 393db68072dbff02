"""`python -m benchmarks simulate`: predicted seconds of a step compared with measured ones, on really limited links.

Each setting trains over a link, and its ranks time their actions: computing, encoding, decoding, and the work between
two steps. The simulator gets these times, the sizes of the messages, and the rate and round trip that plain sockets
measure on the link. It predicts the seconds of the step and of waiting.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

from lowbit.codecs import parse_pair
from lowbit.codecs.names import pair_name
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.pipeline import LowBitStage
from lowbit.report import Column, Command, Row, Table, summary
from lowbit.simulate import Channel, Hosts, Network, StageTimes, Step, actions, simulate
from lowbit.train.config import DataConfig, ModelConfig, PipelineConfig, TrainConfig
from lowbit.train.layout import make_layout
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_lab.bench.recipes import THIN_MODEL, Split, as_mapping, recipe
from lowbit_lab.bench.runs import Runs
from lowbit_lab.bench.settings import LINK, Device, check_constant
from lowbit_lab.bench.worker import serve
from lowbit_lab.bench.workers import UNLIMITED, set_link, started
from lowbit_lab.network import Link
from lowbit_lab.network.shape import burst_bytes


@dataclass(frozen=True)
class Case:
    """A setting: `2:1F1B/1/8:fp32:100mbit/40ms` has 2 ranks, a split, a format and a link."""

    ranks: int
    split: Split
    boundary: str
    link: Link

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the text of a setting.

        Raises:
            ValueError: the text is invalid.
        """
        match text.split(":", 3):
            case [ranks, split, boundary, link] if ranks.isdecimal() and int(ranks) > 1:
                return cls(int(ranks), Split.parse(split), boundary, Link.parse(link))
        raise ValueError(f"case is {text!r}; allowed: ranks:split:format:link, such as 2:1F1B/1/8:fp32:100mbit/40ms")

    def __str__(self) -> str:
        return f"{self.ranks}:{self.split}:{self.boundary}:{self.link}"


CASES = tuple(
    Case.parse(f"{ranks}:{split}:{boundary}:{link}")
    for ranks, split, link in (
        (2, "1F1B/1/8", "25mbit"), (2, "1F1B/1/8", "100mbit/40ms"), (2, "GPipe/1/8", "100mbit"),
        (2, "Interleaved1F1B/4/4", "100mbit"), (2, "ZBVZeroBubble/2/8", "25mbit/20ms"),
        (4, "1F1B/1/8", "100mbit"), (4, "1F1B/1/8", "100mbit/40ms"), (4, "Interleaved1F1B/2/8", "500mbit"),
    )
    for boundary in ("fp32", "int4")
)  # fmt: skip


@section()
class SimulateBenchmark:
    """Settings to measure and to predict."""

    model: ModelConfig = THIN_MODEL
    """Model to train."""
    data: DataConfig = DataConfig(batch=32, sequence=128)
    """Text to train on, and the size of a batch."""
    device: Device = "cpu"
    """cuda: ranks share the GPUs of the machine."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Data type of matrix products."""
    backward: str = ""
    """Format of gradients; see `lowbit bench pipeline`."""
    seed: NonNegative = 0
    """Seed of weights and data order."""
    cases: tuple[Case, ...] = CASES
    """Settings, as ranks:split:format:link, such as 2:1F1B/1/8:fp32:100mbit/40ms."""
    steps: Positive = 6
    """Timed steps of each setting. Another one comes first and is not timed."""

    def __post_init__(self) -> None:
        if not self.cases or len(set(self.cases)) < len(self.cases):
            raise ConfigError("cases is empty or contains a case twice; allowed: one or more, each once")
        check_constant("cases", [case.link for case in self.cases])


def measure(settings: SimulateBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Measure every setting, and predict it.

    Yields:
        Rows, one for each setting: `ranks`, `split`, `boundary`, the fields of `set_link`, `seconds` (of a step, with
        the fields of `summary`), `predicted`, `error` (predicted / measured - 1), `compute_seconds`,
        `codec_seconds` (of the busiest rank, measured), `waiting_share` and `link_share` (predicted).
    """
    rows: list[dict[str, Any]] = []
    for count in sorted({case.ranks for case in settings.cases}):
        cases = [case for case in settings.cases if case.ranks == count]
        links = [case.link for case in cases]
        with tempfile.TemporaryDirectory() as folder, started("benchmarks.simulate", count, links) as (network, ranks):
            for number, case in enumerate(cases):
                config = config_of(settings, case, f"{folder}/{number}")
                ranks.ask("open", name=str(case), config=as_mapping(config), samples=0)
                about = set_link(network, case.link, ranks)
                rows.append(_row(case, config, about, ranks.ask("profile", name=str(case), count=settings.steps)))
                yield rows


def config_of(settings: SimulateBenchmark, case: Case, output: str) -> TrainConfig:
    """Return the training run of a setting."""
    pipeline = replace(PipelineConfig(ranks=case.ranks), **vars(case.split))
    return recipe(settings, case.boundary, pipeline=pipeline, output=output)


def predict(config: TrainConfig, profiles: Sequence[Mapping[str, Any]], channel: Channel, cores: int) -> Step:
    """Simulate a step with the measured seconds of its parts.

    Args:
        profiles: of each rank. channel: of each rank to all others. cores: that the ranks share.
    """
    pipeline, ranks = config.pipeline, config.pipeline.ranks
    layout = make_layout(pipeline, ranks=ranks, layers=config.model.layers)
    order = actions(
        pipeline.schedule, ranks=ranks, stages_per_rank=pipeline.stages_per_rank, microbatches=pipeline.microbatches
    )
    forward, backward = parse_pair(f"{pipeline.forward[0]} / {pipeline.backward[0]}")
    shape = (config.rows, config.data.sequence, config.model.dim)
    times = [profile["times"] for profile in profiles]
    stages = []
    for stage in range(layout.stages):
        of = times[layout.rank_of(stage)]
        share = of["rest"] / sum(order.rank == layout.rank_of(stage))  # the schedule's own work, for each action
        seconds = {name.partition(" ")[2]: value for name, value in of.items() if name.startswith(f"{stage} ")}
        computed = {name: value + share for name, value in seconds.items() if "code_" not in name}
        both = computed.get("inputs", 0.0) + computed.get("weights", 0.0)
        stages.append(
            StageTimes(
                **{"backward": both, **computed, **{k: v for k, v in seconds.items() if "code_" in k}},
                forward_bytes=forward.nbytes(shape) + CHECKSUM_BYTES,
                backward_bytes=backward.nbytes(shape) + CHECKSUM_BYTES,
            )
        )
    routes = {(a, b): a for a in range(ranks) for b in range(ranks) if a != b}
    return simulate(
        order, stages, Network(channels=[channel] * ranks, routes=routes),
        hosts=Hosts(of=[0] * ranks, cores=[min(ranks, cores)]),
        optimizer=[each["optimizer"] for each in times], averaging=[each["averaging"] for each in times],
    )  # fmt: skip


def _row(
    case: Case, config: TrainConfig, about: Mapping[str, Any], profiles: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    rate = about["goodput_mbit"]
    channel = Channel(
        bytes_per_second=rate * 1e6 / 8 if rate and case.link != UNLIMITED else math.inf,
        latency=(about["rtt_ms"] or 0.0) / 2000,
        # Distant links have no token bucket.
        burst=burst_bytes(case.link.rate_mbit) if case.link.rate_mbit and not case.link.far else 0,
    )
    step = predict(config, profiles, channel, len(os.sched_getaffinity(0)))
    steps = [max(each) for each in zip(*(profile["seconds"] for profile in profiles), strict=True)]
    measured = summary(steps, "seconds")
    return {
        "ranks": case.ranks,
        "split": str(case.split),
        "boundary": case.boundary,
        **about,
        **measured,
        "predicted": step.seconds,
        "error": step.seconds / measured["seconds"] - 1,
        "compute_seconds": float(step.compute.max()),
        "codec_seconds": float(step.coding.max()),
        "waiting_share": step.waiting_share,
        "link_share": float(step.busy.max()) / step.seconds,
    }


class Profile:
    """Seconds of the actions of a trainer's stages, and of the rest of its steps.

    If ranks share cores, seconds are the thread's own running time, which excludes other ranks. The rest then includes
    the time of threads that send and receive, because they also use the cores.
    """

    def __init__(self, trainer: Any) -> None:
        self._shared = dist.get_world_size() > len(os.sched_getaffinity(0))
        self.clock = time.thread_time if self._shared else time.perf_counter
        self.times: dict[str, list[float]] = defaultdict(list)
        self._within = self._timed = self._waited = 0.0
        self._stages = list(trainer.pipeline.lowbit_stages.values())
        for stage in self._stages:
            self._wrap(stage)
        self._wrap_step(trainer)

    def answer(self) -> dict[str, Any]:
        """Return medians by name: `0 forward`, ... for each stage; `optimizer`, `averaging`, and `rest` of a pass."""
        return {name: statistics.median(values) for name, values in self.times.items()}

    def _wrap(self, stage: LowBitStage) -> None:
        kinds = {
            "_retrieve_recv_activations": "decode_forward", "_retrieve_recv_grads": "decode_backward",
            "get_fwd_send_ops": "encode_forward", "get_bwd_send_ops": "encode_backward",
            "forward_one_chunk": "forward", "backward_one_chunk": "backward", "backward_weight_one_chunk": "weights",
        }  # fmt: skip
        for method, kind in kinds.items():
            setattr(stage, method, self._timing(stage, getattr(stage, method), kind))

    def _timing(self, stage: LowBitStage, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, within, waited = self.clock(), self._within, stage.traffic.wait_seconds
            result = function(*args, **kwargs)
            elapsed, waited = self.clock() - start, stage.traffic.wait_seconds - waited
            own = elapsed - (self._within - within)
            if kind.startswith("decode"):  # it runs inside a forward or backward pass, but must not count to its time
                self._within += elapsed
                self._waited += waited
                own -= 0.0 if self._shared else waited
            else:
                self._timed += elapsed
            inputs = kind == "backward" and not kwargs.get("full_backward", True)
            self.times[f"{stage.stage_index} {'inputs' if inputs else kind}"].append(own)
            return result

        return timed

    def _wrap_step(self, trainer: Any) -> None:
        marks: dict[str, float] = {}
        step, run, sums = trainer.step, trainer.pipeline.step, trainer._sums.of

        def timed_step(*args: Any) -> Any:
            marks["begin"] = self.clock()
            result = step(*args)
            before = marks["run"] - marks["begin"]
            self.times["optimizer"].append(before + self.clock() - marks["summed"])
            return result

        def timed_run(*args: Any, **kwargs: Any) -> Any:
            whole = time.process_time if self._shared else time.perf_counter
            marks["run"], start = self.clock(), whole()
            self._timed = self._waited = 0.0
            result = run(*args, **kwargs)
            elapsed, marks["ran"] = whole() - start, self.clock()
            waits = sum(stage.traffic.wait_seconds for stage in self._stages) - self._waited
            rest = elapsed - self._timed - (0.0 if self._shared else waits)
            self.times["rest"].append(max(0.0, rest))
            return result

        def timed_sums(values: Any) -> Any:
            self.times["averaging"].append(self.clock() - marks["ran"])
            result = sums(values)
            marks["summed"] = self.clock()
            return result

        trainer.step, trainer.pipeline.step, trainer._sums.of = timed_step, timed_run, timed_sums


class ProfiledRuns(Runs):
    """Runs whose actions can be timed."""

    def profile(self, name: str, count: int) -> dict[str, Any]:
        """Advance a run; return seconds of each step except the first, a warm-up, and of actions (`Profile.answer`)."""
        self.steps(name, 1)
        profile = Profile(self._trainers[name])
        seconds = [step["seconds"] for step in self.steps(name, count)]
        return {"seconds": seconds, "times": profile.answer()}


def ranked_right(rows: Sequence[Row]) -> tuple[int, int]:
    """Count pairs of formats with the same ranks, split and link: those predicted in the right order, and all."""
    right = pairs = 0
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            if all(a[key] == b[key] for key in ("ranks", "split", "link")):
                pairs += 1
                right += (a["seconds"] < b["seconds"]) == (a["predicted"] < b["predicted"])
    return right, pairs


def _title(rows: Sequence[Row]) -> str:
    errors = [abs(row["error"]) for row in rows]
    right, pairs = ranked_right(rows)
    return (
        f"Predicted seconds of a step: off by {statistics.median(errors):.1%} (median), at most {max(errors):.1%}; "
        f"{right} of {pairs} pairs of formats in the right order"
    )


COMMAND = Command(
    name="simulate",
    summary="Predicted seconds of a step compared with measured ones, on really limited links.",
    examples=(
        "python -m benchmarks simulate --json simulate.json",
        "python -m benchmarks simulate --case 2:1F1B/1/8:fp32:100mbit/40ms",
    ),
    settings=SimulateBenchmark,
    measure=measure,
    tables=(
        Table(
            title=_title,
            columns=(
                Column("ranks", "ranks"),
                Column("split", "split"),
                LINK,
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("measured", "seconds", "{:.3f} s"),
                Column("predicted", "predicted", "{:.3f} s"),
                Column("error", "error", "{:+.1%}"),
                Column("com-\npute", "compute_seconds", "{:.3f}"),
                Column("codec", "codec_seconds", "{:.3f}"),
                Column("wait", "waiting_share", "{:.0%}"),
                Column("link\nbusy", "link_share", "{:.0%}"),
            ),
        ),
    ),
)


if __name__ == "__main__":
    serve(ProfiledRuns)
