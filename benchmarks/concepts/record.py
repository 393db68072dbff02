"""What crosses the boundaries of a trained model, recorded for the pictures: `python -m benchmarks.concepts record`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lowbit.report.results import Report, machine
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import load_data
from lowbit.train.model import build_model, vocabulary
from lowbit_lab.bench.samples import capture
from lowbit_lab.bench.spectrum import outside
from lowbit_lab.bench.training import spread_evenly

STAGES, SEQUENCE, BATCH = 4, 256, 4
TOKEN = 100
"""Of the first window, the one whose channels are shown."""
KEPT = 128
"""Numbers of directions of which the energy outside is recorded."""


def record(checkpoint: str, text: Sequence[str], path: Path) -> None:
    """Run a model on one message of a text, and write what its boundaries carry.

    Args:
        checkpoint: local folder with a Hugging Face checkpoint.
        text: files that it was not trained on.
        path: of the JSON file. Rows have `boundary`, `direction` and `outside`: the share of energy that the best k
            directions leave out, for k from 0 to `KEPT`. That of the middle boundary, forward, also has `token`: the
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
