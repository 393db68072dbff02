"""`lowbit bench gradients`: gradient averaging over emulated slow links, by format."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lowbit.codecs import Codec, parse
from lowbit.collectives import all_reduce
from lowbit.collectives.calls import payload_bytes, queue_of
from lowbit.collectives.reduce import check_summable
from lowbit.gradients import GradientStorage, all_reduce_hook
from lowbit.wire.pytorch import default_group
from lowbit_lab.bench.settings import (
    LINK,
    AtLeastTwo,
    EachOnce,
    Links,
    Names,
    check_constant,
    link_name,
    on_slowest_link,
)
from lowbit_lab.bench.sums import Phase, Taken, all_reduce_elements, error_of_sum, take_turns, timed
from lowbit_lab.bench.workers import UNLIMITED, Workers, serve
from lowbit_lab.charts import Bars
from lowbit_lab.charts.style import title_of
from lowbit_lab.network import Link
from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.report import Baseline, Column, Command, Row, Table
from lowbit_run.train.config import ModelConfig
from lowbit_run.train.model import build_model, next_token_loss, vocabulary

ENGINE = ("engine-fp32", "engine-bf16", "hook-fp16", "hook-bf16", "powersgd")
STORED = ("fp8-stored", "fp8-recoded")
SHORT = {"int8": "GroupInt(bits=8, group=128, symmetric=True)", "int4": "GroupInt(bits=4, group=64, symmetric=True)"}
SHORT |= dict.fromkeys(STORED, "fp8")
PROGRAM = "lowbit_lab.bench.gradients"
"""The module of the ranks."""
POWER_RANK = 4
MATRIX = 1024
MICROBATCHES = 3
"""Micro-batches that stored gradients are averaged over. Dividing by 3 makes coding round; dividing by 4 would not."""
_BUCKET_MB = 25  # PyTorch's default
# PowerSGD starts its second all-reduce when the first has ended. With several buckets the order would differ between
# ranks, and Gloo would end the process; so it gets a single bucket.
_ONE_BUCKET_MB = 1 << 20
_HOOKS = {"hook-fp16": default_hooks.fp16_compress_hook, "hook-bf16": default_hooks.bf16_compress_hook}
Outcomes = dict[tuple[int, str], dict[str, float]]
"""Fields of rows, by number of ranks and format."""


@section()
class GradientsBenchmark:
    """Formats, links and numbers of ranks."""

    links: Links = (Link(100.0), Link(1000.0), Link(10000.0), UNLIMITED)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    ranks: Annotated[tuple[AtLeastTwo, ...], EachOnce] = (2, 4)
    """Numbers of ranks, each on its own host."""
    formats: Names = (*ENGINE, "fp8", "int8", "int4")
    """engine-fp32 and engine-bf16: PyTorch's all-reduce. hook-fp16, hook-bf16 and powersgd (rank 4): its DDP hooks.
    int8 and int4: symmetric, in groups of 128 and 64. fp8-stored: means over 3 micro-batches in `GradientStorage`,
    which are sent as stored; fp8-recoded: the same, but decoded, coded and stored again. Others: codecs, by name or in
    full."""
    numel: Positive = 16 << 20
    """Float32 elements of the tensor that is averaged, a multiple of 1048576."""
    rounds: Positive = 5
    """Turns of each format."""
    steps: NonNegative = 2
    """Timed steps of data-parallel training for each format and link, on the most ranks. 0: none."""
    model: ModelConfig = ModelConfig(dim=512, layers=4, heads=4, ffn=1536)
    """Model to train."""
    batch: Positive = 2
    """Samples of each rank in a step."""
    sequence: Positive = 64
    """Tokens of a sample."""
    algorithm: Literal["one_shot", "two_shot"] = "two_shot"
    """All-reduce algorithm of codecs."""

    def __post_init__(self) -> None:
        check_constant("links", self.links)
        if self.numel % MATRIX**2:
            raise ConfigError(f"numel is {self.numel}; allowed: multiples of {MATRIX**2}")
        for name in set(self.formats) - set(ENGINE):
            codec_of(name)


@functools.cache  # so that timed turns do not include it
def codec_of(name: str) -> Codec:
    """Return the codec of a format that is not PyTorch's."""
    return check_summable(parse(SHORT.get(name, name)))


