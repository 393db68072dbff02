"""`lowbit bench tensor-parallel`: sums of partial sums over really slow links, by size of the message.

All formats sum the same tensors in the same processes and take turns, round after round, so that whatever else the
machine does hits all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.bench.launch import UNLIMITED, Ranks, set_link, started
from lowbit.bench.pipeline import check_at_least
from lowbit.bench.report import Report, Row, machine
from lowbit.bench.timing import spread
from lowbit.codecs import Codec, FeatureInt4, GroupInt
from lowbit.network import Link, SlowLink

FORMATS = ("bf16", "int4", "int8", "feature-int4")
PREFILL = "auto"
ALGORITHMS = ("one_shot", "two_shot")
_PROGRAM = "lowbit.bench.tensor_parallel_rank"
_CALLS = 1 << 20  # elements that a turn sums at least, by calling several times
_MOST_CALLS = 8

OnRows = Callable[[Sequence[Row]], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared, on which links, among how many ranks.

    Args:
        links: rate, and round trip if there is a distance, such as 25mbit, 100mbit/40ms, or unlimited.
        ranks: processes, each on a host of its own.
        formats: bf16 is PyTorch's own all-reduce of bfloat16; int4 has a static scale for each feature and no outliers;
            int8 one for each 128 elements, symmetric; feature-int4 is int4 with width / 64 outliers in bfloat16.
        algorithms: of what is coded: one_shot, two_shot, auto.
        tokens: of a message; several. width: features of a token.
        rounds: how often each has its turn.
        prefill: tokens that a Llama in bfloat16 with random weights, cut over the ranks, reads at once for each format
            and link; 0: none.
        dim, layers, heads, ffn: of that Llama; each layer sums twice, prefill x dim elements.
    """

    links: tuple[Link, ...] = (Link(1000.0), Link(10000.0), UNLIMITED)
    ranks: tuple[int, ...] = (2, 4)
    formats: tuple[str, ...] = FORMATS
    algorithms: tuple[str, ...] = ALGORITHMS
    tokens: tuple[int, ...] = (1, 16, 64, 256, 2048)
    width: int = 4096
    rounds: int = 7
    prefill: int = 512
    dim: int = 512
    layers: int = 4
    heads: int = 8
    ffn: int = 1536

    def __post_init__(self) -> None:
        check_at_least(self, rounds=1, width=1, prefill=0, dim=1, layers=1, heads=1, ffn=1)
        for name in ("links", "formats", "ranks", "algorithms", "tokens"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; allowed: one or more, each once")
        for name, allowed in (("formats", FORMATS), ("algorithms", (*ALGORITHMS, "auto"))):
            if unknown := set(getattr(self, name)) - set(allowed):
                raise ValueError(f"{name} has {', '.join(sorted(unknown))}; allowed: {', '.join(allowed)}")
        if min(self.ranks) < 2 or min(self.tokens) < 1:
            raise ValueError(f"ranks is {self.ranks}, tokens {self.tokens}; allowed: at least 2, at least 1")
        if self.prefill:
            self._check_model()

    def _check_model(self) -> None:
        if self.dim % (2 * self.heads):  # rotary embeddings turn pairs
            raise ValueError(f"dim is {self.dim}; allowed with {self.heads} heads: multiples of {2 * self.heads}")
        for name in ("heads", "ffn"):
            value = getattr(self, name)
            if any(value % count for count in self.ranks):
                raise ValueError(f"{name} is {value}, ranks {self.ranks}; allowed: multiples of each number of ranks")

    def contenders(self) -> Iterator[tuple[str, str]]:
        """Format and algorithm of everything that takes a turn; the engine's algorithm is its ring."""
        for name in self.formats:
            for algorithm in ("ring",) if name == "bf16" else self.algorithms:
                yield name, algorithm


def codec_of(name: str, parts: Sequence[Tensor]) -> Codec:
    """The codec of a format, made for the partial sums of all ranks, (tokens, width) each.

    Raises:
        ValueError: the engine's format, which has none.
    """
    if name == "bf16":
        raise ValueError("format is 'bf16', the engine's own; allowed: int4, int8, feature-int4")
    if name == "int8":
        return GroupInt(bits=8, group=128, symmetric=True)
    return FeatureInt4.fit(parts, outliers=0 if name == "int4" else None)


def sample(tokens: int, width: int, rank: int, draw: int = 0) -> Tensor:
    """A rank's partial sums, bfloat16: Gaussian features of different sizes, one in 64 of them 30 times as large.

    `draw`: other tokens, features of the same sizes. Codecs are fitted to another draw than what is summed.
    """
    sizes = torch.randn(width, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    sizes[::64] *= 30
    own = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1 + rank + 1000 * draw))
    return (own * sizes).bfloat16()


