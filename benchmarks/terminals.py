"""`python -m benchmarks.terminals FILE`: record two terminals that train one model over a slow link.

Two hosts of this machine run `lowbit train`, in few bits and in FP32. What they print is drawn as it is.
"""

import argparse
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
from lowbit_run.report import Report, Row, machine

MBIT, STEPS, FP32_STEPS = 25.0, 14, 6
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


def recorded(boundary: str, steps: int) -> dict[str, Any]:
    """Train on two hosts, and return the lines of both terminals and what the run reached."""
    with SlowLink(2, MBIT) as network, tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(2):
            words = f"train {OPTIONS} --run.steps {steps} --pipeline.forward {boundary} --run.output {folder}/{rank}"
            own = {"COLUMNS": str(SIDE - 4), "LOWBIT_SECRET": "of-the-picture"}
            environment = os.environ | network.environment(rank) | own
            cores = sorted(os.sched_getaffinity(0))
            argv = ["taskset", "-c", str(cores[rank % len(cores)]), sys.executable, "-m", "lowbit", *words.split()]
            running.append(network.popen(rank, argv, env=environment, stdout=PIPE, stderr=STDOUT, text=True))
        texts = [process.communicate()[0] for process in running]
        if failed := [text for text, process in zip(texts, running, strict=True) if process.returncode]:
            raise ChildProcessError(failed[0])
        summary = json.loads(Path(folder, "0/summary.json").read_text("utf-8"))
    names = ("tokens_per_second", "bits_forward", "bits_backward")
    lines = [[line for line in text.splitlines() if line.startswith("step")] for text in texts]
    return {"boundary": boundary, "terminals": lines, **{name: summary[name] for name in names}}


def drawn(few: Row, full: Row, theme: TerminalTheme) -> str:
    """Return the picture of the run in few bits, and its result next to that in FP32, as SVG."""
    sides = []
    for rank, lines in enumerate(few["terminals"]):
        shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines if " held-out " not in line]
        command = Text(f"$ RANK={rank} lowbit train ...", style="bold")
        sides.append(Panel(Group(command, *shown), title=f"PC {'AB'[rank]}, half of the layers", width=SIDE))
    grid = Table.grid(padding=(0, 1))
    link = (
        f"\n\nactivations\n{few['bits_forward']:.1f} bits\n══════▶\n\n{MBIT:.0f} Mbit/s\n\n◀══════\n"
        f"{few['bits_backward']:.1f} bits\ngradients"
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


def draw(record: Path, folder: Path) -> list[Path]:
    """Draw a record in both themes into a folder; return the files."""
    few, full = Report.read_json(record).rows
    files = {folder / f"terminals-{name}.svg": theme for name, theme in THEMES.items()}
    for file, theme in files.items():
        file.write_text(drawn(few, full, theme), "utf-8")
    return list(files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="record to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps in few bits")
    parser.add_argument("--fp32-steps", type=int, default=FP32_STEPS, help="steps in FP32")
    given = parser.parse_args()
    rows = [recorded("transform", given.steps), recorded("fp32", given.fp32_steps)]
    settings = {"link": f"{MBIT:.0f}mbit", "options": OPTIONS}
    Report(command="benchmarks terminals", settings=settings, machine=machine(), rows=rows).write_json(given.file)
