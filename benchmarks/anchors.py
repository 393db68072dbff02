"""What token anchors save: `python -m benchmarks.anchors --model FOLDER --fit FILES --text FILES`.

A pretrained model reads windows of each text through three boundaries, after a quarter, half and three quarters of
its layers, forward only: exactly, with `TransformQuant` at each rate, and the same with anchors. Before, windows of the
files to fit cross: some exactly, to fit the anchors, then some coded, so that the format has a basis. For each text and
rate, a line has the rise of the loss without and with anchors, and their difference, in nats for each token, with
standard errors over windows; the last number is the ratio of the two.
"""

import argparse
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.real import opened
from lowbit.codecs import TransformQuant
from lowbit.pipeline import Emulation, TokenAnchor, emulate_
from lowbit_lab.bench.training import boundary_modules

STAGES, AT_ONCE = 4, 4


def windows(tokenizer: Any, file: Path, count: int, length: int, *, at: int = 0) -> Tensor:
    """Return `count` windows of a file, back to back from the window `at` on, int64 (count, length)."""
    text = file.read_text(errors="replace")[: 12 * length * (at + count)]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][length * at : length * (at + count)]
    return torch.tensor(ids).view(count, length)


@torch.no_grad()
def losses(model: Any, ids: Tensor, emulation: Emulation | None = None) -> list[float]:
    """Return the mean loss of each window."""
    found = []
    for part in ids.split(AT_ONCE):
        if emulation is not None:
            emulation.set_tokens(part)
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        each = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        found += each.view(len(part), -1).mean(1).tolist()
    return found


def mean_and_error(values: Sequence[float]) -> str:
    """Return the mean and its standard error as text."""
    return f"{statistics.fmean(values):+.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


def main() -> None:
    """Measure, and print a line for each text and rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--fit", required=True, type=Path, nargs="+", help="files whose windows cross first")
    parser.add_argument("--text", required=True, type=Path, nargs="+", help="other files to measure on")
    parser.add_argument("--bits", type=float, nargs="+", default=[3.1, 2.6, 2.2])
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    for name, default, about in (
        ("windows", 8, "to measure on, of each text"),
        ("exact", 16, "that cross exactly, of all files to fit together"),
        ("warm", 8, "that are coded afterwards, likewise"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"windows {about}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    [(_, tokenizer, load)] = opened([given.model])
    model = load()
    places = boundary_modules(model, STAGES)
    each = -(-(given.exact + given.warm) // len(given.fit))
    fitted = torch.cat([windows(tokenizer, file, each, given.tokens) for file in given.fit])
    fitted = fitted[torch.randperm(len(fitted), generator=torch.Generator().manual_seed(0))]
    texts = {file.name: windows(tokenizer, file, given.windows, given.tokens) for file in given.text}
    exact = {name: losses(model.eval(), ids) for name, ids in texts.items()}
    for name, found in exact.items():
        print(f"{name}: exact {statistics.fmean(found):.4f} nats", flush=True)  # noqa: T201
    embedding = model.get_input_embeddings().weight.detach()
    for bits in given.bits:
        rises: dict[bool, dict[str, list[float]]] = {}
        for anchored in (False, True):
            anchor = TokenAnchor(embedding=embedding) if anchored else None
            emulation = emulate_(model, at=places, forward=TransformQuant(bits=bits), warmup_steps=1, anchor=anchor)
            model.train()
            if anchored:
                losses(model, fitted[: given.exact], emulation)
            emulation.step()
            losses(model, fitted[given.exact : given.exact + given.warm], emulation)
            model.eval()
            rises[anchored] = {
                name: [a - b for a, b in zip(losses(model, ids, emulation), exact[name], strict=True)]
                for name, ids in texts.items()
            }
            emulation.remove()
        for name in texts:
            without, with_anchor = rises[False][name], rises[True][name]
            saved = [a - b for a, b in zip(without, with_anchor, strict=True)]
            ratio = statistics.fmean(without) / statistics.fmean(with_anchor)
            print(  # noqa: T201
                f"{name}, {bits:g} bits: {mean_and_error(without)}; anchors {mean_and_error(with_anchor)}; "
                f"saved {mean_and_error(saved)}; {ratio:.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
