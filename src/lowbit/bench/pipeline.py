"""`lowbit bench pipeline`: training speed over really slow links, boundary format against boundary format.

All formats train the same model on the same samples in the same processes and take turns of a few steps, round after
round, so that whatever else the machine does hits all of them alike. PyTorch's own stage stands beside `LowBitStage`
with the same bits, because part of what a low-bit stage gains over it is scheduling: receives posted early, sends
not waited for.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from lowbit.bench.launch import UNLIMITED, Ranks, set_link, started
from lowbit.bench.report import Report, Row, machine
from lowbit.codecs import Codec, parse, parse_pair
from lowbit.codecs.base import check_choice
from lowbit.network import Link
from lowbit.train.boundaries import make_codecs
from lowbit.train.config import ModelConfig
from lowbit.train.config_file import from_mapping
from lowbit.train.device import choose_device
from lowbit.train.layout import make_layout

STOCK = ("stock-fp32", "stock-bf16")
SUBSPACE = "SubspaceQuant(rank=16)"  # for a narrow model: 32 of 128 channels would be 2 bits
BOUNDARIES = (
    *STOCK,
    "fp32",
    "bf16",
    "int4",
    "tah-quant",
    "tah-quant-published",
    "aq-sgd",
    SUBSPACE,
)
_MODEL = ("dim", "layers", "heads", "kv_heads", "ffn")

OnRows = Callable[[Sequence[Row]], None]


@dataclass(frozen=True)
class Split:
    """How a model is cut and run: `1F1B/1/8` is 1F1B with one stage on each rank and 8 micro-batches."""

    schedule: str
    stages_per_rank: int
    microbatches: int

    @classmethod
    def parse(cls, text: str) -> Split:
        """A split from its text.

        Raises:
            ValueError: it is not one.
        """
        match text.split("/"):
            case [schedule, stages, micro_batches] if stages.isdecimal() and micro_batches.isdecimal():
                return cls(schedule, int(stages), int(micro_batches))
        raise ValueError(f"split is {text!r}; allowed: schedule/stages on each rank/micro-batches, such as 1F1B/1/8")

    def __str__(self) -> str:
        return f"{self.schedule}/{self.stages_per_rank}/{self.microbatches}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared, on which links, with which model.

    The default model is one that a slow link holds up even where two CPU cores do the computing, as a large one would
    hold up graphics cards: 8 stages on 2 ranks, so that activations cross the link 7 times and gradients as often, and
    thin layers (a feed-forward as narrow as the model, one key-value head), so that there is little to compute between.

    Args:
        links: rate, and round trip if there is a distance, such as 25mbit, 100mbit/40ms, or unlimited.
        boundaries: formats of activations, by name or in full, or of both ways, such as "int4 / int6"; stock-fp32 and
            stock-bf16 are PyTorch's own stage.
        backward: format of gradients beside low-bit activations that do not name their own; absent: the default of the
            activations' format. fp32, bf16 and fp16 are used both ways.
        ranks: processes, each on a host of its own. stages_per_rank, schedule, microbatches: of the pipeline.
        splits: schedule/stages on each rank/micro-batches, such as 1F1B/1/8, to measure each with every boundary in the
            place of these three.
        dim, layers, heads, kv_heads, ffn: of the Llama that is trained (0: as usual). batch: samples in a step;
            sequence: tokens of a sample.
        rounds: how often each format has its turn on each link; steps: timed steps of a turn, after one that is not.
        evaluations: batches of held-out text to evaluate at the end of each turn, coded as in training. 0: none.
        samples: distinct samples, a multiple of `batch`. All are visited once before anything is timed, so that
            formats which remember samples are timed at their best.
        device: "cpu", or "cuda": ranks take the machine's devices in turn; PyTorch's own stage cannot.
        precision: of the computation: "auto", "fp32" or "bf16".
        seed: of weights and data order.
    """

    links: tuple[Link, ...] = (Link(25.0), Link(100.0), Link(1000.0), UNLIMITED)
    boundaries: tuple[str, ...] = BOUNDARIES
    backward: str = ""
    ranks: int = 2
    stages_per_rank: int = 4
    schedule: str = "Interleaved1F1B"
    microbatches: int = 4
    splits: tuple[Split, ...] = ()
    dim: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 1
    ffn: int = 128
    batch: int = 32
    sequence: int = 128
    rounds: int = 3
    steps: int = 2
    evaluations: int = 0
    samples: int = 64
    device: str = "cpu"
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, ranks=2, rounds=1, steps=1, batch=1, samples=self.batch, evaluations=0)
        if self.samples % self.batch:
            raise ValueError(f"samples is {self.samples}; allowed: a multiple of batch ({self.batch})")
        for name in ("links", "boundaries"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; allowed: one or more, each once")
        if len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits is {', '.join(map(str, self.splits))}; allowed: each once")
        for split in self.all_splits:
            check_recipes(replace(self, splits=(), **vars(split)) if self.splits else self)

    @property
    def all_splits(self) -> tuple[Split, ...]:
        """What `splits` has, or else the one of `schedule`, `stages_per_rank` and `microbatches`."""
        return self.splits or (Split(self.schedule, self.stages_per_rank, self.microbatches),)


def run(settings: Settings, *, on_rows: OnRows | None = None) -> Report:
    """Measure every boundary on every link.

    Args:
        settings: what to measure.
        on_rows: called with all rows so far after every turn.

    Returns:
        A report with a row for each link, split and boundary: `boundary`, `split` (its text), `forward` and `backward`
        (the formats in full; None for PyTorch's own stage), what `set_link` says of the link, `tokens_per_second` (of
        the median step) with `tokens_per_second_low` and `_high` (slowest and fastest step), `speedup_stock_fp32`,
        `speedup_fp32` (the same stage with full precision; both with the same split), `speedup_best_stock_fp32`
        (PyTorch's own stage with the split that suits it best), `share_of_unlimited` (of the fastest on the unlimited
        link), `bits_forward`, `bits_backward`, `bytes_per_step` (all ranks, both ways), `seconds_per_step`,
        `compute_seconds`, `codec_seconds` (`checksum_seconds` of it), `wait_seconds` (of a step, mean over the ranks),
        `loss` (of the last step; all boundaries of a link have done the same steps), `state_bytes` (kept between steps,
        all ranks), `steps`, `evaluation_seconds` (None without evaluations).

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    measured = Measurements(settings)
    with started(settings.ranks, settings.links) as (network, ranks):
        _open(settings, ranks)
        for link in settings.links:
            measured.links[link] = set_link(network, link)
            for _ in range(settings.rounds):
                for split, boundary in product(settings.all_splits, settings.boundaries):
                    measured.take(ranks, link, split, boundary)
                    if on_rows:
                        on_rows(measured.rows())
    return Report(command="bench pipeline", settings=settings, machine=machine(), rows=measured.rows())


def _open(settings: Settings, ranks: Ranks) -> None:
    """Set up all boundaries' runs, and let each visit every sample."""
    with tempfile.TemporaryDirectory() as folder:
        held_out = settings.evaluations * settings.batch
        windows = settings.samples + held_out
        data: dict[str, Any] = {"max_bytes": 2 * windows * settings.sequence}
        if held_out:
            data["held_out_share"] = held_out / windows
        runs = product(settings.all_splits, settings.boundaries)
        for number, (split, boundary) in enumerate(runs):
            entries = {"pipeline": vars(split), "data": data}
            output = {"output": f"{folder}/{number}", "eval_batches": settings.evaluations}
            config = recipe(settings, boundary, **entries, run=output)
            name = f"{split} {boundary}"
            ranks.ask("open", name=name, config=config, samples=settings.samples)
            ranks.ask("steps", name=name, count=settings.samples // settings.batch)


class Measurements:
    """What has been measured so far."""

    def __init__(self, settings: Settings) -> None:
        self.links: dict[Link, dict[str, Any]] = {}
        self.steps: dict[tuple[Link, Split, str], list[dict[str, Any]]] = {}
        self.evaluations: dict[tuple[Link, Split, str], list[float]] = {}
        self.state_bytes: dict[tuple[Split, str], int] = {}
        self._settings = settings

    def take(self, ranks: Ranks, link: Link, split: Split, boundary: str) -> None:
        """Give a boundary its turn. Its first step meets cold caches and a TCP that starts anew, and does not count."""
        name, key = f"{split} {boundary}", (link, split, boundary)
        done = step(ranks, name, 1 + self._settings.steps)[1:]
        self.steps.setdefault(key, []).extend(done)
        if self._settings.evaluations:
            self.evaluations.setdefault(key, []).append(max(ranks.ask("evaluate", name=name)))
        self.state_bytes[split, boundary] = sum(ranks.ask("state_bytes", name=name))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each link, split and boundary, in the order of the settings."""
        settings = self._settings
        speed = {key: _median(steps, "tokens_per_second") for key, steps in self.steps.items()}
        unlimited = max((s for (link, *_), s in speed.items() if link == UNLIMITED), default=None)
        rows = []
        for key in product(settings.links, settings.all_splits, settings.boundaries):
            if not (steps := self.steps.get(key)):
                continue
            link, split, boundary = key
            row = {"boundary": boundary, "split": str(split), **self.links[link]}
            row |= formats_of(boundary, settings.backward)
            stock = [speed.get((link, other, "stock-fp32")) for other in settings.all_splits]
            others = {
                "stock_fp32": speed.get((link, split, "stock-fp32")),
                "fp32": speed.get((link, split, "fp32")),
                "best_stock_fp32": max(filter(None, stock), default=None),
            }
            row |= {f"speedup_{name}": speed[key] / other if other else None for name, other in others.items()}
            row["share_of_unlimited"] = speed[key] / unlimited if unlimited else None
            taken = self.evaluations.get(key)
            row["evaluation_seconds"] = statistics.median(taken) if taken else None
            rows.append(row | _summary(steps) | {"state_bytes": self.state_bytes[split, boundary]})
        return rows


def recipe(settings: Any, boundary: str, **more: Mapping[str, Any]) -> dict[str, Any]:
    """The training run of one boundary, as `lowbit.train.config_file.from_mapping` takes it.

    Args:
        settings: with the fields of `Settings` that describe model, data and pipeline.
        boundary: a name in `STOCK` or a codec; more: further entries, by section.
    """
    pipeline: dict[str, Any] = {
        "ranks": settings.ranks,
        "stages_per_rank": settings.stages_per_rank,
        "schedule": settings.schedule,
        "microbatches": settings.microbatches,
        "warmup_steps": 0,
    }
    if boundary in STOCK:
        pipeline["boundary"] = boundary
    else:
        pipeline |= formats_of(boundary, settings.backward)
    sections: dict[str, dict[str, Any]] = {
        "model": {name: getattr(settings, name) for name in _MODEL},
        "data": {"batch": settings.batch, "sequence": settings.sequence},
        "pipeline": pipeline,
        "run": {
            "device": settings.device,
            "backend": "gloo",
            "precision": settings.precision,
            "seed": settings.seed,
            "progress": False,
            "tensorboard": False,
            "checkpoint_every": 0,
        },
    }
    for section, entries in more.items():
        sections.setdefault(section, {}).update(entries)
    return sections


def formats_of(boundary: str, backward: str) -> dict[str, str | None]:
    """What a boundary carries each way, in full, by `forward` and `backward`; None for PyTorch's own stage."""
    pair = (None, None) if boundary in STOCK else map(repr, parse_pair(boundary, backward))
    return dict(zip(("forward", "backward"), pair, strict=True))


def step(ranks: Ranks, name: str, count: int) -> list[dict[str, Any]]:
    """Steps of a run: metrics over all ranks, with the time of the slowest."""
    answers = ranks.ask("steps", name=name, count=count)
    merged = []
    for step in zip(*answers, strict=True):
        seconds = max(metrics["seconds"] for metrics in step)
        speed = step[0]["tokens_per_second"] * step[0]["seconds"] / seconds
        merged.append({**step[0], "seconds": seconds, "tokens_per_second": speed})
    return merged


def model_of(settings: Any) -> ModelConfig:
    """The model of settings with a field for each number of it, and a `pretrained` that takes their place."""
    if settings.pretrained:
        return ModelConfig(pretrained=settings.pretrained)
    names = ("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab")
    return ModelConfig(**{name: getattr(settings, name) for name in names})


def check_at_least(settings: Any, **least: int) -> None:
    """Check lower limits of whole numbers.

    Raises:
        ValueError: a field below its limit.
    """
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise ValueError(f"{name} is {getattr(settings, name)}; allowed: at least {low}")


def check_recipes(settings: Any) -> None:
    """Check that every boundary makes a training run that can start, on the device of the settings.

    Raises:
        ValueError: it does not; the text says why, and what is allowed.
    """
    if settings.backward:
        parse(settings.backward)
    check_choice("device", settings.device, ("cpu", "cuda"))
    for boundary in settings.boundaries:
        if boundary in STOCK and settings.device == "cuda":
            raise ValueError(
                f"boundaries has {boundary!r}; PyTorch's own stage cannot use Gloo from a GPU; "
                "allowed with device cuda: all other formats"
            )
        config = from_mapping(recipe(settings, boundary))
        plan = make_layout(config.pipeline, ranks=settings.ranks, layers=settings.layers)
        codecs = make_codecs(config.pipeline, plan.stages - 1)
        check_formats(boundary, (*codecs.forward, *codecs.backward), settings.dim)
    choose_device(settings.device, settings.ranks)


def check_formats(boundary: str, codecs: Iterable[Codec], width: int) -> None:
    """Check that a boundary's formats can code tokens of so many elements, without a warm-up that settles them.

    Raises:
        ValueError: one cannot, or leaves something open.
    """
    for codec in codecs:
        try:
            codec.nbytes((1, width))
        except ValueError as error:
            raise ValueError(f"boundaries has {boundary!r}: {error}") from error


def _summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    speeds = [step["tokens_per_second"] for step in steps]
    medians = (
        "bits_forward", "bits_backward", "compute_seconds", "codec_seconds", "checksum_seconds", "wait_seconds",
    )  # fmt: skip
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_low": min(speeds),
        "tokens_per_second_high": max(speeds),
        "seconds_per_step": _median(steps, "seconds"),
        "bytes_per_step": round(_median(steps, "bytes_sent")),
        **{name: _median(steps, name) for name in medians},
        "loss": steps[-1]["loss"],
        "steps": len(steps),
    }


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(step[name] for step in steps)
