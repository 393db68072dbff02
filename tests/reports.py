"""Pages of `lowbit report` in a real browser: `make reports-browser`, or `python -m tests.reports --shots FOLDER`.

The pages are made of a run with a trace, of two runs, of a run that did not end, and of a benchmark's results, some
with hostile names. At the width of a phone and of a desk, in light and in dark: nothing sticks out, no script fails,
nothing is asked of the network, and the figures are drawn. Without chromium it ends with one line that says so.
"""

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from lowbit_run.cli.commands import write
from tests.browser import chromium, faults, tell

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
SHOWN = {scheme: f"document.body.dataset.drawn == '{scheme}'" for scheme in ("light", "dark")}
UNDRAWN = (
    """() => [...document.querySelectorAll(".figure")].filter(e => !e.querySelector("svg.main-svg")).map(e => e.id)"""
)


def make_run(folder: Path, *, steps: int = 40, ended: bool = True, text: str = "text.txt", ranks: int = 2) -> Path:
    """A folder as `lowbit train` leaves it, with made-up numbers."""
    (folder / "trace").mkdir(parents=True)
    model, pipeline = {"family": "llama", "layers": 4, "dim": 64}, {"forward": ["transform"]}
    config = {"model": model, "data": {"text": [text]}, "pipeline": pipeline | {"ranks": ranks, "schedule": "1F1B"}}
    (folder / "config.json").write_text(json.dumps(config | {"run": {"steps": 40, "seed": len(folder.name)}}))
    lines = [
        {
            "step": i, "loss": 5 - i / 20, "tokens": 512, "tokens_per_second": 3000.0 + i, "bits_forward": 3.52,
            "bits_backward": 2.4, "bytes_sent": 50_000, "seconds": 0.2, "compute_seconds": 0.1, "codec_seconds": 0.05,
            "wait_seconds": 0.05, "links": {"0 to 1": 25_000, "1 to 0": 25_000}, "waiting": {"0": 0.04, "1": 0.06},
            "parts": {"boundaries": 49_000, "coordination": 1000}, "rates": {"0 to 1": 100.0 if i <= 20 else 10.0},
        }
        for i in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "evaluations.jsonl").write_text(json.dumps({"step": 20, "held_out_loss": 4.125}) + "\n")
    if ended:
        summary = {
            "steps": 40,
            "steps_here": steps,
            "loss": 3.125,
            "tokens_per_second": 3020.0,
            "held_out_loss": 3.0625,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    machine = {"cpu": "A processor", "cores": 2, "torch": "2.13.0", "lowbit": "0.1.0", "python": "3.11.7"}
    memory = [
        {
            "rank": rank, "optimizer": 4_000_000, "process": 900_000_000, "saved_activations": None,
            "stages": [{"stage": rank, "weights": 2_000_000, "messages": 100_000, "codec_states": 0}],
            "saved_by_layer": {"layer 0": 1000},
        }
        for rank in range(ranks)
    ]  # fmt: skip
    about = {
        "machines": [{"machine": rank, "ranks": [rank], **machine} for rank in range(ranks)], "memory": memory,
        "links": [{"link": "0 to 1", "mbit": 100.0}, {"link": "1 to 0", "mbit": None}], "round_trip_seconds": 0.04,
        "device": "cpu", "backend": "gloo", "precision": "fp32",
    }  # fmt: skip
    (folder / "ranks.json").write_text(json.dumps(about))
    (folder / "trace" / "all-ranks.json.gz").write_bytes(gzip.compress(json.dumps(make_trace(ranks)).encode()))
    return folder


def make_trace(ranks: int) -> dict[str, Any]:
    """Two steps of 1000 microseconds; on each rank 300 forward, of which 100 waiting, then 200 backward."""
    events = []
    for rank in range(ranks):
        for step in (3, 4):
            begin = 1000.0 * step
            for name, cat, tid, at, dur, args in (
                ("step", "rest", 0, 0, 1000, {"step": step}), ("pipeline", "rest", 0, 10, 800, {}),
                ("forward", "compute", 0, 20, 300, {"micro_batch": 0, "stage": rank}),
                ("wait", "waiting", 0, 20, 100, {"message": HOSTILE}),
                ("backward", "compute", 0, 400, 200, {"micro_batch": 0, "stage": rank}),
                ("send", "sending", 2 - rank, 330, 60, {"bytes": 400}),
            ):  # fmt: skip
                events.append({
                    "ph": "X", "name": name, "cat": cat, "pid": rank, "tid": tid, "ts": begin + at, "dur": dur,
                    "args": args,
                })  # fmt: skip
    return {"traceEvents": events}


def make_results(file: Path) -> Path:
    """Results as `lowbit bench pipeline --json` writes them."""
    rows = [
        {
            "boundary": name, "split": "1F1B/1/4", "link": link, "link_mbit": mbit, "link_rtt_ms": 0.0,
            **dict.fromkeys(("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"), speed * mbit),
            "seconds_per_step": 1.0, "bytes_per_step": 1_000_000, "bits_forward": 4.0, "bits_backward": 4.0,
            "compute_seconds": 0.5, "codec_seconds": 0.1, "wait_seconds": 0.4, "checksum_seconds": 0.0, "loss": 3.0,
            "steps": 6, "evaluation_seconds": None, "state_bytes": 0, "speedup_fp32": speed / 10,
            "speedup_stock_fp32": None, "speedup_best_stock_fp32": None, "share_of_unlimited": None,
        }
        for link, mbit in (("25mbit", 25.0), ("100mbit", 100.0))
        for name, speed in (("fp32", 10.0), ("transform", 80.0))
    ]  # fmt: skip
    machine = {"cpu": "A processor", "torch": "2.13.0", "lowbit": "0.1.0"}
    settings = {"links": ["25mbit", "100mbit"], "seed": 0}
    file.write_text(json.dumps({"command": "bench pipeline", "settings": settings, "machine": machine, "rows": rows}))
    return file


def pages(folder: Path) -> list[Path]:
    """A page of each kind."""
    one = make_run(folder / "one", text=HOSTILE)
    two = make_run(folder / HOSTILE.replace("/", ""), steps=17, ended=False)
    results = make_results(folder / "speed.json")
    return [
        write([one]), write([two]), write([one, two], folder / "comparison.html"), write([results]),
    ]  # fmt: skip


def main() -> None:
    """Make the pages and open each; exit with 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="Folder for pictures of each page.")
    parser.add_argument("--page", type=Path, action="append", default=[], help="Another page to check.")
    options = parser.parse_args()
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for path in [*pages(Path(folder)), *(path.resolve() for path in options.page)]:
            name = "".join(c if c.isalnum() else "-" for c in f"{path.parent.name[:12]}-{path.stem}")
            shot = options.shots and options.shots / name
            # Plotly takes a new width a little later.
            found[name] = faults(browser, path.as_uri(), path.as_uri(), SHOWN, UNDRAWN, shot=shot, settle=500)
    tell(found)


if __name__ == "__main__":
    main()
