"""What token anchors save: `python -m benchmarks.anchors --model FOLDER --fit FILES --text FILES`.

A pretrained model reads windows of each text through three boundaries, after a quarter, half and three quarters of
its layers, forward only: exactly, with `TransformQuant` at each rate, and the same with anchors. Before, windows of the
files to fit cross: some exactly, to fit the anchors, then some coded, so that the format has a basis. For each text and
rate, a line has the rise of the loss and the Kullback-Leibler divergence from the exact model, in nats for each token,
without and with anchors, and what anchors save, with standard errors over windows.
"""

import argparse
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
def outputs(model: Any, ids: Tensor, emulation: Emulation | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logarithms of probabilities (windows, tokens, vocabulary), and the losses (windows,), of a few windows."""
    for part in ids.split(AT_ONCE):
        if emulation is not None:
            emulation.set_tokens(part)
        logs = model(input_ids=part, use_cache=False).logits[:, :-1].log_softmax(-1)
        yield logs, -logs.gather(2, part[:, 1:, None]).mean((1, 2))


def compared(model: Any, ids: Tensor, exact: Sequence[tuple[Tensor, Tensor]], emulation: Emulation) -> Tensor:
    """Return the rise of each window's loss, and its divergence from the exact model: (2, windows)."""
    found = []
    for (expected, loss), (logs, coded_loss) in zip(exact, outputs(model, ids, emulation), strict=True):
        expected = expected.float()
        divergence = (expected.exp() * (expected - logs)).sum(-1).mean(1)
        found.append(torch.stack([coded_loss - loss, divergence]))
    return torch.cat(found, 1)


def shown(values: Tensor) -> str:
    """Return the mean and its standard error as text."""
    return f"{values.mean():+.4f} ± {values.std() / len(values) ** 0.5:.4f}"


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
    exact: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, ids in texts.items():
        exact[name] = [(logs.half(), loss) for logs, loss in outputs(model.eval(), ids)]
        print(f"{name}: exact {torch.cat([loss for _, loss in exact[name]]).mean():.4f} nats", flush=True)  # noqa: T201
    embedding = model.get_input_embeddings().weight.detach()
    for bits in given.bits:
        measured: list[dict[str, Tensor]] = []
        for anchor in (None, TokenAnchor(embedding=embedding)):
            emulation = emulate_(model, at=places, forward=TransformQuant(bits=bits), warmup_steps=1, anchor=anchor)
            model.train()
            if anchor is not None:
                deque(outputs(model, fitted[: given.exact], emulation), maxlen=0)
            emulation.step()
            deque(outputs(model, fitted[given.exact :][: given.warm], emulation), maxlen=0)
            model.eval()
            measured.append({name: compared(model, ids, exact[name], emulation) for name, ids in texts.items()})
            emulation.remove()
        for name in texts:
            for what, plain, anchored in zip(("loss", "divergence"), *(each[name] for each in measured), strict=True):
                print(  # noqa: T201
                    f"{name}, {bits:g} bits, {what}: {shown(plain)}; with anchors {shown(anchored)}; "
                    f"saved {shown(plain - anchored)}; {plain.mean() / anchored.mean():.2f} times less",
                    flush=True,
                )


if __name__ == "__main__":
    main()
