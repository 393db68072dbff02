"""`lowbit bench pipeline`: training speed over emulated slow links, by boundary format.

All formats train the same model on the same samples in the same processes and take turns of a few steps, round after
round, so that other work on the machine slows all of them alike. PyTorch's own stage is measured next to `LowBitStage`
with the same bits, because part of the gain is scheduling: receives posted early, sends not waited for.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Annotated, Any, Literal

from pydantic import Field

from lowbit.codecs.names import pair_name
from lowbit.wire.connections import MOST_CONNECTIONS
from lowbit.wire.tags import PIPELINES
from lowbit_lab.bench.runs import (
    MANY_STAGES,
    PROGRAM,
    THIN_MODEL,
    Duration,
    Split,
    check_recipes,
    check_samples,
    merged,
    order,
    recipe,
)
from lowbit_lab.bench.settings import (
    LINK,
    STOCK,
    Device,
    EachOnce,
    Links,
    Names,
    check_constant,
    formats_of,
    half_range,
    link_name,
    on_slowest_link,
)
from lowbit_lab.bench.sums import Phase, Taken, take_turns
from lowbit_lab.bench.workers import UNLIMITED, Workers
from lowbit_lab.charts import Bars
from lowbit_lab.charts.style import recommended, row_name, title_of
from lowbit_lab.network import Link
from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.report import Baseline, Column, Command, Row, Table
from lowbit_run.report.command import extent
from lowbit_run.train.config import AUTO, DataConfig, ModelConfig, PipelineConfig
from lowbit_run.train.schedules import SCHEDULES

MEDIANS = ("bits_forward", "bits_backward", "compute_seconds", "codec_seconds", "checksum_seconds", "wait_seconds")


@section()
class PipelineBenchmark:
    """Boundary formats, links and a model.

    The default model has many stages and thin layers (a feed-forward as narrow as the model, one key-value head): even
    where two CPU cores compute, a slow link is the bottleneck, as it is for a large model on GPUs.
    """

    links: Links = (Link(25.0), Link(100.0), Link(1000.0), UNLIMITED)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    boundaries: Names = (*STOCK, "fp32", "bf16", "int4", "tah-quant", "tah-quant-published", "aq-sgd", "transform")
    """Formats of activations, by name or in full, or of both ways, such as "int4 / int6". stock-fp32 and stock-bf16 are
    PyTorch's own stage; tah-quant is our setting of TAH-Quant, tah-quant-published that of the paper's v2 (bits by
    tile), tah-quant-published-token that of its v1 (bits by token). auto: what a run chooses for each link."""
    backward: str = ""
    """Format of gradients next to low-bit activations, unless `boundaries` names it. If omitted, the default of each
    format. fp32, bf16 and fp16 are used both ways, and auto chooses both."""
    model: ModelConfig = THIN_MODEL
    """Model to train."""
    data: DataConfig = DataConfig(batch=32, sequence=128)
    """Text to train on, and the size of a batch."""
    pipeline: PipelineConfig = MANY_STAGES
    """Ranks, each on its own host, stages and schedule. The formats are those of `boundaries`."""
    splits: tuple[Split, ...] = ()
    """Schedules to compare, as schedule/stages per rank/micro-batches, such as 1F1B/1/8. They replace those of
    `pipeline`."""
    connections: Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_CONNECTIONS)], ...], EachOnce] = (1,)
    """Numbers of connections for each pair of ranks to compare; PyTorch's own stage has one."""
    rounds: Positive = 3
    """Turns of each format on each link."""
    steps: Positive = 2
    """Timed steps of a turn. One more comes first and is not timed."""
    evaluations: NonNegative = 0
    """Held-out batches to evaluate after each turn, with the formats of training. 0: none."""
    samples: Positive = 64
    """Number of distinct samples, a multiple of the batch. All are visited once before anything is timed, because
    formats such as aq-sgd send known samples in fewer bits."""
    compute: Duration = Duration()
    """Time of a stage's forward pass of one micro-batch, such as 50ms; the backward pass takes twice as long. Stages
    then only wait, as for a device, and hand recorded activations and gradients of `model` to the codecs, so that
    models can be measured that need a GPU. Nothing is learned. 0ms: the stages compute."""
    device: Device = "cpu"
    """cuda: ranks share the GPUs of the machine; PyTorch's own stage does not support this."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of matrix products; weights stay in float32. auto: bf16 where the device supports it."""
    seed: NonNegative = 0
    """Seed of weights and data order."""

    def __post_init__(self) -> None:
        check_constant("links", self.links)
        if len(set(self.splits)) < len(self.splits):
            raise ConfigError(f"splits is {', '.join(map(str, self.splits))}; allowed: each once")
        if self.compute.seconds:  # stages then only wait
            unsplit = tuple(name for name, facts in SCHEDULES.items() if not facts.splits)
            for name, value, allowed in (
                ("device", self.device, ("cpu",)),
                ("evaluations", self.evaluations, (0,)),
                ("model.dropout", self.model.dropout, (0,)),
                *(("schedule", pipeline.schedule, unsplit) for pipeline in self.pipelines),
            ):
                if value not in allowed:
                    named = ", ".join(map(str, allowed))
                    raise ConfigError(f"compute is {self.compute}, {name} is {value}; allowed: {named}, or compute 0ms")
        coded = [boundary for boundary in self.boundaries if boundary not in STOCK]
        opened = len(coded) + (AUTO in coded) * (len(self.links) - 1)  # auto opens another pipeline on each link
        if (count := len(self.pipelines) * len(self.connections) * opened) > PIPELINES.members:
            raise ConfigError(
                f"boundaries, splits, connections and links take {count} pipelines; allowed: {PIPELINES.members}"
            )
        check_samples(self)
        for pipeline in self.pipelines:
            check_recipes(self, pipeline)

    @property
    def pipelines(self) -> list[PipelineConfig]:
        """Return a pipeline for each of `splits`, or else `pipeline`."""
        return [replace(self.pipeline, **vars(split)) for split in self.splits] or [self.pipeline]


