"""`lowbit bench tensor-parallel`: tensor-parallel sums over emulated slow links, by message size."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lowbit.codecs import Codec, FeatureInt, GroupInt
from lowbit.collectives import all_reduce
from lowbit.tensor_parallel import Installed, SumSettings, calibrate, low_bit_, tensor_parallel_
from lowbit.tensor_parallel.plan import is_cut_by_input
from lowbit.tensor_parallel.reduce import Choice, SumSample, measured, sum_over_ranks
from lowbit.tensor_parallel.rowwise import local
from lowbit.wire.pytorch import default_group
from lowbit_lab.bench.settings import LINK, AtLeastTwo, EachOnce, Links, check_constant, link_name
from lowbit_lab.bench.sums import Phase, Taken, error_of_sum, take_turns, timed
from lowbit_lab.bench.workers import UNLIMITED, Workers, serve
from lowbit_lab.charts import Lines
from lowbit_lab.charts.style import RECOMMENDED, family, title_of
from lowbit_lab.network import Link
from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.report import Baseline, Column, Command, Row, Table
from lowbit_run.train.config import ModelConfig
from lowbit_run.train.model import build_model, vocabulary

Format = Literal["bf16", "int4", "int8", "feature-int4", "feature-int4-static"]
Algorithm = Literal["one_shot", "two_shot", "auto"]
_CALLS = 1 << 20  # elements that a turn sums at least, by several calls
_MOST_CALLS = 8
_VOCAB = 512
_FITTED = 64  # least number of tokens: with fewer, some features are 0 in all sums


@section()
class TensorParallelBenchmark:
    """Formats, links and numbers of ranks."""

    links: Links = (Link(1000.0), Link(2500.0), Link(10000.0), UNLIMITED)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    ranks: Annotated[tuple[AtLeastTwo, ...], EachOnce] = (2, 4)
    """Numbers of ranks, each on its own host."""
    formats: Annotated[tuple[Format, ...], EachOnce] = ("bf16", "int4", "int8", "feature-int4")
    """bf16: PyTorch's all-reduce of bfloat16. int4: a gain for each token times a calibrated range for each feature.
    int8: symmetric, a scale for each 128 elements. feature-int4: int4 with width / 64 outlier features in bfloat16.
    feature-int4-static: the published format, ranges without a gain, and the same number of outlier features."""
    algorithms: Annotated[tuple[Algorithm, ...], EachOnce] = get_args(Algorithm)
    """All-reduce algorithms of codecs. auto: for each size the faster of these and PyTorch's own all-reduce, by
    thresholds that the ranks measure on each link before the first turn, as `low_bit_` does."""
    tokens: Annotated[tuple[Positive, ...], EachOnce] = (1, 8, 16, 64, 256, 1024, 2048)
    """Tokens of a message."""
    width: Positive = 4096
    """Features of a token."""
    rounds: Positive = 7
    """Turns of each format and algorithm."""
    prefill: NonNegative = 512
    """Tokens of a prompt for a model with random bfloat16 weights, split over the ranks, to read at once, with each
    format on each link, with thresholds that the ranks measure. 0: none."""
    model: ModelConfig = ModelConfig(dim=512, layers=4, heads=8, ffn=1536)
    """Model that reads the prompt. Each layer has two sums of prefill x dim elements."""

    def __post_init__(self) -> None:
        check_constant("links", self.links)
        for name in ("heads", "ffn") if self.prefill and not self.model.pretrained else ():
            value = getattr(self.model, name)
            if any(value % count for count in self.ranks):
                raise ConfigError(
                    f"model.{name} is {value}, ranks {self.ranks}; allowed: multiples of each number of ranks"
                )

    @property
    def contenders(self) -> list[dict[str, Any]]:
        """Return format and algorithm of every sum that takes a turn; PyTorch's algorithm is a ring."""
        return [
            {"name": name, "algorithm": algorithm}
            for name in self.formats
            for algorithm in (("ring",) if name == "bf16" else self.algorithms)
        ]


def codec_of(name: str, parts: Sequence[Tensor]) -> Codec:
    """Return the codec of a format, fitted to the partial sums of all ranks, (tokens, width) each."""
    if name == "int8":
        return GroupInt(bits=8, group=128, symmetric=True)
    if name == "feature-int4-static":
        return FeatureInt.fit(parts, gain="static", means=False)
    return FeatureInt.fit(parts, outliers=0 if name == "int4" else None)


