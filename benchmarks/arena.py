"""`python -m benchmarks arena`: predicted seconds of a step under the rules of the Protocol NanoGPT speedrun.

The rules and the two published entries are those of https://github.com/PluralisResearch/ProtocolNanoGPT at 0551bc3: a
GPT of 203.8 million parameters and width 1024, 8 stages, 512 windows of 1024 tokens a step. Each stage receives over
one link of 200 Mbit/s, which serves both neighbours and which a message occupies for 50 ms longer than its bytes take.
Score: steps to a held-out loss of 3.276, times seconds of a step. Nothing here measures the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from lowbit.codecs import parse_pair
from lowbit.codecs.names import pair_name
from lowbit.config import Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit.simulate import Channel, Network, StageTimes, actions, simulate
from lowbit_lab.bench.settings import Names

_STAGES, _WINDOWS, _SEQUENCE, _WIDTH = 8, 512, 1024, 1024
_BYTES_PER_SECOND, _LATENCY = 25e6, 0.05
_STAMP_BYTES = 8  # the sender's clock, with every message


@dataclass(frozen=True)
class Entry:
    """A published entry.

    Args:
        token_bytes: of a token, each way. rows: windows of a micro-batch.
        fast: seconds of a step without the slow links. slow: with them. steps: to the loss.
    """

    token_bytes: int
    rows: int
    fast: float
    slow: float
    steps: int

    @property
    def pass_seconds(self) -> float:
        """Seconds of a micro-batch's forward and backward on a stage."""
        return self.fast / (_WINDOWS // self.rows + _STAGES - 1)


ENTRIES = {
    "dense": Entry(2048, 8, 0.5385, 100.475, 2925),
    "ReparamSSN": Entry(322, 16, 0.6550, 19.889, 9125),
}
"""From the records of 2026-09-17 and 2026-09-18: the median `step_avg` of the loss run, and that of the timing run."""


@section()
class ArenaSettings:
    """What to predict beside the published entries."""

    boundaries: Names = (
        "bf16", "tah-quant-published", "tah-quant", "int4", "subspace", "transform",
        "TransformQuant(bits=2) / TransformQuant(bits=1.5, step='message')",
    )  # fmt: skip
    """Formats of activations, or of both ways."""
    rows: tuple[Positive, ...] = (4, 8, 16, 32, 64)
    """Windows of a micro-batch to choose among; the fastest is shown."""
    coding_gb_s: Annotated[float, Field(gt=0)] = 100.0
    """Speed of encoding and of decoding, in 10^9 bytes of float32 a second. Not measured: it is a setting."""


def step_seconds(forward_bytes: int, backward_bytes: int, rows: int, passing: float, coding: float = 0.0) -> float:
    """Seconds of a step.

    Args:
        forward_bytes, backward_bytes: of a message. rows: windows of a micro-batch. passing: seconds of its forward and
            backward on a stage. coding: seconds of encoding a message, and of decoding one.
    """
    order = actions("1F1B", ranks=_STAGES, microbatches=_WINDOWS // rows)
    longer = _STAMP_BYTES + round(_LATENCY * _BYTES_PER_SECOND)  # the latency occupies the link
    stage = StageTimes(
        forward=passing / 3, backward=2 * passing / 3, encode_forward=coding, decode_forward=coding,
        encode_backward=coding, decode_backward=coding, forward_bytes=forward_bytes + longer,
        backward_bytes=backward_bytes + longer,
    )  # fmt: skip
    into = [Channel(bytes_per_second=_BYTES_PER_SECOND)] * _STAGES
    routes = {(a, b): b for a in range(_STAGES) for b in range(_STAGES) if a != b}
    return simulate(order, [stage] * _STAGES, Network(channels=into, routes=routes)).seconds


def measure(settings: ArenaSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Predict the published entries and every format.

    Yields:
        Rows: `boundary`, `rows` (windows of a micro-batch), `forward`, `backward` (bits per element), `seconds`,
        `published` (seconds; None), `steps` (the published entry's; of a format, those of the dense one), `score`.
    """
    rows: list[dict[str, Any]] = []
    for name, entry in ENTRIES.items():
        nbytes = entry.token_bytes * entry.rows * _SEQUENCE
        bits = 8 * entry.token_bytes / _WIDTH
        seconds = step_seconds(nbytes, nbytes, entry.rows, entry.pass_seconds)
        rows.append(_row(f"{name}, published", entry.rows, bits, bits, seconds, entry.steps, entry.slow))
    dense = ENTRIES["dense"]
    for boundary in settings.boundaries:
        options = []
        for count in settings.rows:
            shape = (count, _SEQUENCE, _WIDTH)
            forward, backward = parse_pair(boundary)
            coding = 4.0 * count * _SEQUENCE * _WIDTH / (1e9 * settings.coding_gb_s)
            seconds = step_seconds(
                forward.nbytes(shape), backward.nbytes(shape), count, dense.pass_seconds * count / dense.rows,
                0.0 if boundary == "bf16" else coding,
            )  # fmt: skip
            bits = forward.bits_per_element(shape), backward.bits_per_element(shape)
            options.append(_row(boundary, count, *bits, seconds, dense.steps, None))
        rows.append(min(options, key=lambda row: row["seconds"]))
    yield rows


def _row(
    boundary: str, rows: int, forward: float, backward: float, seconds: float, steps: int, published: float | None
) -> dict[str, Any]:
    return {
        "boundary": boundary, "rows": rows, "forward": forward, "backward": backward, "seconds": seconds,
        "published": published, "steps": steps, "score": steps * seconds,
    }  # fmt: skip


def _title(rows: Sequence[Row]) -> str:
    errors = [f"{row['seconds'] / row['published'] - 1:+.1%}" for row in rows if row["published"]]
    return f"Predicted seconds of a step by the rules of the speedrun; published entries off by {', '.join(errors)}"


COMMAND = Command(
    name="arena",
    summary="Predicted seconds of a step under the rules of the Protocol NanoGPT speedrun.",
    examples=(
        "python -m benchmarks arena --json arena.json",
        "python -m benchmarks arena --boundary transform --row 8",
    ),
    settings=ArenaSettings,
    measure=measure,
    tables=(
        Table(
            title=_title,
            columns=(
                Column("", lambda row: row["boundary"] if row["published"] else pair_name(row["boundary"])),
                Column("windows of a\nmicro-batch", "rows"),
                Column("bits\nforward", "forward", "{:.2f}"),
                Column("bits\nback", "backward", "{:.2f}"),
                Column("a step", "seconds", "{:.2f} s"),
                Column("published", "published", "{:.2f} s"),
                Column("steps", "steps", "{:,}"),
                Column("score", "score", "{:,.0f} s"),
            ),
        ),
    ),
    charts=(),
)
