"""The first lines of a run's page: how it ended, what took its time, and what to try next."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from lowbit.report.page import Part
from lowbit.report.page.run import RunFiles, number

_WAITS = 0.3  # share of a step from which on ranks wait too much
_BUSY = 0.6  # share of a link's rate from which on it is full: a step does not send all the time
_CODES = 0.25  # share of a step from which on a cheaper format may pay


def verdict(run: RunFiles, outcome: Mapping[str, Any]) -> Part:
    """Return three sentences about a run, as far as its files tell; without text if they tell nothing."""
    return Part(title="In short", text=" ".join([*_ending(outcome), *_reason(run, outcome)]))


def _ending(outcome: Mapping[str, Any]) -> Iterator[str]:
    steps, loss = number(outcome.get("steps_here")), number(outcome.get("held_out_loss"))
    kind = "a held-out loss" if loss is not None else "a training loss"
    loss = number(outcome.get("loss")) if loss is None else loss
    if not steps or loss is None:
        return
    speed = number(outcome.get("tokens_per_second"))
    at = f", at {speed:,.0f} tokens a second" if speed else ""
    yield f"{steps:,.0f} steps ended with {kind} of {loss:.4f} nats{at}."


def _reason(run: RunFiles, outcome: Mapping[str, Any]) -> Iterator[str]:
    values = [number(outcome.get(f"{name}_seconds")) for name in ("compute", "codec", "wait")]
    if any(value is None for value in values) or not (whole := sum(filter(None, values))):
        return
    compute, codec, wait = (value or 0.0 for value in values)
    share = max(used_shares(run).values(), default=None)
    if wait >= _WAITS * whole:
        waited = f"Of {whole:.2g} seconds of a step, ranks waited {wait:.2g} for messages"
        if share is None:
            yield f"{waited}, or for each other: other schedules and splits may wait less (lowbit plan pipeline)."
        elif share >= _BUSY:
            yield f"{waited}: the busiest link carried {share:.0%} of its rate."
            yield 'Fewer bits pay here: pipeline.forward = "auto" or "transform".'
        else:
            yield f"{waited}, though the busiest link carried only {share:.0%} of its rate."
            yield (
                "Round trips or uneven stages cost that time, not bits: try more micro-batches, one stage a rank, "
                "and the split of lowbit plan pipeline."
            )
    elif codec >= _CODES * whole:
        yield f"Coding took {codec:.2g} of {whole:.2g} seconds of a step, waiting {wait:.2g}."
        yield 'A cheaper format may be faster: "tah-quant" or "int4", or pipeline.forward = "auto".'
    else:
        yield f"Computing took {compute:.2g} of {whole:.2g} seconds of a step, waiting {wait:.2g}."
        yield "The network is not what limits this run: more bits would cost little time, fewer would gain little."


def used_shares(run: RunFiles) -> dict[str, float]:
    """Return the share of its measured rate that each link carried, in the median of the later half of the steps."""
    rates = {row.get("link"): row.get("mbit") for row in run.ranks.get("links") or ()}  # of the start
    recent = [line for line in run.steps[-max(1, len(run.steps) // 2) :] if line.get("links")]
    shares: dict[str, float] = {}
    for name in dict.fromkeys(key for line in recent for key in line["links"]):
        used = [
            8 * line["links"][name] / line["seconds"] / 1e6 / rate
            for line in recent
            if name in line["links"] and (rate := number((line.get("rates") or rates).get(name)))
        ]
        if used:
            shares[name] = statistics.median(used)
    return shares