def measure(settings: GradientsBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every format on every link with every number of ranks.

    Yields:
        Rows, one for each number of ranks, link and format: `format`, the fields of `set_link`, `ranks`,
        `numel`, `ms` (median over the rounds of the slowest rank's time), `ms_low`, `ms_high`, `spread` (interquartile
        range over median), `speedup_fp32`, `speedup_bf16` (of the medians, over PyTorch's), `bits_per_element` (of
        the format), `wire_bits` (measured bits that left a rank, headers included, per element that an all-reduce
        has to send), `link_share` (share of the link's goodput that was used: 1 is the physical limit; None:
        unlimited), `relative_error` (of the mean, against float64, storing included), `peak_bytes` (of gradients,
        payloads and the working memory of an average), `rounds`; and from training `tokens_per_second` (all ranks,
        median step), `training_speedup_fp32`, `gradient_bytes` (held by a rank after backward: gradients, buckets, and
        the format's own buffers), all None without training.
    """
    outcomes: Outcomes = {}
    # PyTorch's all-reduce of bfloat16 is not a hook, and DDP refuses its own bfloat16 hook without NCCL.
    trained = [{"name": name} for name in settings.formats if not name.endswith("-bf16")]

    def prepare(ranks: Workers, count: int) -> list[Phase]:
        ranks.ask("open", numel=settings.numel, algorithm=settings.algorithm)
        for name in settings.formats:
            first, *others = ranks.ask("outcome", name=name)
            peak = max(each["peak_bytes"] for each in (first, *others))
            outcomes[count, name] = {"relative_error": first["error"], "peak_bytes": peak}
        every = [{"name": name} for name in settings.formats]
        phases = [Phase(name="average", order="average", contenders=every, rounds=settings.rounds)]
        if settings.steps and count == max(settings.ranks):
            sizes: dict[str, Any] = {"batch": settings.batch, "sequence": settings.sequence}
            for contender in trained:
                ranks.ask("prepare", **contender, model=dataclasses.asdict(settings.model), **sizes)
            phases.append(Phase(name="train", order="step", contenders=trained, rounds=settings.steps))
        return phases

    for taken in take_turns(PROGRAM, settings.ranks, settings.links, prepare):
        yield rows_of(settings, taken, outcomes)


def rows_of(settings: GradientsBenchmark, taken: Sequence[Taken], outcomes: Outcomes) -> list[Row]:
    """Return a row for each number of ranks, link and format, in the order of measuring."""
    rows: dict[tuple[int, str, str], dict[str, Any]] = {}
    for one in taken:
        name = one.contender["name"]
        key = (one.ranks, one.link["link"], name)
        if one.phase == "average":
            row = {"format": name, **one.about(), "numel": settings.numel}
            row["bits_per_element"] = bits_of(name, settings.numel)
            row["wire_bits"] = one.bits_sent(settings.numel)
            row |= outcomes[one.ranks, name]
            bits = all_reduce_elements(one.ranks, settings.numel) * row["bits_per_element"]
            goodput = row["goodput_mbit"]
            row["link_share"] = bits / (1e3 * goodput) / row["ms"] if goodput is not None else None
            rows[key] = row | dict.fromkeys(("tokens_per_second", "gradient_bytes"))
        else:
            tokens = one.ranks * settings.batch * settings.sequence
            rows[key]["tokens_per_second"] = tokens / statistics.median(one.seconds)
            rows[key]["gradient_bytes"] = max(answer["gradient_bytes"] for answer in one.turns[-1])
    return list(rows.values())


def bits_of(name: str, numel: int) -> float:
    """Return the bits per element on the network, without headers."""
    if name == "powersgd":
        return 32 * POWER_RANK * 2 * MATRIX / MATRIX**2
    if name in ENGINE:
        return 32.0 if name == "engine-fp32" else 16.0
    return codec_of(name).bits_per_element((numel,))


WHERE = (Column("ranks", "ranks"), LINK, Column("format", lambda row: row["format"].partition("(")[0]))


def _finding(rows: Sequence[Row]) -> str:
    """State how much faster FP8, or else the fastest format, is on the slowest link."""
    slowest = on_slowest_link(rows, "speedup_fp32")
    if not slowest:
        return "All-reduce of gradients by link and format"
    best = max(slowest, key=lambda row: (row["format"] == "fp8", row["speedup_fp32"]))
    name, ranks = title_of(best["format"]), f"{best['ranks']} ranks"
    return f"{name} averages gradients {best['speedup_fp32']:.2f}x as fast as FP32 ({link_name(best)}, {ranks})"


COMMAND = Command(
    name="bench gradients",
    summary="Gradient averaging over emulated slow links, by format.",
    examples=(
        "lowbit bench gradients --link 1gbit --rank 2 --format engine-fp32,fp8",
        "lowbit bench gradients --json gradients.json --png gradients.png",
    ),
    settings=GradientsBenchmark,
    measure=measure,
    baselines=[
        Baseline(field="speedup_fp32", value="ms", to={"format": "engine-fp32"}, alike=("ranks", "link"), way="under"),
        Baseline(field="speedup_bf16", value="ms", to={"format": "engine-bf16"}, alike=("ranks", "link"), way="under"),
        Baseline(
            field="training_speedup_fp32", value="tokens_per_second", to={"format": "engine-fp32"},
            alike=("ranks", "link"),
        ),
    ],
    tables=[
        Table(
            title=lambda rows: f"Averaging {rows[0]['numel'] * 4 / 2**20:.0f} MB of gradients",
            columns=[
                *WHERE,
                Column("ms", "ms", "{:.0f}"),
                Column("±", "spread", "{:.0%}"),
                Column("over\nfp32", "speedup_fp32", "{:.2f}x"),
                Column("over\nbf16", "speedup_bf16", "{:.2f}x"),
                Column("of the\nlink", "link_share", "{:.0%}"),
                Column("bits", "bits_per_element", "{:.1f}"),
                Column("rel.\nerror", "relative_error", "{:.1e}"),
                Column("peak\nMB", lambda row: row["peak_bytes"] / 1e6, "{:.0f}"),
            ],
        ),
        Table(
            title="Data-parallel training",
            rows=lambda rows: [row for row in rows if row["tokens_per_second"]],
            columns=[
                *WHERE,
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("over\nfp32", "training_speedup_fp32", "{:.2f}x"),
                Column("gradients\nMB", lambda row: (row["gradient_bytes"] or 0) / 1e6 or None, "{:.1f}"),
            ],
        ),
    ],
    charts=[
        Bars(
            title=_finding, subtitle="Speed over PyTorch's own all-reduce in FP32 · relative error of the mean",
            panel=lambda row: f"{row['ranks']} ranks", group=link_name, series="format", y="speedup_fp32",
            show=lambda row: f"{row['speedup_fp32']:.2f}x · {row['relative_error']:.1%}",
            label="times the speed of PyTorch's FP32",
        )
    ],
)  # fmt: skip


class GradientsRank:
    """This rank's tensor, and its models by format."""

    def __init__(self) -> None:
        self._x = torch.empty(0)
        self._algorithm: Any = "two_shot"
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._models: dict[str, tuple[nn.Module, GradientStorage | None, Tensor, int]] = {}
        self._stored: dict[str, tuple[GradientStorage, list[nn.Parameter]]] = {}
        self._groups: dict[str, Any] = {}  # one per format, so that each has its own payload buffers

    def open(self, numel: int, algorithm: str) -> None:
        """Make the tensor to average."""
        self._x, self._algorithm = sample(numel, dist.get_rank()), algorithm

    def average(self, name: str) -> dict[str, float]:
        """Average once."""
        x = self._gradients(name)
        return timed(lambda: self._average(name, x))

    def outcome(self, name: str) -> dict[str, float]:
        """Return peak memory, and the error of the mean in the third call, when PowerSGD starts to compress."""
        # It loads PyTorch's compiler, which the command itself can do without.
        from lowbit_lab.bench.memory_run import Meter

        for _ in range(3):
            x = self._gradients(name)
            meter = Meter(torch.device("cpu"))
            meter.reset()
            self._average(name, x)
            peak = meter.peak()
        if name in STORED:
            storage, _ = self._stored[name]
            held, x = storage.nbytes, torch.cat([gradient.view(-1) for _, gradient in storage.gradients()])
            x *= MICROBATCHES
        else:
            held = x.nbytes
        ranks, total = dist.get_world_size(), x.double() * dist.get_world_size()
        error = error_of_sum(total, (sample(x.numel(), rank) for rank in range(ranks))) if dist.get_rank() == 0 else 0.0
        kept = queue_of(self._groups[name]).scratch.nbytes()
        return {"error": error, "peak_bytes": held + kept + peak}

    def _gradients(self, name: str) -> Tensor:
        """Return this rank's gradients, as a copy or stored."""
        if name not in self._groups:
            self._groups[name] = dist.new_group()
        if name not in STORED:
            return self._x.clone()
        matrices = self._x.view(-1, MATRIX, MATRIX)
        if name not in self._stored:
            parameters = [nn.Parameter(torch.empty_like(part)) for part in matrices]
            self._stored[name] = GradientStorage(parameters), parameters
        storage, parameters = self._stored[name]
        for parameter, part in zip(parameters, matrices, strict=True):
            storage.put(parameter, part)
        storage.scale_(1 / MICROBATCHES)
        return torch.empty(0)

    def prepare(self, name: str, model: dict[str, Any], batch: int, sequence: int) -> None:
        """Set up data-parallel training with a format, and do the first steps, after which buckets no longer change."""
        sizes = ModelConfig(**model)
        vocab = vocabulary(sizes, 256)
        replica: Any = build_model(sizes, vocab=vocab, sequence=sequence, seed=0)
        storage = GradientStorage(replica) if name in STORED else None
        if storage is not None:
            self._groups[name] = dist.new_group()
        else:
            size = _ONE_BUCKET_MB if name == "powersgd" else _BUCKET_MB
            replica = DistributedDataParallel(replica, bucket_cap_mb=size, gradient_as_bucket_view=True)
            if name in _HOOKS:
                replica.register_comm_hook(None, _HOOKS[name])
            elif name == "powersgd":
                replica.register_comm_hook(_power_state(), powerSGD_hook.powerSGD_hook)
            elif name not in ENGINE:
                replica.register_comm_hook(None, all_reduce_hook(codec_of(name), algorithm=self._algorithm))
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(vocab, (batch, sequence + 1), generator=generator)
        before = payload_bytes()
        self._models[name] = replica, storage, tokens, 0
        for _ in range(3):
            self.step(name)
        self._models[name] = replica, storage, tokens, payload_bytes() - before

    def step(self, name: str) -> dict[str, float]:
        """Train a step; return its seconds, and the bytes held for gradients at its end."""
        model, storage, tokens, payloads = self._models[name]
        dist.barrier()
        start = time.perf_counter()
        next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:]).backward()
        if storage is not None:
            self._average_stored(name, storage)
        seconds = time.perf_counter() - start
        if storage is not None:
            held = storage.nbytes
            storage.zero_()
        else:
            gradients = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
            held = sum({s.data_ptr(): s.nbytes() for s in gradients}.values())
            model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "gradient_bytes": held + payloads}

    def _average(self, name: str, x: Tensor) -> None:
        """Replace a tensor, or stored gradients, by the mean over all ranks."""
        if name in STORED:
            self._average_stored(name, self._stored[name][0])
        elif name == "engine-fp32":
            dist.all_reduce(x)
            x.div_(dist.get_world_size())
        elif name == "engine-bf16":
            low = x.bfloat16()
            dist.all_reduce(low)
            x.copy_(low).div_(dist.get_world_size())
        elif name in ENGINE:
            # The parts of a `GradBucket` that PyTorch's hooks use, with consecutive square matrices.
            bucket: Any = SimpleNamespace(
                buffer=lambda: x, gradients=x.view(-1, MATRIX, MATRIX).unbind, index=lambda: 0, is_last=lambda: True
            )
            if name == "powersgd":
                self._power = self._power or _power_state()
                mean = powerSGD_hook.powerSGD_hook(self._power, bucket).wait()
            else:
                mean = _HOOKS[name](default_group(), bucket).wait()
            if mean.data_ptr() != x.data_ptr():
                x.copy_(mean)
        else:
            all_reduce(x, codec_of(name), self._groups[name], "avg", self._algorithm)

    def _average_stored(self, name: str, storage: GradientStorage) -> None:
        group = self._groups[name]
        if name == "fp8-stored":
            storage.average(group)
        else:
            storage.all_reduce(lambda flat: all_reduce(flat, storage.codec, group, "avg", async_op=True))


def sample(numel: int, rank: int) -> Tensor:
    """Draw a rank's gradients: a part common to all ranks plus its own part, with rows of very different sizes."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    own = torch.randn(numel, generator=torch.Generator().manual_seed(2 + rank))
    rows = torch.randn(numel // MATRIX, 1, generator=torch.Generator().manual_seed(0)).exp()
    return ((common + own).view(-1, MATRIX) * (1e-3 * rows)).view(-1)


def _power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=2)


if __name__ == "__main__":
    serve(GradientsRank)
