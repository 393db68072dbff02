"""`lowbit demo`: a small Llama learns Python over slow links, with PyTorch's pipeline stage and with lowbit's.

Two ranks, each on its own host (network namespaces, see `lowbit_lab.network`), run `lowbit train`'s recipe three
times on each link for the same time: with PyTorch's stage in FP32; with `LowBitStage` in FP32, which shows what its
overlap gains; and with the formats that `forward = "auto"` chooses, which shows what few bits gain.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from rich.console import Console

from lowbit_lab.bench.pipeline import PipelineBenchmark
from lowbit_lab.bench.runs import PROGRAM, curve, order, seconds_until
from lowbit_lab.bench.runs import recipe as recipe_of
from lowbit_lab.bench.settings import LINK, link_name
from lowbit_lab.bench.workers import UNLIMITED, set_link, started, step_bars
from lowbit_lab.charts import Lines
from lowbit_lab.charts.charts import draw
from lowbit_lab.network import Link, LinkUnavailable, SlowLink
from lowbit_run import terminal
from lowbit_run.report import Baseline, Column, Report, Row, Table, compare, machine
from lowbit_run.train import ConfigError, TrainConfig
from lowbit_run.train.auto import described
from lowbit_run.train.config import AUTO, OptimizerConfig
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.folder import check_output as check_run_output
from lowbit_run.train.metrics import read_metrics, read_summary
from lowbit_run.train.pretrained import load

LINKS = (Link(25.0), Link(100.0))
SECONDS = 20.0
"""Seconds of training of each run, to about half a step."""
SETTINGS = PipelineBenchmark()
BATCH, MOST_STEPS = 16, 1_000_000
FILES = ("report.json", "demo.png")


CONTESTANTS = {
    "stock-fp32": "PyTorch's stage, FP32",
    "fp32": "lowbit's stage, FP32",
    "auto": "lowbit's stage, auto",
}
"""Titles of the runs by boundary; "auto" is `pipeline.forward`."""
BASELINE = Baseline(
    field="speedup_stock_fp32", value="tokens_per_second", to={"boundary": "stock-fp32"}, alike=("link",)
)  # fmt: skip
TABLE = Table(
    title="The same time, side by side; speeds are of the median step, with auto's once it has chosen",
    gap="link",
    columns=[
        LINK,
        Column("run", "title"),
        Column("tokens/s", "tokens_per_second", "{:,.0f}"),
        Column("speed", "speedup_stock_fp32", "{:.1f}x"),
        Column("bits\nfwd/bwd", lambda row: f"{row['bits_forward']:.2g}/{row['bits_backward']:.2g}"),
        Column("steps", "steps"),
        Column("time", "seconds", "{:.0f} s"),
        Column("loss", "loss", "{:.2f}"),
    ],
)


def summed_up(rows: Sequence[Row]) -> str:
    """Say in one sentence how much faster than the first run of each link the last one is."""
    last = [row for row in rows if row["boundary"] == AUTO]
    faster = [
        f"{row['speedup_stock_fp32']:.1f} times as fast "
        + ("without a limit" if row["link_mbit"] is None else f"over {link_name(row)}")
        for row in last
    ]
    return f"lowbit trains {' and '.join(faster)}"


CHARTS = (
    Lines(
        title=summed_up, subtitle=f"A small Llama learns Python; every run takes {SECONDS:.0f} s.", series="title",
        panel=link_name, curve="curve", x_label="seconds of training", label="training loss, nats per token",
        note=lambda row: f"{row['tokens_per_second']:,.0f} tokens/s", height=3.6,
    ),
)  # fmt: skip


def run(output: Path = Path("runs/demo"), *, console: Console | None = None) -> Report:
    """Train all, compare them, and write `report.json`, `demo.png` and the runs' own folders to `output`.

    Returns:
        A report with a row for each link and run: `boundary`, `title`, the fields of `set_link`, `steps`, `seconds` (of
        training), `tokens_per_second`, `speedup_stock_fp32`, `bits_forward`, `bits_backward`, `bytes_per_step`, `loss`
        (of the last steps, on text not seen before), `formats` (chosen by auto; else empty) and `curve`.
    """
    console = console or terminal.console()
    check_output(output)
    links = choose_links(console)
    names = {(link, boundary): f"{link.title}, {title}" for link in links for boundary, title in CONTESTANTS.items()}
    rows: list[dict[str, Any]] = []
    with (
        started(PROGRAM, SETTINGS.pipeline.ranks, links) as (network, ranks),
        step_bars(dict.fromkeys(names.values(), round(SECONDS)), console) as advance,
    ):
        for link in links:
            about = set_link(network, link, ranks)
            for boundary, title in CONTESTANTS.items():
                passed = [0.0]

                def show_step(
                    metrics: Mapping[str, Any], name: str = names[link, boundary], passed: list[float] = passed
                ) -> None:
                    passed.append(metrics["passed"])
                    if whole := round(passed[-1]) - round(passed[-2]):
                        advance(name, f"loss {metrics['loss']:.2f}, {metrics['tokens_per_second']:,.0f} tok/s", whole)

                config = recipe(link, boundary, output)
                ranks.ask("train", **order(config, boundary), seconds=SECONDS, on_progress=show_step)
                rows.append({"boundary": boundary, "title": title, **about, **outcome(Path(config.run.output), passed)})
    RunFolder(output).note(*FILES)
    rows = compare(rows, [BASELINE])
    report = Report(command="demo", settings={"links": [*map(str, links)]}, machine=machine(), rows=rows)
    report.write_json(output / "report.json")
    draw(CHARTS, rows, output / "demo.png")
    console.print(TABLE.render(rows))
    console.print(*findings(rows), sep="\n", highlight=False)
    model = folder(links[-1], "auto", output) / "model"
    console.print(f"\n{names[links[-1], 'auto']} writes:")
    console.print(_written_by(model), markup=False, highlight=False, style="cyan")
    console.print(f"\nPicture: {output / 'demo.png'}\nModel: {model}", highlight=False)
    return report


def _written_by(folder: Path) -> str:
    """Return what a trained model writes after "def "."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model, _ = load(AutoModelForCausalLM, str(folder), "folder", dtype=torch.float32)
    torch.manual_seed(0)
    ids = model.generate(
        torch.tensor([tokenizer("def ")["input_ids"]]), max_new_tokens=100, do_sample=True, temperature=0.8
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def choose_links(console: Console) -> Sequence[Link]:
    """Return the slow links; if this machine does not permit any, print the reason and return an unlimited one."""
    if reason := SlowLink.available():
        console.print(
            f"{LinkUnavailable.__name__}: {reason}\nContinuing without a limit: all runs use this machine's loopback, "
            "where few bits gain nothing.",
            highlight=False,
        )
        return (UNLIMITED,)
    rates = " and ".join(link.title for link in LINKS)
    console.print(f"Two hosts on this machine, joined by {rates}. Each run takes {SECONDS:.0f} s.", highlight=False)
    return LINKS


def check_output(output: Path) -> None:
    """Check before anything starts that the chart can be drawn, and that no foreign file would be replaced."""
    importlib.import_module("matplotlib")
    if foreign := RunFolder(output).foreign(FILES):
        raise ConfigError(
            f"{output} contains {', '.join(foreign)}, which lowbit has no record of making; nothing was changed; "
            "allowed: another folder, or moving these away"
        )
    for link, boundary in product((*LINKS, UNLIMITED), CONTESTANTS):
        check_run_output(recipe(link, boundary, output))


def folder(link: Link, boundary: str, output: Path) -> Path:
    """Return the folder of one run."""
    return output / str(link) / boundary


def recipe(link: Link, boundary: str, output: Path) -> TrainConfig:
    """Return the training run of a contestant: model and pipeline of `lowbit bench pipeline`, without a warm-up.

    The learning rate stays constant after its rise, so that runs with different numbers of steps can be compared
    throughout. Batches are small, so that a step of the slowest run is a small part of its time.
    """
    return recipe_of(
        SETTINGS, boundary,
        data=replace(SETTINGS.data, batch=BATCH, max_bytes=2_000_000, held_out_share=0.0),
        optimizer=OptimizerConfig(lr=2e-3, lr_end=1.0, lr_warmup_steps=10),
        output=str(folder(link, boundary, output)), overwrite=True, steps=MOST_STEPS,
    )  # fmt: skip


def outcome(folder: Path, passed: Sequence[float]) -> dict[str, Any]:
    """Return what a run has reached, from the files that it wrote; `passed`: seconds from 0 to the end of each step."""
    summary, metrics = read_summary(folder / "summary.json"), read_metrics(folder / "metrics.jsonl")
    names = "steps tokens_per_second bits_forward bits_backward bytes_per_step"
    row: dict[str, Any] = {"seconds": passed[-1]} | {name: getattr(summary, name) for name in names.split()}
    lasted = [after - before for before, after in pairwise(passed)]
    points = curve([{"loss": step["loss"], "seconds": own} for step, own in zip(metrics, lasted, strict=True)])
    formats = summary.formats[-1]["formats"] if summary.formats else []
    return row | {"formats": formats, "loss": points[-1][1], "curve": points}


def findings(rows: Sequence[Row]) -> list[str]:
    """Describe what lowbit gains on each link, what of it its stage gains alone, and what auto chose."""
    lines = [f"{summed_up(rows)} as PyTorch's stage in FP32."]
    for row in rows:
        if row["boundary"] != AUTO:
            continue
        stock, full = (one for one in rows if one["link"] == row["link"] and one is not row)
        sooner = seconds_until(row["curve"], stock["curve"][-1][1])
        when = f"; the loss at which PyTorch's stage ends is reached after {sooner:.0f} s" if sooner else ""
        lines.append(
            f"{link_name(row)}: auto chose {described(row['formats'])}. lowbit's stage alone, in FP32, is "
            f"{full['speedup_stock_fp32']:.1f} times as fast, few bits make it {row['speedup_stock_fp32']:.1f}{when}."
        )
    return [*lines, "No run has a warm-up. `lowbit train` from scratch has one: few bits cost most in the first steps."]
