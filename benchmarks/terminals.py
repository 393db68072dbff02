"""`python -m benchmarks.terminals [record]`: draw two terminals that train one model over a slow link.

Two hosts of this machine run `lowbit train`, in few bits and in FP32. What they print is drawn as it is, and kept in
docs/start/data/terminals.json, from which the pictures are drawn.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

from lowbit_lab.network import SlowLink

START = Path(__file__).parents[1] / "docs/start"
RECORDED = START / "data/terminals.json"
MBIT, STEPS = 25.0, 14
OPTIONS = (
    "--model.dim 128 --model.layers 8 --model.heads 4 --model.kv_heads 1 --model.ffn 128 "
    "--data.batch 32 --data.sequence 128 --data.max_bytes 4000000 --data.held_out_share 0 --optimizer.lr 2e-3 "
    "--pipeline.stages_per_rank 4 --pipeline.schedule Interleaved1F1B --pipeline.warmup_steps 0 "
    "--run.checkpoint_every 0 --run.no_save_model"
)
WIDTH, SIDE = 136, 58
LIGHT = TerminalTheme(
    (255, 255, 255), (36, 41, 47),
    [
        (36, 41, 47), (207, 34, 46), (17, 99, 41), (77, 45, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131),
        (110, 119, 129),
    ],
)  # fmt: skip
THEMES = {"dark": DIMMED_MONOKAI, "light": LIGHT}


def recorded(forward: str) -> dict[str, Any]:
    """Train on two hosts, and return the lines of both terminals and what the run reached."""
    with SlowLink(2, MBIT) as network, tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(2):
            words = f"train {OPTIONS} --run.steps {STEPS} --pipeline.forward {forward} --run.output {folder}/{rank}"
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": network.address(0), "MASTER_PORT": "29400", "COLUMNS": str(SIDE - 4),
                "GLOO_SOCKET_IFNAME": network.interface(rank), "LOWBIT_SECRET": "of-the-picture",
            }  # fmt: skip
            argv = ["taskset", "-c", str(rank), sys.executable, "-m", "lowbit", *words.split()]
            running.append(network.popen(rank, argv, env=environment, stdout=PIPE, stderr=STDOUT, text=True))
        texts = [process.communicate()[0] for process in running]
        if failed := [text for text, process in zip(texts, running, strict=True) if process.returncode]:
            raise RuntimeError(failed[0])
        summary = json.loads(Path(folder, "0/summary.json").read_text("utf-8"))
    return {
        "terminals": [[line for line in text.splitlines() if line.startswith("step")] for text in texts],
        "tokens_per_second": summary["tokens_per_second"], "loss": summary["loss"],
        "bits": [summary["bits_forward"], summary["bits_backward"]],
    }  # fmt: skip


def drawn(runs: dict[str, dict[str, Any]], theme: TerminalTheme) -> str:
    """Return the picture of the run in few bits, and its result next to that in FP32, as SVG."""
    few, full = runs["transform"], runs["fp32"]
    sides = []
    for rank, lines in enumerate(few["terminals"]):
        shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        command = Text(f"$ RANK={rank} lowbit train ...", style="bold")
        sides.append(Panel(Group(command, *shown), title=f"PC {'AB'[rank]}, half of the layers", width=SIDE))
    grid = Table.grid(padding=(0, 1))
    forward, backward = few["bits"]
    link = (
        f"\n\nactivations\n{forward:.1f} bits\n══════▶\n\n{MBIT:.0f} Mbit/s\n\n◀══════\n{backward:.1f} bits\ngradients"
    )
    grid.add_row(sides[0], Text(link, justify="center", style="bold blue"), sides[1])
    fast, slow = few["tokens_per_second"], full["tokens_per_second"]
    result = Text(
        f"{fast:,.0f} tokens/s over {MBIT:.0f} Mbit/s. The same run in FP32: {slow:,.0f}. "
        f"{fast / slow:.1f} times as fast.",
        style="bold",
    )  # fmt: skip
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        console = Console(record=True, width=WIDTH, file=nothing, force_terminal=True)
        console.print(grid, result)
    svg = console.export_svg(title="Two PCs, one model", theme=theme, unique_id="terminals")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts of another server


def main(words: list[str]) -> None:
    """Record, if asked to, and draw."""
    if words == ["record"]:
        runs = {name: recorded(name) for name in ("transform", "fp32")}
        RECORDED.write_text(json.dumps(runs, indent=1) + "\n", "utf-8")
    runs = json.loads(RECORDED.read_text("utf-8"))
    for name, theme in THEMES.items():
        (START / f"figures/terminals-{name}.svg").write_text(drawn(runs, theme), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