def measure(settings: PipelineBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Measure every boundary on every link.

    Yields:
        Rows, one for each link, split, boundary and number of `connections`: `boundary`, `split` (its text), `forward`
        and `backward` (the formats in full; None for PyTorch's own stage), the fields of `set_link`,
        `tokens_per_second` (of the median step) with `tokens_per_second_low` and `_high` (slowest and fastest step),
        `speedup_stock_fp32`, `speedup_fp32` (the same stage with full precision; both with the same split),
        `speedup_best_stock_fp32` (PyTorch's own stage with the split that suits it best), `share_of_unlimited` (of the
        fastest on the unlimited link), `bits_forward`, `bits_backward`, `bytes_per_step` (all ranks, both ways),
        `seconds_per_step`, `compute_seconds`, `codec_seconds` (including `checksum_seconds`), `wait_seconds` (of a
        step, mean over ranks), `loss` (of the last step; all boundaries of a link have done the same steps, but "auto",
        which begins anew on each link and has None), `state_bytes` (kept between steps, all ranks), `steps`,
        `evaluation_seconds` (None without evaluations), `codec_mbit` (a link that one rank's codec can just keep busy;
        None for PyTorch's own stage), `turns` (tokens per second of each), `chosen` (the formats of "auto"). With
        `compute`, `loss` is None. For "auto", `over_fixed`: the median over turns of its speed relative to the fixed
        format that is fastest on this link, and the 95 % interval of that median, `over_fixed_low` and `_high` (from 6
        turns on).
    """
    with tempfile.TemporaryDirectory() as folder:

        def prepare(ranks: Workers, _: int) -> list[Phase]:
            every, choosing = list[dict[str, Any]](), list[dict[str, Any]]()
            for pipeline, boundary, count in product(settings.pipelines, settings.boundaries, settings.connections):
                if boundary in STOCK and count != settings.connections[0]:
                    continue
                count = 1 if boundary in STOCK else count
                name = f"{Split.of(pipeline)} {count} {boundary}"
                run = _run(settings, pipeline, boundary, count, f"{folder}/{len(every)}")
                if boundary == AUTO:
                    choosing.append({"name": name, **run})
                else:
                    ranks.ask("open", name=name, **run)
                    ranks.ask("steps", name=name, count=settings.samples // settings.data.batch)  # all samples once
                every.append({"name": name})
            turn = {"count": settings.steps, "evaluate": settings.evaluations > 0}
            before = ("choose", {"runs": choosing}) if choosing else None
            phase = Phase(
                name="train", order="turn", contenders=every, arguments=turn, rounds=settings.rounds, before=before
            )
            return [phase]

        for taken in take_turns(PROGRAM, [settings.pipeline.ranks], settings.links, prepare):
            yield rows_of(settings, taken)


def row_of(one: Taken, backward: str, *, trained: bool) -> dict[str, Any]:
    """Return the row of one boundary on one link, without comparisons."""
    split, connections, boundary = one.contender["name"].split(" ", 2)
    turns = [merged(answer["steps"] for answer in turn) for turn in one.turns]
    steps = [step for turn in turns for step in turn]
    evaluations = [max(answer["evaluation"] for answer in turn) for turn in one.turns if turn[0]["evaluation"]]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    return {
        "boundary": boundary,
        "split": split,
        "connections": int(connections),
        **one.link,
        **formats_of(boundary, backward),
        **extent([step["tokens_per_second"] for step in steps], "tokens_per_second"),
        "seconds_per_step": median("seconds"),
        "bytes_per_step": round(median("bytes_sent")),
        **{name: median(name) for name in MEDIANS},
        # The rate of a link that carries these bytes as fast as a rank's codec makes them and reads others.
        "codec_mbit": 8e-6 * median("bytes_sent") / one.ranks / codec if (codec := median("codec_seconds")) else None,
        "loss": steps[-1]["loss"] if trained and boundary != AUTO else None,
        "steps": len(steps),
        "evaluation_seconds": statistics.median(evaluations) if evaluations else None,
        "state_bytes": sum(answer["state_bytes"] for answer in one.turns[-1]),
        "turns": [len(turn) / sum(1 / step["tokens_per_second"] for step in turn) for turn in turns],
        "chosen": one.turns[-1][0]["chosen"],
    }


def rows_of(settings: PipelineBenchmark, taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """Return a row for each link, split and boundary, with comparisons that need more than one other row."""
    rows = [row_of(one, settings.backward, trained=not settings.compute.seconds) for one in taken]
    unlimited = max((row["tokens_per_second"] for row in rows if row["link_mbit"] is None), default=None)
    stock = [row for row in rows if row["boundary"] == "stock-fp32"]
    for row in rows:
        speed = row["tokens_per_second"]
        best = max((s["tokens_per_second"] for s in stock if s["link"] == row["link"]), default=None)
        row["speedup_best_stock_fp32"] = speed / best if best else None
        row["share_of_unlimited"] = speed / unlimited if unlimited else None
        if row["boundary"] == AUTO:
            alike = [r for r in rows if all(r[key] == row[key] for key in ("link", "split", "connections"))]
            fixed = [r["turns"] for r in alike if r["boundary"] not in (AUTO, *STOCK)]
            if fixed:
                fastest = max(fixed, key=statistics.median)
                row |= interval([own / other for own, other in zip(row["turns"], fastest, strict=True)], "over_fixed")
    return rows


def interval(values: Sequence[float], name: str) -> dict[str, Any]:
    """Return a median and its 95 % interval, whatever the distribution: the k-th lowest and k-th highest value.

    The bounds are None for fewer than 6 values.
    """
    ordered, count = sorted(values), len(values)
    outside = list(accumulate(2 * math.comb(count, k) / 2**count for k in range(count)))  # beyond the k + 1st values
    k = sum(share <= 0.05 for share in outside)
    low, high = (ordered[k - 1], ordered[-k]) if k else (None, None)
    return {name: statistics.median(values), f"{name}_low": low, f"{name}_high": high}


def _run(
    settings: PipelineBenchmark, pipeline: PipelineConfig, boundary: str, connections: int, folder: str
) -> dict[str, Any]:
    """Return the arguments that open a boundary's run."""
    held_out = settings.evaluations * settings.data.batch
    windows = settings.samples + held_out
    data = replace(settings.data, held_out_share=held_out / windows) if held_out else settings.data
    if (data.tokenizer or settings.model.pretrained or "bytes") == "bytes":
        data = replace(data, max_bytes=min(data.max_bytes, 2 * windows * data.sequence))
    config = recipe(
        settings, boundary, pipeline=pipeline, data=data, output=folder, overwrite=True, connections=connections,
        eval_batches=settings.evaluations,
    )  # fmt: skip
    return {
        **order(config, boundary), "samples": settings.samples, "connections": connections,
        "compute": settings.compute.seconds,
    }  # fmt: skip


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return rows with names for tables and bars, without values about splits if there is only one split."""
    named = [{**row, "name": pair_name(row["boundary"])} for row in rows]
    if len({row.get("connections", 1) for row in rows}) > 1:
        named = [{**row, "name": f"{row['name']} x{row['connections']}"} for row in named]
    if len({row["split"] for row in rows}) > 1:
        return [{**row, "bar": f"{row['split']} {row['name']}"} for row in named]
    return [{**row, "bar": row["name"], "split": None, "speedup_best_stock_fp32": None} for row in named]


def _finding(rows: Sequence[Row]) -> str:
    """State how much faster than FP32 the recommended format, or else the fastest, is on the slowest link."""
    slowest = on_slowest_link(rows, "speedup_fp32")
    best = recommended(slowest, "bar") or max(slowest, key=lambda row: row["speedup_fp32"], default=None)
    if best is None:
        return "Training speed by link and boundary format"
    name = f"{title_of(best['bar'])}:" if recommended([best], "bar") else "Few bits: up to"
    return f"{name} {best['speedup_fp32']:.1f}x as fast as FP32 at {link_name(best)}"


def _speed(row: Row) -> str:
    ratio = f" · {row['speedup_fp32']:.1f}x" if row.get("speedup_fp32") else ""
    return f"{row['tokens_per_second']:,.0f}{ratio}"


WHERE = (LINK, Column("split", "split"), Column("boundary", "name", row_name))
COMMAND = Command(
    name="bench pipeline",
    summary="Training speed over emulated slow links, by boundary format.",
    examples=(
        "lowbit bench pipeline --link 100mbit --boundary stock-fp32,transform",
        "lowbit bench pipeline --link 25mbit,100mbit/40ms --png speed.png",
        "lowbit bench pipeline --compute 50ms --model.dim 4096 --boundary int4",
    ),
    settings=PipelineBenchmark,
    measure=measure,
    baselines=[
        Baseline(
            field=f"speedup_{name.replace('-', '_')}", value="tokens_per_second", to={"boundary": name},
            alike=("link", "split", *(("connections",) if name == "fp32" else ())),
        )
        for name in ("stock-fp32", "fp32")
    ],
    tables=[
        Table(
            title="Training speed",
            rows=_shown,
            gap="link",
            columns=[
                *WHERE,
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("±", partial(half_range, "tokens_per_second"), "{:.0%}"),
                Column("over\nstock fp32", "speedup_stock_fp32", "{:.2f}x"),
                Column("over\nfp32", "speedup_fp32", "{:.2f}x"),
                Column("over best\nstock fp32", "speedup_best_stock_fp32", "{:.2f}x"),
                Column("of un-\nlimited", "share_of_unlimited", "{:.0%}"),
                Column("over best\nfixed", "over_fixed", "{:.2f}x"),
                Column("95 %\nfrom", "over_fixed_low", "{:.2f}"),
                Column("to", "over_fixed_high", "{:.2f}"),
            ],
        ),
        Table(
            title="Traffic, and seconds of a step on a rank",
            rows=_shown,
            gap="link",
            columns=[
                *WHERE,
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("bits\nbwd", "bits_backward", "{:.2f}"),
                Column("MB a\nstep", lambda row: row["bytes_per_step"] / 1e6, "{:.2f}"),
                Column("com-\npute", "compute_seconds", "{:.2f}"),
                Column("codec", "codec_seconds", "{:.2f}"),
                Column("wait", "wait_seconds", "{:.2f}"),
                Column("codec\nMbit/s", "codec_mbit", "{:,.0f}"),
                Column("eval", "evaluation_seconds", "{:.2f}"),
                Column("loss", "loss", "{:.3f}"),
                Column("state\nMB", lambda row: row["state_bytes"] / 1e6, "{:.1f}"),
            ],
        ),
    ],
    charts=[
        Bars(
            title=_finding, label="tokens per second", rows=_shown, group=link_name, series="bar", show=_speed,
            y="tokens_per_second", low="tokens_per_second_low", high="tokens_per_second_high",
            subtitle="Whole training steps · ratio to FP32 through the same stage. "
            "Error bars: slowest and fastest step.",
        )
    ],
)  # fmt: skip
