"""`python -m benchmarks parallel`: bytes kept for backward and errors of gradients when a model is cut over ranks.

Each layout trains one step of a Llama in float32 on loopback. Beside its bytes and errors are those of one process with
the same data and settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from benchmarks.parallel_rank import Layout, Sizes
from lowbit.config import ConfigError, Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit_lab.bench.settings import EachOnce
from lowbit_lab.bench.workers import Workers

LAYOUTS = {
    "one": Layout(),
    "tensor": Layout(tensor=2),
    "sequence": Layout(tensor=2, sequence=True),
    "zero": Layout(data=2, zero=True),
    "three": Layout(pipeline=2, tensor=2, data=2, sequence=True),
}
NAMES = {
    "one": "one process",
    "tensor": "TP",
    "sequence": "TP, SP",
    "zero": "DP, ZeRO-1",
    "three": "PP, TP, SP, DP",
}


@section()
class ParallelBenchmark:
    """Layouts and a model."""

    layouts: Annotated[tuple[Literal["one", "tensor", "sequence", "zero", "three"], ...], EachOnce] = tuple(LAYOUTS)  # pyright: ignore
    """How the model is cut: in two along one dimension, or along three. With several replicas (zero, three) gradients
    are stored in FP8 and averaged by an 8-bit all-reduce; zero: each has half of the optimizer's states."""
    policies: Annotated[tuple[Literal["ours", "published"], ...], EachOnce] = ("ours", "published")
    """ours: LayerAware(). published: LayerAware.published(), AGoQ's."""
    dim: Positive = 128
    """Channels."""
    inner: Positive = 352
    """Channels of the feed-forward."""
    layers: Positive = 4
    """Layers of the model."""
    length: Positive = 128
    """Tokens of a sequence; each replica has two micro-batches of two."""

    def __post_init__(self) -> None:
        for name in ("layers", "length"):
            if getattr(self, name) % 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: multiples of 2")


def measure(settings: ParallelBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield a row for each layout and policy.

    `plain_bytes` and `kept_bytes`: activations that PyTorch and we keep on the rank that keeps most, without the loss;
    `kept` and, of one process, `kept_alone`: their ratio. `error`: relative, of all gradients of the rank where it is
    furthest from `error_alone`, that of one process. `gradient_bytes`, `state_bytes` (AdamW's): the most of any rank.

    Raises:
        ChildProcessError: a rank failed.
    """
    sizes = dataclasses.asdict(
        Sizes(dim=settings.dim, inner=settings.inner, layers=settings.layers, length=settings.length)
    )
    rows: list[Row] = []
    for name in settings.layouts:
        layout = dataclasses.asdict(LAYOUTS[name])
        with Workers("benchmarks.parallel_rank", LAYOUTS[name].ranks, grouped=True) as ranks:
            plain = ranks.ask("measure", sizes=sizes, layout=layout, policy="none")
            for policy in settings.policies:
                found = ranks.ask("measure", sizes=sizes, layout=layout, policy=policy)
                rows.append({"layout": name, "policy": policy, "ranks": LAYOUTS[name].ranks, **_row(plain, found)})
                yield rows


def _row(plain: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    most = max(range(len(plain)), key=lambda rank: plain[rank]["kept_bytes"])
    worst = max(found, key=lambda row: row["error"] / row["error_alone"])
    return {
        "plain_bytes": plain[most]["kept_bytes"],
        "kept_bytes": found[most]["kept_bytes"],
        "kept": found[most]["kept_bytes"] / plain[most]["kept_bytes"],
        "kept_alone": found[most]["kept_alone"] / plain[most]["kept_alone"],
        "error": worst["error"],
        "error_alone": worst["error_alone"],
        "gradient_bytes": max(row["gradient_bytes"] for row in found),
        "state_bytes": max(row["state_bytes"] for row in found),
    }


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


COMMAND = Command(
    name="parallel",
    summary="Bytes kept for backward and errors of gradients of a model that is cut over ranks.",
    examples=("python -m benchmarks parallel --layout tensor,sequence --policy published",),
    settings=ParallelBenchmark,
    measure=measure,
    tables=[
        Table(
            title="Kept for backward, and the error of gradients",
            gap="layout",
            columns=[
                Column("layout", "layout", lambda name: NAMES[name]),
                Column("policy", "policy"),
                Column("ranks", "ranks"),
                Column("plain\nMB", "plain_bytes", _megabytes),
                Column("kept\nMB", "kept_bytes", _megabytes),
                Column("share", "kept", "{:.1%}"),
                Column("share\nalone", "kept_alone", "{:.1%}"),
                Column("error", "error", "{:.4f}"),
                Column("error\nalone", "error_alone", "{:.4f}"),
                Column("gradients\nMB", "gradient_bytes", _megabytes),
                Column("AdamW\nMB", "state_bytes", _megabytes),
            ],
        )
    ],
    charts=[],
)
