"""`python -m benchmarks reduce`: sums over torchft's own group behind slow links, by format.

torchft's `ProcessGroupGloo` sums in FP32 by Gloo's ring. The others sum on the same group, as `LowBitManager` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import AllreduceOptions  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.elastic import TORCHFT
from lowbit.collectives import all_reduce
from lowbit.config import ConfigError, Positive, section
from lowbit.integrations.engine import engine
from lowbit.ranks.groups import default_group
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit_lab.bench.gradients import MATRIX, codec_of
from lowbit_lab.bench.gradients_rank import sample
from lowbit_lab.bench.settings import LINK, EachOnce, Links, Names
from lowbit_lab.bench.sums import Phase, Taken, take_turns, timed
from lowbit_lab.bench.worker import serve
from lowbit_lab.bench.workers import Workers
from lowbit_lab.network import Link

OWN = "torchft-fp32"
ERRORS = "+errors"


@section()
class ReduceBenchmark:
    """Formats, links and numbers of ranks."""

    links: Links = (Link(1000.0),)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=2)], ...], EachOnce] = (4,)
    """Numbers of ranks, each on a host of its own."""
    formats: Names = (OWN, "int8", "int4", "int4+errors")
    """torchft-fp32: torchft's own sum. int8 and int4: symmetric, in groups of 128 and 64. Others: codecs, by name or in
    full. +errors behind one: with its quantization errors, as error feedback needs them."""
    numel: Positive = 16 << 20
    """Float32 elements of the tensor, a multiple of 1024."""
    rounds: Positive = 7
    """Turns of each format."""

    def __post_init__(self) -> None:
        if self.numel % MATRIX:
            raise ConfigError(f"numel is {self.numel}; allowed: multiples of {MATRIX}")
        for name in set(self.formats) - {OWN}:
            codec_of(name.removesuffix(ERRORS))


def measure(settings: ReduceBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Sum in every format on every link with every number of ranks, in turns.

    Yields:
        Rows, one for each number of ranks, link and format: `format`, the fields of `set_link`, `ranks`, `ms` (median
        over the rounds of the slowest rank's time), `ms_low`, `ms_high`, `spread` (interquartile range over median),
        `rounds`, `wire_bits` (bytes that really left a rank, headers included, over those elements that an all-reduce
        has to send), `speedup` (of the medians, over torchft's own).

    Raises:
        EngineError: torchft is not installed.
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    engine("torchft.process_group", **TORCHFT)

    def prepare(ranks: Workers, count: int) -> list[Phase]:
        ranks.ask("open", numel=settings.numel)
        every = [{"name": name} for name in settings.formats]
        return [Phase(name="sum", order="sum", contenders=every, rounds=settings.rounds, untimed=2)]

    for taken in take_turns("benchmarks.reduce", settings.ranks, settings.links, prepare):
        yield [_row(one, settings.numel) for one in taken]


def _row(one: Taken, numel: int) -> dict[str, Any]:
    return {"format": one.contender["name"], **one.about(), "numel": numel, "wire_bits": one.bits_sent(numel)}


class Rank:
    """This rank's tensor, and torchft's group."""

    def open(self, numel: int) -> None:
        """Make the tensor, and connect."""
        groups: Any = engine("torchft.process_group", **TORCHFT)
        self._x, self._errors = sample(numel, dist.get_rank()), torch.zeros(numel)
        self._group = groups.ProcessGroupGloo()
        # Not by its `reconfigure`, whose store is under the host's name, which the hosts of a slow link do not have.
        store = PrefixStore("torchft", default_group().get_group_store())
        self._group._pg = self._group._create_pg(store, dist.get_rank(), dist.get_world_size())

    def sum(self, name: str) -> dict[str, float]:
        """Sum once."""
        x = self._x.clone()
        if name == OWN:
            return timed(lambda: self._group.allreduce([x], AllreduceOptions()).wait())
        codec, errors = codec_of(name.removesuffix(ERRORS)), self._errors if name.endswith(ERRORS) else None
        return timed(lambda: all_reduce(x, codec, self._group, errors=errors))


COMMAND = Command(
    name="benchmarks reduce",
    summary="Sums over torchft's own group behind slow links, by format.",
    examples=("python -m benchmarks reduce --link 1gbit --json reduce.json",),
    settings=ReduceBenchmark,
    measure=measure,
    baselines=[Baseline(field="speedup", value="ms", to={"format": OWN}, alike=("ranks", "link"), way="under")],
    tables=[
        Table(
            title=lambda rows: f"Sums of {rows[0]['numel'] * 4 / 2**20:.0f} MB on torchft's group",
            columns=[
                Column("ranks", "ranks"),
                LINK,
                Column("format", "format"),
                Column("ms", "ms", "{:.0f}"),
                Column("±", "spread", "{:.0%}"),
                Column("over\ntorchft", "speedup", "{:.2f}x"),
                Column("bits\nsent", "wire_bits", "{:.2f}"),
            ],
        )
    ],
)  # fmt: skip


if __name__ == "__main__":
    serve(Rank)
