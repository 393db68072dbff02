"""`lowbit bench gradients`: gradient averages over really slow links, format against format, alone and in training.

All formats average the same tensors in the same processes and take turns, round after round, so that whatever else the
machine does hits all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lowbit.bench.launch import UNLIMITED, Ranks, set_link, started
from lowbit.bench.pipeline import check_at_least
from lowbit.bench.report import Report, Row, machine
from lowbit.bench.timing import spread
from lowbit.codecs import Codec, parse
from lowbit.collectives.checks import check_summable
from lowbit.network import Link, SlowLink

ENGINE = ("engine-fp32", "engine-bf16", "hook-fp16", "hook-bf16", "powersgd")
SHORT = {
    "int8": "GroupInt(bits=8, group=128, symmetric=True)",
    "int4": "GroupInt(bits=4, group=64, symmetric=True)",
}
POWER_RANK = 4
MATRIX = 1024
_PROGRAM = "lowbit.bench.gradients_rank"

OnRows = Callable[[Sequence[Row]], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared, on which links, among how many ranks.

    Args:
        links: rate, and round trip if there is a distance, such as 25mbit, 100mbit/40ms, or unlimited.
        ranks: processes, each on a host of its own.
        formats: engine-fp32 and engine-bf16 are PyTorch's all-reduce, hook-fp16 and hook-bf16 its DDP hooks, powersgd
            its low-rank hook (rank 4); int8 and int4 are symmetric, in groups of 128 and 64; others are codecs.
        numel: float32 elements of the tensor that is averaged, a multiple of 1048576.
        rounds: how often each format has its turn.
        steps: timed steps of data-parallel training for each format and link, on the largest number of ranks; 0: none.
        dim, layers, heads, ffn: of the Llama that is trained. batch: samples of a rank; sequence: tokens of a sample.
        algorithm: of the codecs, "two_shot" or "one_shot".
    """

    links: tuple[Link, ...] = (Link(100.0), Link(1000.0), Link(10000.0), UNLIMITED)
    ranks: tuple[int, ...] = (2, 4)
    formats: tuple[str, ...] = (*ENGINE, "fp8", "int8", "int4")
    numel: int = 16 << 20
    rounds: int = 5
    steps: int = 2
    dim: int = 512
    layers: int = 4
    heads: int = 4
    ffn: int = 1536
    batch: int = 2
    sequence: int = 64
    algorithm: str = "two_shot"

    def __post_init__(self) -> None:
        check_at_least(self, rounds=1, steps=0, dim=1, layers=1, heads=1, ffn=1, batch=1, sequence=1)
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim is {self.dim}; allowed with {self.heads} heads: multiples of {2 * self.heads}")
        for name in ("links", "formats", "ranks"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; allowed: one or more, each once")
        if self.numel < 1 or self.numel % MATRIX**2:
            raise ValueError(f"numel is {self.numel}; allowed: multiples of {MATRIX**2}")
        if min(self.ranks) < 2:
            raise ValueError(f"ranks is {self.ranks}; allowed: at least 2 each")
        if self.algorithm not in ("two_shot", "one_shot"):
            raise ValueError(f"algorithm is {self.algorithm!r}; allowed: two_shot, one_shot")
        for name in set(self.formats) - set(ENGINE):
            codec_of(name)


def codec_of(name: str) -> Codec:
    """The codec of a format of ours.

    Raises:
        TypeError, ValueError: an unknown name, or a codec that cannot be summed.
    """
    return check_summable(parse(SHORT.get(name, name)))


def run(settings: Settings, *, on_rows: OnRows | None = None) -> Report:
    """Measure every format on every link among every number of ranks.

    Args:
        settings: what to measure.
        on_rows: called with all rows so far after every round.

    Returns:
        A report with a row for each number of ranks, link and format: `format`, what `set_link` says of the link,
        `ranks`, `numel`, `ms` (median over the rounds of the slowest rank's time), `ms_low`, `ms_high`, `spread`
        (interquartile range over median), `speedup_fp32`, `speedup_bf16` (of the medians, over the engine's),
        `bits_per_element` (of the format), `wire_bits` (bytes that really left a rank, headers included, over those
        elements that an all-reduce has to send), `link_share` (of the link's goodput that was used: 1 is the physical
        limit; None: unlimited), `relative_error` (of the mean, against float64), `rounds`; and from training
        `tokens_per_second` (all ranks, median step), `training_speedup_fp32`, `gradient_bytes` (held by a rank when
        backward has ended: gradients, buckets, and what the format keeps beside them), None where it was not trained.

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    measured = Measurements(settings)
    for count in settings.ranks:
        with started(count, settings.links, _PROGRAM) as (network, ranks):
            _measure(measured, network, ranks, count, on_rows)
    return Report(command="bench gradients", settings=settings, machine=machine(), rows=measured.rows())


def _measure(
    measured: Measurements,
    network: SlowLink | None,
    ranks: Ranks,
    count: int,
    on_rows: OnRows | None,
) -> None:
    settings = measured.settings
    ranks.ask("open", numel=settings.numel, algorithm=settings.algorithm)
    for name in settings.formats:
        measured.error[count, name] = ranks.ask("error", name=name)[0]
    trains = settings.steps > 0 and count == max(settings.ranks)
    # The engine's bfloat16 is no hook, and DDP refuses its own bfloat16 hook without NCCL.
    names = [name for name in settings.formats if not name.endswith("-bf16")]
    if trains:
        sizes = ("dim", "layers", "heads", "ffn", "batch", "sequence")
        model = {name: getattr(settings, name) for name in sizes}
        for name in names:
            ranks.ask("prepare", name=name, **model)
    for link in settings.links:
        measured.links[count, link] = set_link(network, link)
        for _ in range(settings.rounds):
            for name in settings.formats:
                measured.take(count, link, name, ranks.ask("average", name=name), network is not None)
            if on_rows:
                on_rows(measured.rows())
        for _ in range(settings.steps if trains else 0):
            for name in names:
                measured.train(count, link, name, ranks.ask("step", name=name))


class Measurements:
    """What has been measured so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.links: dict[tuple[int, Link], dict[str, Any]] = {}
        self.error: dict[tuple[int, str], float] = {}
        self._ms: dict[tuple[int, Link, str], list[float]] = {}
        self._bytes: dict[tuple[int, Link, str], list[float]] = {}
        self._steps: dict[tuple[int, Link, str], list[float]] = {}
        self._held: dict[str, int] = {}

    def take(self, count: int, link: Link, name: str, answers: Sequence[Any], own_hosts: bool) -> None:
        """Note an average: seconds and sent bytes of each rank, which all see all bytes on a common host."""
        key = (count, link, name)
        self._ms.setdefault(key, []).append(1e3 * max(a["seconds"] for a in answers))
        sent = statistics.fmean(a["sent"] for a in answers) / (1 if own_hosts else count)
        self._bytes.setdefault(key, []).append(sent)

    def train(self, count: int, link: Link, name: str, answers: Sequence[Any]) -> None:
        """Note a step of training."""
        seconds = max(a["seconds"] for a in answers)
        self._steps.setdefault((count, link, name), []).append(seconds)
        self._held[name] = max(a["gradient_bytes"] for a in answers)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each number of ranks, link and format, in the order of the settings."""
        wanted = product(self.settings.ranks, self.settings.links, self.settings.formats)
        return [self._row(*key) for key in wanted if key in self._ms]

    def _row(self, count: int, link: Link, name: str) -> dict[str, Any]:
        times, numel = self._ms[count, link, name], self.settings.numel
        share = 2 * (count - 1) / count * numel
        row: dict[str, Any] = {
            "format": name,
            **self.links[count, link],
            "ranks": count,
            "numel": numel,
            "ms": statistics.median(times),
            "ms_low": min(times),
            "ms_high": max(times),
            "spread": spread(times),
            "bits_per_element": bits_of(name, numel),
            "wire_bits": 8 * statistics.median(self._bytes[count, link, name]) / share,
            "relative_error": self.error.get((count, name)),
            "rounds": len(times),
            "link_share": None,
        }
        for other in ("fp32", "bf16"):
            base = self._ms.get((count, link, f"engine-{other}"))
            row[f"speedup_{other}"] = statistics.median(base) / row["ms"] if base else None
        if (goodput := row["goodput_mbit"]) is not None:  # bits over 1000 times Mbit/s: ms
            row["link_share"] = share * row["bits_per_element"] / (1e3 * goodput) / row["ms"]
        return row | self._training(count, link, name)

    def _training(self, count: int, link: Link, name: str) -> dict[str, Any]:
        seconds = self._steps.get((count, link, name))
        base = self._steps.get((count, link, "engine-fp32"))
        if not seconds:
            return dict.fromkeys(("tokens_per_second", "training_speedup_fp32", "gradient_bytes"))
        tokens = count * self.settings.batch * self.settings.sequence
        middle = statistics.median(seconds)
        return {
            "tokens_per_second": tokens / middle,
            "training_speedup_fp32": statistics.median(base) / middle if base else None,
            "gradient_bytes": self._held[name],
        }


def bits_of(name: str, numel: int) -> float:
    """Bits of an element on the wire, without headers."""
    if name == "powersgd":
        return 32 * POWER_RANK * 2 * MATRIX / MATRIX**2
    if name in ENGINE:
        return 32.0 if name == "engine-fp32" else 16.0
    return codec_of(name).bits_per_element((numel,))
