"""Print a training summary."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from lowbit.terminal import console

if TYPE_CHECKING:
    from lowbit.train import Summary


def show_summary(summary: Summary) -> None:
    """Print the outcome of a training run; under torchrun, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print_pairs(_lines(summary))


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in pairs:
        table.add_row(name, value)
    console().print(table)


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.loss is not None:
        yield "training loss", f"{summary.loss:.4f} (mean of the last steps)"
    if summary.held_out_loss is not None:
        yield "held-out loss", f"{summary.held_out_loss:.4f}"
    if summary.exact_match is not None:
        before = "" if summary.exact_match_before is None else f", {summary.exact_match_before:.1%} before training"
        yield "exact match", f"{summary.exact_match:.1%}{before}"
    if summary.tokens_per_second is not None:
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s"
    if summary.bits_forward is not None and summary.bits_backward is not None:
        yield "bits per element", f"{summary.bits_forward:.2f} forward, {summary.bits_backward:.2f} backward"
    if summary.bits_gradients is not None:
        yield "gradients", f"{summary.bits_gradients:.2f} bits per element between pipelines"
    if summary.bytes_sent:
        sent, saved = summary.bytes_sent / 1e6, summary.bytes_saved / 1e6
        yield "traffic", f"{sent:,.1f} MB sent, {saved:,.1f} MB less than in float32"
        parts = sorted(summary.parts.items(), key=lambda part: -part[1])
        yield "of that", ", ".join(f"{name} {nbytes / 1e6:,.1f}" for name, nbytes in parts)
    if summary.model is not None:
        yield "model", summary.model
