"""`python -m benchmarks.concepts`: draw the pictures of docs/concepts, light and dark.

What they show is recorded in docs/concepts/data/. To record it again, with a model of `examples/tensor-parallel.toml`
and a text that it was not trained on:

    python -m benchmarks.concepts record CHECKPOINT TEXT
    lowbit bench spectrum CHECKPOINT TEXT --direction 16,32 --bit 2,3,4,6 --codec int2,int3,int4,int6,int8,fp8,\
tah-quant,tah-quant-published --json docs/concepts/data/spectrum.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.concepts.draw import PICTURES, figure_of, themed
from benchmarks.concepts.record import record
from lowbit.report.results import Report
from lowbit.report.rows import Row
from lowbit_lab.charts.style import THEMES

PAGES = Path(__file__).parents[2] / "docs" / "concepts"
DATA, FIGURES = PAGES / "data", PAGES / "figures"


def recorded() -> Mapping[str, Sequence[Row]]:
    """The rows that the pictures show, by the name of their file."""
    return {path.stem: Report.read_json(path).rows for path in sorted(DATA.glob("*.json"))}


def draw(folder: Path = FIGURES) -> None:
    """Write every picture, NAME-light.svg and NAME-dark.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    data = recorded()
    for name in PICTURES:
        for theme in THEMES.values():
            figure = figure_of(name, theme, data)
            with themed(theme):
                figure.savefig(folder / f"{name}-{theme.name}.svg", metadata={"Date": None})


def main() -> None:
    """Draw, or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concepts", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    recording = commands.add_parser("record", help="run a model on a text and record what its boundaries carry")
    recording.add_argument("checkpoint", help="local folder with a Hugging Face checkpoint")
    recording.add_argument("text", nargs="+", help="files that it was not trained on")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.checkpoint, arguments.text, DATA / "boundaries.json")
    else:
        draw()


if __name__ == "__main__":
    main()