def sample(tokens: int, width: int, rank: int, draw: int = 0) -> Tensor:
    """Draw a rank's partial sums, bfloat16: Gaussian features of different sizes, one in 64 of them 30 times as large.

    Another `draw` has other tokens with features of the same sizes: codecs are fitted to one, and sum another.
    """
    sizes = torch.randn(width, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    sizes[::64] *= 30
    own = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1 + rank + 1000 * draw))
    return (own * sizes).bfloat16()


def measure(settings: TensorParallelBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every format and algorithm with messages of every size, on every link, with every number of ranks.

    Yields:
        Rows, one for each number of ranks, link, size, format and algorithm: `format`, `algorithm`, `choice` (what
        "auto" chooses, "plain" for PyTorch's; else the algorithm), `ranks`, the fields of `set_link`, `numel`,
        `tokens`, `ms` (median over the rounds of the slowest rank's time, without copying the tensor), `ms_low`,
        `ms_high`, `spread` (interquartile range over median), `speedup_bf16` (of the medians, over PyTorch's),
        `bits_per_value` (of the format), `wire_bits` (measured bits that left a rank, headers included, per element
        that an all-reduce has to send), `crossover` (fewest measured elements from which on this is faster than
        PyTorch's; None: never), `relative_error` (of the largest message, to which the codec was not fitted, against
        float64; not for "auto"), `rounds`. Then a row for each prefill, which alone has `tokens_per_second`, with the
        same `format`, algorithm "auto", `ms` and `speedup_bf16` of the whole prefill, and `numel` of one of its sums.
    """
    bits: dict[str, float] = {}
    errors: dict[tuple[int, str, str], float] = {}

    def prepare(ranks: Workers, count: int) -> list[Phase]:
        bits.update(ranks.ask("open", tokens=max(settings.tokens), width=settings.width)[0])
        for contender in settings.contenders:
            key = count, contender["name"], contender["algorithm"]
            if key[2] == "auto":  # it is one of the others
                continue
            errors[key] = ranks.ask("error", **contender)[0]
        phases = []
        coded = {"names": [name for name in settings.formats if name != "bf16"]}
        before = ("measure", coded) if "auto" in settings.algorithms else None
        for tokens in settings.tokens:
            calls = min(_MOST_CALLS, max(1, _CALLS // (tokens * settings.width)))
            arguments = {"tokens": tokens, "calls": calls}
            phases.append(
                Phase(
                    name=f"sum of {tokens}", order="reduce", contenders=settings.contenders, arguments=arguments,
                    rounds=settings.rounds, untimed=1, before=None if phases else before,
                )
            )  # fmt: skip
        if settings.prefill:
            ranks.ask("prepare", tokens=settings.prefill, model=dataclasses.asdict(settings.model))
            names = [{"name": name} for name in settings.formats]
            for name in settings.formats:
                ranks.ask("prefill", name=name)
            before = "measure_prefill", coded
            phases.append(
                Phase(name="prefill", order="prefill", contenders=names, rounds=settings.rounds, before=before)
            )
        return phases

    for taken in take_turns("lowbit_lab.bench.tensor_parallel", settings.ranks, settings.links, prepare):
        yield rows_of(settings, taken, bits, errors)


def rows_of(
    settings: TensorParallelBenchmark,
    taken: Sequence[Taken],
    bits: Mapping[str, float],
    errors: Mapping[tuple[int, str, str], float],
) -> list[Row]:
    """Make a row for each number of ranks, link, size, format and algorithm as measured; then prefill."""
    sums, prefills = [], []
    for one in taken:
        name = one.contender["name"]
        if one.phase == "prefill":
            row = {"format": name, "algorithm": "ring" if name == "bf16" else "auto", **one.about()}
            row |= {"numel": settings.prefill * settings.model.dim, "tokens": settings.prefill}
            prefills.append(row | {"tokens_per_second": 1e3 * settings.prefill / row["ms"]})
        else:
            tokens, algorithm = int(one.phase.rpartition(" ")[2]), one.contender["algorithm"]
            numel = tokens * settings.width
            row = {"format": name, "algorithm": algorithm, **one.about(), "numel": numel, "tokens": tokens}
            choice = one.turns[-1][0].get("choice", algorithm)
            plain = choice == "plain"
            row |= {
                "choice": choice,
                "bits_per_value": bits["bf16" if plain else name],
                "wire_bits": one.bits_sent(numel),
            }
            sums.append(row | {"relative_error": errors.get((one.ranks, name, algorithm))})
    return [row | {"crossover": crossover(row, sums)} for row in sums] + prefills


def crossover(row: Row, rows: Sequence[Row]) -> int | None:
    """Return the fewest elements from which on a format is faster than PyTorch's at every measured size."""
    here = [r for r in rows if (r["ranks"], r["link"]) == (row["ranks"], row["link"])]
    base = {r["numel"]: r["ms"] for r in here if r["format"] == "bf16"}
    own = {r["numel"]: r["ms"] for r in here if (r["format"], r["algorithm"]) == (row["format"], row["algorithm"])}
    fewest = None
    for numel in sorted(own, reverse=True):
        if numel not in base or base[numel] <= own[numel]:
            break
        fewest = numel
    return fewest


def _is_sum(row: Row) -> bool:
    return not row.get("tokens_per_second")


def _finding(rows: Sequence[Row]) -> str:
    """State where the recommended format gains most."""
    best = max(rows, key=lambda row: (family(row["format"]) in RECOMMENDED, row["speedup_bf16"]))
    return (
        f"{title_of(best['format'])}: up to {best['speedup_bf16']:.1f}x as fast as PyTorch's BF16 "
        f"({best['tokens']:,} tokens, {link_name(best)})"
    )


def _name(row: Row) -> str:
    chosen = f" ({row['choice']})" if row["algorithm"] == "auto" else ""
    return f"{row['format']} {row['algorithm']}{chosen}".replace("_", "-")


def _width(row: Row) -> int:
    return row["numel"] // row["tokens"]


COMMAND = Command(
    name="bench tensor-parallel",
    summary="Tensor-parallel sums over emulated slow links, by message size.",
    examples=(
        "lowbit bench tensor-parallel --rank 2 --link 1gbit --token 1,256",
        "lowbit bench tensor-parallel --prefill 0 --json sums.json --png sums.png",
    ),
    settings=TensorParallelBenchmark,
    measure=measure,
    baselines=[
        Baseline(
            field="speedup_bf16", value="ms", to={"format": "bf16"}, way="under",
            alike=("ranks", "link", "tokens", "numel"),
        )
    ],
    tables=[
        Table(
            rows=lambda rows: list(filter(_is_sum, rows)),
            each="ranks",
            title=lambda rows: (
                f"All-reduce of partial sums, {_width(rows[0])} features a token, {rows[0]['ranks']} ranks"
            ),
            columns=[
                LINK,
                Column("tokens", "tokens", "{:,}"),
                Column("format", _name),
                Column("ms", "ms", "{:.2f}"),
                Column("±", "spread", "{:.0%}"),
                Column("over\nbf16", "speedup_bf16", "{:.2f}x"),
                Column("bits", "bits_per_value", "{:.2f}"),
                Column("faster\nfrom", lambda row: row["crossover"] and row["crossover"] // _width(row), "{:,}"),
            ],
        ),
        Table(
            rows=lambda rows: [row for row in rows if not _is_sum(row)],
            title=lambda rows: f"Prefill of {rows[0]['tokens']} tokens by a Llama with random weights",
            columns=[
                Column("ranks", "ranks"),
                LINK,
                Column("format", "format"),
                Column("ms", "ms", "{:.0f}"),
                Column("±", "spread", "{:.0%}"),
                Column("tokens/s", "tokens_per_second", "{:,.0f}"),
                Column("over\nbf16", "speedup_bf16", "{:.2f}x"),
            ],
        ),
    ],
    charts=[
        Lines(
            rows=lambda rows: [row for row in rows if _is_sum(row) and row["speedup_bf16"]],
            panel=lambda row: f"{row['ranks']} ranks · {link_name(row)}", x="tokens", y="speedup_bf16", log_x=True,
            series=lambda row: row["format"] if row["format"] == "bf16" else f"{row['format']} {row['algorithm']}",
            x_label="tokens", label="times the speed of PyTorch's BF16", title=_finding,
            subtitle="All-reduce of partial sums, by the size of the message.",
        )
    ],
)  # fmt: skip


class TensorParallelRank:
    """This rank's partial sums, and codecs that are fitted to those of all ranks."""

    def __init__(self) -> None:
        self._x = torch.empty(0)
        self._codecs: dict[str, Codec] = {}
        self._model: Any = None
        self._ids = torch.empty(0)
        self._sources: dict[str, Any] = {}
        self._auto: dict[str, SumSettings] = {}

    def open(self, tokens: int, width: int) -> dict[str, float]:
        """Make the codecs and the largest message, whose first tokens are the smaller ones; return bits by format."""
        parts = [sample(max(_FITTED, tokens), width, rank, draw=1) for rank in range(dist.get_world_size())]
        self._x = sample(tokens, width, dist.get_rank())
        self._codecs = {name: codec_of(name, parts) for name in get_args(Format) if name != "bf16"}
        return {name: c.bits_per_element((tokens, width)) for name, c in self._codecs.items()} | {"bf16": 16.0}

    def measure(self, names: list[str]) -> None:
        """Measure on the link the number of tokens from which on formats are faster than PyTorch's all-reduce."""
        for name in names:
            sample = SumSample(self._x.shape[1], self._x.dtype, self._x.device, self._codecs[name])
            self._auto[name] = measured([sample], default_group(), SumSettings(), anew=True)

    def reduce(self, name: str, algorithm: str, tokens: int, calls: int) -> dict[str, Any]:
        """Sum a message several times; return seconds and bytes of a call, and what "auto" chooses."""
        messages = [self._x[:tokens].clone() for _ in range(calls)]

        def every() -> None:
            for x in messages:
                self._sum(x, name, algorithm)

        result: dict[str, Any] = {key: value / calls for key, value in timed(every).items()}
        return result | ({"choice": self._choice(name, messages[0])} if algorithm == "auto" else {})

    def error(self, name: str, algorithm: str) -> float:
        """Return the relative error of the sum of the largest message."""
        x = self._x.clone()
        self._sum(x, name, algorithm)
        return error_of_sum(x, (sample(x.shape[0], x.shape[1], rank) for rank in range(dist.get_world_size())))

    def prepare(self, tokens: int, model: dict[str, Any]) -> None:
        """Split a model with random weights over the ranks, and calibrate its sums on the prompt that it will read."""
        sizes = ModelConfig(**model)
        vocab = vocabulary(sizes, _VOCAB)
        self._model = tensor_parallel_(build_model(sizes, vocab=vocab, sequence=tokens, seed=0).bfloat16().eval())
        self._ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
        calibration = calibrate(self._model, [self._ids], bits=None)
        self._sources = {
            "feature-int4": calibration, "feature-int4-static": calibration.select(gain="static"),
            "int4": calibration.select(k=0), "int8": codec_of("int8", []),
        }  # fmt: skip

    def measure_prefill(self, names: list[str]) -> None:
        """Measure thresholds of the model's sums on the link."""
        for name in names:
            with low_bit_(self._model, self._sources[name]) as installed:
                installed.measure()

    def prefill(self, name: str) -> dict[str, float]:
        """Run the model on its prompt."""
        with torch.inference_mode():
            if name == "bf16":  # the model adds up its partial sums by PyTorch's own all-reduce, in its dtype
                installed = Installed()
                for module in filter(is_cut_by_input, self._model.modules()):
                    installed.replace(module, partial(_summed_linear, local(module.get_parameter("weight"))))
            else:
                installed = low_bit_(self._model, self._sources[name])
            with installed:
                return timed(lambda: self._model(self._ids, use_cache=False, logits_to_keep=1))

    def _sum(self, x: Tensor, name: str, algorithm: Any) -> None:
        if name == "bf16":
            dist.all_reduce(x)
        elif algorithm == "auto":
            sum_over_ranks(x, self._codecs[name], default_group(), self._choice(name, x), self._auto[name])
        else:
            all_reduce(x, self._codecs[name], algorithm=algorithm, small=0)

    def _choice(self, name: str, x: Tensor) -> Choice:
        return self._auto[name].choice(x, dist.get_world_size(), self._codecs[name])


def _summed_linear(weight: Tensor, x: Tensor) -> Tensor:
    y = functional.linear(x, weight)
    dist.all_reduce(y)
    return y


if __name__ == "__main__":
    serve(TensorParallelRank)
