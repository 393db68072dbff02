"""Pages about runs of `lowbit train`: one run, or several compared."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit_run.report.command import digits
from lowbit_run.report.page import Page, Part, lines, shares_part, stacks, timeline_part, try_to_write
from lowbit_run.report.run_files import RunFiles, number, read_run

PAGE = "report.html"
_HELD_OUT = ("held_out_loss_codecs", "held_out_loss")
_MACHINE = ("cpu", "gpu", "cores", "simd", "memory_gb", "system", "python", "torch", "lowbit", "date")
_SUMMARY = {  # fields of a run's summary: name in the table, format of the value, and size of its unit
    "steps_here": ("steps", "{:,.0f}", 1), "loss": ("training loss", "{:.4f}", 1),
    "held_out_loss": ("held-out loss, FP32 boundaries", "{:.4f}", 1),
    "held_out_loss_codecs": ("held-out loss, with the codecs", "{:.4f}", 1),
    "exact_match": ("exact match, FP32 boundaries", "{:.1%}", 1),
    "exact_match_codecs": ("exact match, with the codecs", "{:.1%}", 1),
    "tokens_per_second": ("tokens/s", "{:,.0f}", 1), "seconds_per_step": ("seconds per step", "{:.3f}", 1),
    "compute_seconds": ("compute, seconds per step", "{:.3f}", 1),
    "codec_seconds": ("coding, seconds per step", "{:.3f}", 1),
    "wait_seconds": ("waiting, seconds per step", "{:.3f}", 1),
    "bits_forward": ("bits per element, forward", "{:.2f}", 1),
    "bits_backward": ("bits per element, backward", "{:.2f}", 1),
    "bits_gradients": ("bits per element, gradients between pipelines", "{:.2f}", 1),
    "bytes_per_step": ("MB sent per step", "{:,.2f}", 1e6), "bytes_sent": ("MB sent", "{:,.1f}", 1e6),
    "seconds": ("seconds of all steps", "{:,.1f}", 1),
}  # fmt: skip
_AXES = {  # horizontal axes of loss curves by field: name, and units, the largest first
    "seconds": ("time", ((3600, "hours"), (60, "minutes"), (1, "seconds"))),
    "bytes_sent": ("traffic", ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))),
}
_Curve = list[tuple[float, float]]


def write_report(folder: Path) -> None:
    """Write the page of a run into its folder, or log a warning."""
    try_to_write(lambda: run_page(read_run(folder)), folder / PAGE)


def run_page(run: RunFiles) -> Page:
    """Make the page of one run."""
    return Page(
        title=f"Training run {run.folder.name}", subtitle=_subtitle(run), problems=run.problems,
        parts=[part for part in _run_parts(run) if part.rows or part.figure or part.text],
    )  # fmt: skip


def comparison_page(runs: Sequence[RunFiles], problems: Sequence[str] = ()) -> Page:
    """A page that compares runs."""
    named = dict(zip(distinct_names([run.folder for run in runs]), runs, strict=True))
    problems = [*problems, *(f"{name}: {text}" for name, run in named.items() for text in run.problems)]
    settings = {name: {key: shown(value) for key, value in run.settings.items()} for name, run in named.items()}
    parts = [*_curve_parts(named), _outcomes(named), differences(settings)]
    parts = [part for part in parts if part.rows or part.figure]
    return Page(title=f"{len(runs)} training runs", problems=problems, parts=parts)


def _run_parts(run: RunFiles) -> Iterator[Part]:
    yield from _undamaged(run, verdict)
    yield from _curve_parts({run.folder.name: run})
    yield _outcomes({run.folder.name: run})
    parts = {"compute": "compute_seconds", "coding": "codec_seconds", "waiting": "wait_seconds"}
    curves = {name: _curve(run.steps, field) for name, field in parts.items()}
    if any(curves.values()):
        figure = lines(curves, x="step", y="seconds")
        yield Part(title="Seconds of a step", text="Mean over the ranks.", figure=figure)
    if run.spans:
        yield timeline_part(run.spans)
        yield shares_part(run.spans)
    for make in (_traffic, _links, _formats, _memory, _machines):
        yield from _undamaged(run, make)
    yield Part(
        title="Settings", head=("setting", "value"), folded=True,
        rows=[(key, shown(value)) for key, value in run.settings.items()],
    )  # fmt: skip


def _undamaged(run: RunFiles, make: Callable[[RunFiles], Iterator[Part]]) -> Iterator[Part]:
    try:
        yield from make(run)
    except (LookupError, ArithmeticError, AttributeError, TypeError, ValueError) as error:  # damaged files
        what = make.__name__.strip("_")
        run.problems.append(f"The {what} of this run cannot be shown and are left out: {error!r:.200}")


def _subtitle(run: RunFiles) -> str:
    try:
        pipeline, model = run.config["pipeline"], run.config["model"]
        name = model.get("pretrained") or f"{model['family']}, {model['layers']} layers, width {model['dim']}"
        pipelines = f"{pipeline['data_parallel']} x " if pipeline.get("data_parallel", 1) > 1 else ""
        # The configured number does not count where the environment decides.
        where = f"{pipeline['schedule']} on {pipelines}{run.summary.get('ranks', pipeline['ranks'])} ranks"
        return f"{run.folder} · {name} · {where} · {shown(pipeline['forward'])}"
    except (KeyError, TypeError, AttributeError):  # a file that is missing, or that lowbit did not write
        return str(run.folder)


def _curve_parts(runs: Mapping[str, RunFiles]) -> Iterator[Part]:
    by_step = {name: _curve(run.steps, "loss") for name, run in runs.items()}
    held_out = {name: _held_out(run) for name, run in runs.items()}
    if any(by_step.values()):
        text = "Training loss; a dot is the held-out loss." if any(held_out.values()) else "Training loss."
        yield Part(
            title="Loss by step", text=text, figure=lines(by_step, x="step", y="loss, nats per token", points=held_out)
        )
    for field, (what, units) in _AXES.items() if len(runs) > 1 else ():
        sums = {}  # the loss over a cumulated field
        for name, run in runs.items():
            totals = itertools.accumulate(number(line.get(field)) or 0.0 for line in run.steps)
            losses = (number(line.get("loss")) for line in run.steps)
            sums[name] = [(total, loss) for total, loss in zip(totals, losses, strict=True) if loss is not None]
        largest = max((x for curve in sums.values() for x, _ in curve), default=0.0)
        size, unit = next(((size, unit) for size, unit in units if largest >= 2 * size), units[-1])
        curves = {name: [(x / size, loss) for x, loss in curve] for name, curve in sums.items()}
        if largest:
            yield Part(title=f"Loss by {what}", figure=lines(curves, x=f"{what}, {unit}", y="loss, nats per token"))
    speeds = {name: _curve(run.steps, "tokens_per_second") for name, run in runs.items()}
    if any(speeds.values()):
        yield Part(title="Speed", figure=lines(speeds, x="step", y="tokens per second"))


def _curve(steps: Sequence[Mapping[str, Any]], field: str) -> _Curve:
    return [(line["step"], value) for line in steps if (value := number(line.get(field))) is not None]


def _held_out(run: RunFiles) -> _Curve:
    """Return held-out losses, with the codecs if there are any."""
    curves = (_curve(run.evaluations, name) for name in _HELD_OUT)
    return next(filter(None, curves), [])


def _outcomes(runs: Mapping[str, RunFiles]) -> Part:
    """Show summaries side by side; where there is none, what the steps show."""
    outcomes = [_outcome(run) for run in runs.values()]
    rows = []
    for field, (title, form, unit) in _SUMMARY.items():
        values = [number(outcome.get(field)) for outcome in outcomes]
        if any(value is not None for value in values):
            rows.append((title, *("–" if value is None else form.format(value / unit) for value in values)))
    text = "Speed, times and bits are those of the steps after the warm-up and the last choice of formats."
    return Part(title="Outcome", text=text, head=("", *(runs if len(runs) > 1 else ["value"])), rows=rows)


def _outcome(run: RunFiles) -> dict[str, Any]:
    """The summary, or medians of the last steps of a run that did not end; with sums over all steps."""
    if not run.steps:
        return dict(run.summary)
    sums = {field: sum(number(line.get(field)) or 0.0 for line in run.steps) for field in ("bytes_sent", "seconds")}
    whole = sums | {"steps_here": len(run.steps)}  # the summary has what was done since a restart
    if run.summary:
        return dict(run.summary) | whole | {"bytes_sent": run.summary.get("bytes_sent", sums["bytes_sent"])}
    recent = run.steps[-max(10, len(run.steps) // 2) :]
    fields = ("tokens_per_second", "compute_seconds", "codec_seconds", "wait_seconds", "bits_forward", "bits_backward")
    curves = {field: _curve(recent, field) for field in fields}
    outcome: dict[str, Any] = {name: statistics.median(y for _, y in curve) for name, curve in curves.items() if curve}
    last = [loss for _, loss in _curve(run.steps[-10:], "loss")]
    return outcome | whole | {"loss": statistics.fmean(last) if last else None}


def _traffic(run: RunFiles) -> Iterator[Part]:
    in_steps = Counter[str]()
    for line in run.steps:
        in_steps.update(line.get("parts") or {})
    parts = run.summary.get("parts") or in_steps
    rows = [
        (name, f"{in_steps[name] / len(run.steps) / 1e6:,.3f}" if in_steps[name] else "–", f"{nbytes / 1e6:,.2f}")
        for name, nbytes in sorted(parts.items(), key=lambda part: -part[1]) if nbytes
    ]  # fmt: skip
    text = "Sent by all ranks, with checksums, without headers of Gloo, TCP and Ethernet." if rows else ""
    yield Part(title="Traffic by part", rows=rows, text=text, head=("part", "MB a step", "MB in all"))


def _links(run: RunFiles) -> Iterator[Part]:
    """What crossed between machines, and what the links can carry."""
    rates = {row["link"]: row.get("mbit") for row in run.ranks.get("links") or ()}  # of the start
    rates |= (run.steps[-1].get("rates") or {}) if run.steps else {}
    recent = _recent(run)
    shares = used_shares(run)
    rows = []
    for name in dict.fromkeys(key for line in recent for key in line["links"]):
        used = [(line["links"][name], line["seconds"]) for line in recent if name in line["links"]]
        nbytes = statistics.median(n for n, _ in used)
        mbit, rate = statistics.median(8 * n / s / 1e6 for n, s in used), rates.get(name)
        share = f"{shares[name]:.0%}" if name in shares else "–"
        rows.append((name, f"{nbytes / 1e6:,.3f}", f"{mbit:,.1f}", f"{rate:,.1f}" if rate else "–", share))
    trip = run.ranks.get("round_trip_seconds")
    text = "Medians of the later half of the steps; measured: the last time. Machines are named by their first ranks."
    text += f" Round trip: {1e3 * trip:.2f} ms." if trip else ""
    yield Part(
        title="Links between machines", rows=rows, text=text if rows else "",
        head=("link", "MB a step", "used Mbit/s", "measured Mbit/s", "used"),
    )  # fmt: skip
    names = dict.fromkeys(name for line in run.steps for name in line.get("links") or ())
    curves: dict[str, _Curve] = {}
    for name in names:
        sent = [(line["step"], line["links"][name], line["seconds"]) for line in run.steps if name in line["links"]]
        curves[f"{name}, used"] = [(step, 8 * nbytes / seconds / 1e6) for step, nbytes, seconds in sent]
        rates_then = [{"step": line["step"], **(line.get("rates") or {})} for line in run.steps]
        curves[f"{name}, measured"] = _curve(rates_then, name)
    yield Part(
        title="Rates of links by step",
        text="Used: averaged over the step. Measured: the last time before the step." if names else "",
        figure=lines({name: curve for name, curve in curves.items() if curve}, x="step", y="Mbit/s") if names else None,
    )  # fmt: skip


def _formats(run: RunFiles) -> Iterator[Part]:
    """Show the choices of a run with `pipeline.forward = "auto"`, the reasons, and the bits of each step."""
    rows, bits = [], {"forward": _curve(run.steps, "bits_forward"), "backward": _curve(run.steps, "bits_backward")}
    for choice in run.ranks.get("formats") or ():
        seconds = ", ".join(f"{name}: {value:.3f}" for name, value in choice["predicted"].items() if number(value))
        links = ", ".join(f"{name}: {rate:,.1f}" for name, rate in choice["mbit"].items() if rate)
        trip = choice.get("round_trip")
        rows.append((
            f"{choice['step'] + 1:,}", shown(choice["formats"]), seconds, links or "one machine",
            "–" if trip is None else f"{1e3 * trip:.2f}",
        ))  # fmt: skip
    yield Part(
        title="Formats that the run chose", rows=rows,
        figure=lines(bits, x="step", y="bits per element") if rows else None,
        text='Predicted seconds of a step with each format at all boundaries, and with "these".' if rows else "",
        head=("from step", "formats by boundary", "predicted seconds", "measured Mbit/s", "round trip, ms"),
    )  # fmt: skip


def _memory(run: RunFiles) -> Iterator[Part]:
    """Memory of ranks, stages and layers, as far as the run recorded it."""
    if not (ranks := run.ranks.get("memory")):
        return
    rows, bars, parts = [], [], {name: list[float]() for name in ("weights", "optimizer", "messages", "codec states")}
    for rank in ranks:
        stages, optimizer = rank["stages"], rank.get("optimizer")
        sums = (sum(stage[field] for stage in stages) for field in ("weights", "messages", "codec_states"))
        weights, messages, states = sums
        bars.append(f"rank {rank['rank']}")
        for part, value in zip(parts.values(), (weights, optimizer or 0, messages, states), strict=True):
            part.append(value / 1e6)
        saved, gpu, process = (rank.get(field) for field in ("saved_activations", "gpu", "process"))
        cells = (weights, optimizer, saved, messages, states, gpu, process)
        names = ", ".join(str(stage["stage"]) for stage in stages)
        rows.append((str(rank["rank"]), names, *("–" if v is None else f"{v / 1e6:,.2f}" for v in cells)))
    head = (
        "rank", "stages", "weights", "optimizer", "saved activations", "messages", "codec states", "GPU peak",
        "process peak",
    )  # fmt: skip
    yield Part(
        title="Memory by rank and stage, MB", head=head, rows=rows, figure=stacks(bars, parts, label="MB"),
        text="Saved activations are counted if they are compressed; messages: peak in the last step.",
    )  # fmt: skip
    layers = [
        (str(rank["rank"]), layer, f"{size:,.0f}")
        for rank in ranks for layer, size in (rank.get("saved_by_layer") or {}).items()
    ]  # fmt: skip
    yield Part(title="Saved activations by layer, bytes at the peak", head=("rank", "layer", "bytes"), rows=layers)


def _machines(run: RunFiles) -> Iterator[Part]:
    machines = run.ranks.get("machines") or ()
    fields = [field for field in _MACHINE if any(field in machine for machine in machines)]
    rows = [(shown(machine["ranks"]), *(shown(machine.get(field)) for field in fields)) for machine in machines]
    about = ", ".join(f"{key} {run.ranks[key]}" for key in ("device", "backend", "precision") if key in run.ranks)
    yield Part(title="Machines and versions", text=about if rows else "", head=("ranks", *fields), rows=rows)


def differences(settings: Mapping[str, Mapping[str, str]]) -> Part:
    """Make a table of the settings that differ."""
    keys = dict.fromkeys(key for stated in settings.values() for key in stated)
    values = {key: [stated.get(key, "–") for stated in settings.values()] for key in keys}
    rows = [(key, *by_run) for key, by_run in values.items() if len(set(by_run)) > 1]
    return Part(title="Settings that differ", head=("setting", *settings), rows=rows)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Make short, distinct names of paths."""
    names = [path.name or str(path) for path in paths]
    names = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def shown(value: Any) -> str:
    """Format a setting as text."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "–" if value is None or value == "" else str(value)


_WAITS = 0.3  # share of a step from which on ranks wait too much
_BUSY = 0.6  # share of a link's rate from which on it is full: a step does not send all the time
_CODES = 0.25  # share of a step from which on a cheaper format may pay


def verdict(run: RunFiles) -> Iterator[Part]:
    """Yield three sentences about a run, as far as its files show; without text if they show nothing."""
    outcome = _outcome(run)
    yield Part(title="In short", text=" ".join([*_ending(outcome), *_reason(run, outcome)]))


def _ending(outcome: Mapping[str, Any]) -> Iterator[str]:
    steps, loss = number(outcome.get("steps_here")), number(outcome.get("held_out_loss"))
    kind = "a held-out loss" if loss is not None else "a training loss"
    loss = number(outcome.get("loss")) if loss is None else loss
    if not steps or loss is None:
        return
    speed = number(outcome.get("tokens_per_second"))
    pace = f", at {speed:,.0f} tokens a second" if speed else ""
    yield f"{steps:,.0f} {'step' if steps == 1 else 'steps'} ended with {kind} of {loss:.4f} nats{pace}."


def _reason(run: RunFiles, outcome: Mapping[str, Any]) -> Iterator[str]:
    values = [number(outcome.get(f"{name}_seconds")) for name in ("compute", "codec", "wait")]
    if any(value is None for value in values) or not (whole := sum(filter(None, values))):
        return
    compute, codec, wait = (value or 0.0 for value in values)
    share = max(used_shares(run).values(), default=None)
    if wait >= _WAITS * whole:
        waited = f"Of {digits(whole)} seconds of a step, ranks waited {digits(wait)} for messages"
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
        yield f"Coding took {digits(codec)} of {digits(whole)} seconds of a step, waiting {digits(wait)}."
        yield 'A cheaper format may be faster: "tah-quant" or "int4", or pipeline.forward = "auto".'
    else:
        yield f"Computing took {digits(compute)} of {digits(whole)} seconds of a step, waiting {digits(wait)}."
        yield "The network is not what limits this run: fewer bits would gain little."


def _recent(run: RunFiles) -> list[dict[str, Any]]:
    """The later half of the steps, as far as they have links."""
    return [line for line in run.steps[-max(1, len(run.steps) // 2) :] if line.get("links")]


def used_shares(run: RunFiles) -> dict[str, float]:
    """Return the share of its measured rate that each link carried, in the median of the later half of the steps."""
    rates = {row.get("link"): row.get("mbit") for row in run.ranks.get("links") or ()}  # of the start
    recent = _recent(run)
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
