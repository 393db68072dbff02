"""`python -m benchmarks.concepts`: draw the pictures of docs/concepts, light and dark.

Their data is recorded in docs/concepts/data/. To record it again, with a model of `examples/tensor-parallel.toml` and a
text that it was not trained on:

    python -m benchmarks.concepts record CHECKPOINT TEXT
    lowbit bench spectrum CHECKPOINT TEXT --codec int2,int3,int4,int6,int8,fp8,tah-quant,tah-quant-published \
        --json docs/concepts/data/spectrum.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.concepts.draw import PICTURES, figure_of, themed
from lowbit.report.command import Report, Row, machine
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import load_data
from lowbit.train.model import build_model, vocabulary
from lowbit_lab.bench.samples import capture
from lowbit_lab.bench.spectrum import outside
from lowbit_lab.bench.training import spread_evenly
from lowbit_lab.charts.style import THEMES

PAGES = Path(__file__).parents[2] / "docs" / "concepts"
DATA, FIGURES = PAGES / "data", PAGES / "figures"
STAGES, SEQUENCE, BATCH = 4, 256, 4
TOKEN = 100
"""The token of the first window whose channels are shown."""
KEPT = 128
"""Most directions for which the energy outside is recorded."""


def recorded() -> Mapping[str, Sequence[Row]]:
    """Return the rows that the pictures show, by the name of their file."""
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


def record(checkpoint: str, text: Sequence[str], path: Path) -> None:
    """Run a model on one message of a text, and record the tensors at its boundaries.

    Args:
        checkpoint: local folder with a Hugging Face checkpoint.
        text: files that it was not trained on.
        path: of the JSON file. Rows have `boundary`, `direction` and `outside`: the share of energy that the best k
            directions leave out, for k from 0 to `KEPT`. The forward row of the middle boundary also has `token`: the
            channels of one token.
    """
    config = ModelConfig(pretrained=checkpoint)
    data = load_data(DataConfig(text=tuple(text), tokenizer="bytes", sequence=SEQUENCE, batch=BATCH, held_out_share=0))
    model = build_model(config, vocab=vocabulary(config, data.tokenizer.size), sequence=SEQUENCE, seed=0)
    batch = data.train.batch(spread_evenly(BATCH, len(data.train)))
    rows = []
    for direction, tensors in zip(("forward", "backward"), capture(model, *batch, stages=STAGES), strict=True):
        rows += [_row(boundary, direction, x) for boundary, x in enumerate(tensors)]
    settings = {"stages": STAGES, "sequence": SEQUENCE, "batch": BATCH}
    Report(command="concepts record", settings=settings, machine=machine(), rows=rows).write_json(path)


def _row(boundary: int, direction: str, x: Tensor) -> dict[str, Any]:
    shares = [round(share, 7) for share in outside(x)[: KEPT + 1].tolist()]
    row: dict[str, Any] = {"boundary": boundary, "direction": direction, "shape": list(x.shape), "outside": shares}
    if direction == "forward" and boundary == STAGES // 2 - 1:
        row["token"] = [round(value, 4) for value in x[0, TOKEN].tolist()]
    return row


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