def run(settings: Settings, *, on_rows: OnRows | None = None) -> Report:
    """Measure every format and algorithm with messages of every size, on every link, among every number of ranks.

    Args:
        settings: what to measure.
        on_rows: called with all rows so far after every size of a message.

    Returns:
        A report with a row for each number of ranks, link, size, format and algorithm: `format`, `algorithm`, `ranks`,
        what `set_link` says of the link, `numel`, `tokens`, `ms` (median over the rounds of the slowest rank's time,
        with the tensor already there), `ms_low`, `ms_high`, `spread` (interquartile range over median), `speedup_bf16`
        (of the medians, over the engine's), `bits_per_value` (of the format), `wire_bits` (bytes that really left a
        rank, headers included, over what an all-reduce has to send), `crossover` (fewest elements measured from which
        on this is faster than the engine's; None: never), `relative_error` (of the largest message, which is not what
        the codec was fitted to, against float64), `rounds`. Then a row for each prefill: its `tokens_per_second`
        (absent before) by the same `format`, with algorithm "auto", `ms` and `speedup_bf16` of all of it, and `numel`
        of one of its sums.

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    measured = Measurements(settings)
    for count in settings.ranks:
        with started(count, settings.links, _PROGRAM) as (network, ranks):
            _measure(measured, network, ranks, count, on_rows)
    return Report(
        command="bench tensor-parallel",
        settings=settings,
        machine=machine(),
        rows=measured.rows(),
    )


def _measure(
    measured: Measurements,
    network: SlowLink | None,
    ranks: Ranks,
    count: int,
    on_rows: OnRows | None,
) -> None:
    settings = measured.settings
    bits = ranks.ask("open", tokens=max(settings.tokens), width=settings.width)[0]
    measured.bits |= {name: found for name, found in bits.items() if name in settings.formats}
    for name, algorithm in settings.contenders():
        answer = ranks.ask("error", name=name, algorithm=algorithm)[0]
        measured.error[count, name, algorithm] = answer
    if settings.prefill:
        sizes = {name: getattr(settings, name) for name in ("dim", "layers", "heads", "ffn")}
        ranks.ask("prepare", tokens=settings.prefill, **sizes)
        for name in settings.formats:
            ranks.ask("prefill", name=name)
    for link in settings.links:
        measured.links[count, link] = set_link(network, link)
        for tokens in settings.tokens:
            calls = min(_MOST_CALLS, max(1, _CALLS // (tokens * settings.width)))
            for turn in range(settings.rounds + 1):
                for name, algorithm in settings.contenders():
                    answers = ranks.ask("reduce", name=name, algorithm=algorithm, tokens=tokens, calls=calls)
                    if turn:  # the first time ranks agree, and buffers are made
                        key = (count, link, tokens, name, algorithm)
                        measured.take(key, answers, network is not None)
            if on_rows:
                on_rows(measured.rows())
        for _ in range(settings.rounds if settings.prefill else 0):
            for name in settings.formats:
                answers = ranks.ask("prefill", name=name)
                measured.take((count, link, 0, name, PREFILL), answers, network is not None)


Key = tuple[int, Link, int, str, str]


class Measurements:
    """What has been measured so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bits: dict[str, float] = {}
        self.links: dict[tuple[int, Link], dict[str, Any]] = {}
        self.error: dict[tuple[int, str, str], float] = {}
        self._ms: dict[Key, list[float]] = {}
        self._bytes: dict[Key, list[float]] = {}

    def take(self, key: Key, answers: Sequence[Any], own_hosts: bool) -> None:
        """Note a turn: seconds and sent bytes of each rank, which all see all bytes on a common host."""
        self._ms.setdefault(key, []).append(1e3 * max(a["seconds"] for a in answers))
        sent = statistics.fmean(a["sent"] for a in answers) / (1 if own_hosts else key[0])
        self._bytes.setdefault(key, []).append(sent)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each number of ranks, link, size, format and algorithm, in the order of measuring; then prefill."""
        sums = [self._row(*key) for key in self._ms if key[2]]
        return sums + [self._prefill(*key) for key in self._ms if not key[2]]

    def _prefill(self, count: int, link: Link, none: int, name: str, algorithm: str) -> dict[str, Any]:
        times = self._ms[count, link, none, name, algorithm]
        base = self._ms.get((count, link, none, "bf16", algorithm))
        middle = statistics.median(times)
        return {
            "format": name,
            "algorithm": "ring" if name == "bf16" else algorithm,
            "ranks": count,
            **self.links[count, link],
            "numel": self.settings.prefill * self.settings.dim,
            "tokens": self.settings.prefill,
            "tokens_per_second": 1e3 * self.settings.prefill / middle,
            "ms": middle,
            "ms_low": min(times),
            "ms_high": max(times),
            "spread": spread(times),
            "speedup_bf16": statistics.median(base) / middle if base else None,
            "rounds": len(times),
        }

    def _row(self, count: int, link: Link, tokens: int, name: str, algorithm: str) -> dict[str, Any]:
        key = (count, link, tokens, name, algorithm)
        times, numel = self._ms[key], tokens * self.settings.width
        share = 2 * (count - 1) / count * numel
        return {
            "format": name,
            "algorithm": algorithm,
            "ranks": count,
            **self.links[count, link],
            "numel": numel,
            "tokens": tokens,
            "ms": statistics.median(times),
            "ms_low": min(times),
            "ms_high": max(times),
            "spread": spread(times),
            "speedup_bf16": self._speedup(key),
            "bits_per_value": self.bits[name],
            "wire_bits": 8 * statistics.median(self._bytes[key]) / share,
            "crossover": self._crossover(key),
            "relative_error": self.error.get((count, name, algorithm)),
            "rounds": len(times),
        }

    def _speedup(self, key: Key) -> float | None:
        base = self._ms.get((*key[:3], "bf16", "ring"))
        return statistics.median(base) / statistics.median(self._ms[key]) if base else None

    def _crossover(self, key: Key) -> int | None:
        """Fewest elements from which on a format is faster than the engine's at every size measured."""
        count, link, _, name, algorithm = key
        found = None
        for tokens in sorted(self.settings.tokens, reverse=True):
            other = (count, link, tokens, name, algorithm)
            if other in self._ms:
                speedup = self._speedup(other)
                if speedup is None or speedup <= 1:
                    break
                found = tokens * self.settings.width
        return found
