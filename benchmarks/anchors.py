"""What token anchors save: `python -m benchmarks.anchors --model FOLDER --fit FILES --text FILES`.

A pretrained model reads windows of each text through three boundaries, after a quarter, half and three quarters of
its layers, forward only: exactly, with `TransformQuant` at each rate, and the same with anchors. Before, windows of the
files to fit cross: some exactly, to fit the anchors, then some coded, so that the format has a basis. For each text and
rate, a line has the rise of the loss and the Kullback-Leibler divergence from the exact model, in nats for each token,
without and with anchors, and what anchors save, with standard errors over windows. `--speed` prints instead, for each
rate, the processor time to encode and to decode activations in the middle of the model, of all windows but those that
cross exactly.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.real import opened
from lowbit.codecs import Codec, TransformQuant
from lowbit.codecs.foreign import open_session
from lowbit.pipeline import Emulation, TokenAnchor, emulate_
from lowbit.pipeline.anchors import Fit
from lowbit_lab.bench.training import boundary_modules

STAGES, AT_ONCE = 4, 4


def windows(tokenizer: Any, file: Path, count: int, length: int, *, at: int = 0) -> Tensor:
    """Return `count` windows of a file, back to back from the window `at` on, int64 (count, length)."""
    text = file.read_text(errors="replace")[: 12 * length * (at + count)]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][length * at : length * (at + count)]
    if len(ids) < count * length:
        raise ValueError(f"{file} has {len(ids)} tokens; allowed: at least {count * length}")
    return torch.tensor(ids).view(count, length)


@torch.no_grad()
def read(model: Any, ids: Tensor, emulation: Emulation | None = None) -> tuple[Tensor, Tensor]:
    """Return logarithms of probabilities (windows, tokens, vocabulary), and the losses (windows,), of a few windows."""
    if emulation is not None:
        emulation.set_tokens(ids)
    logs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logs, -logs.gather(2, ids[:, 1:, None]).mean((1, 2))


def warmed(model: Any, codec: Codec, anchor: TokenAnchor | None, exact: Tensor, coded: Tensor) -> tuple[Any, Emulation]:
    """Return a copy of a model that shares its weights, whose boundaries windows have crossed."""
    copy = deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())}).train()
    emulation = emulate_(copy, at=boundary_modules(copy, STAGES), forward=codec, warmup_steps=1, anchor=anchor)
    for part in exact.split(AT_ONCE) if anchor is not None else ():
        read(copy, part, emulation)
    emulation.step()
    for part in coded.split(AT_ONCE):
        read(copy, part, emulation)
    return copy.eval(), emulation


class Ends:
    """Both ends of a boundary, which code as `lowbit.pipeline` does, and nanoseconds an element of each message."""

    def __init__(self, codec: Codec, x: Tensor, fit: Fit | None) -> None:
        self._sender, self._receiver = (
            open_session(codec, shape=x.shape, dtype=x.dtype, device=x.device) for _ in range(2)
        )
        self._fit = fit
        self.encoding, self.decoding = list[float](), list[float]()

    def send(self, ids: Tensor, x: Tensor) -> None:
        """Encode and decode a message."""
        out = torch.empty_like(x)
        times = [time.process_time()]
        if self._fit is not None and (predicted := self._fit.predict(ids)) is not None:
            x = torch.sub(x, predicted, out=predicted)
        payload = self._sender.encode(x)
        times.append(time.process_time())
        y = self._receiver.decode(payload, out=out)
        if self._fit is not None and (predicted := self._fit.predict(ids)) is not None:
            out.copy_(y.add_(predicted))
        times.append(time.process_time())
        nanoseconds = 1e9 / x.numel()
        self.encoding.append(nanoseconds * (times[1] - times[0]))
        self.decoding.append(nanoseconds * (times[2] - times[1]))


@torch.no_grad()
def print_speeds(model: Any, messages: Tensor, exact: int, rates: Sequence[float]) -> None:
    """Print how long messages take without and with anchors, in turn. Predictions of all tokens have been made before.

    Args:
        messages: ids (messages, windows, tokens). exact: number of messages that the anchors are fitted to, the first.
    """
    if not 0 < exact < len(messages) - 1:
        raise ValueError(f"{exact} of {len(messages)} messages of {AT_ONCE} windows cross exactly; allowed: all but 2")
    xs: list[Tensor] = []
    middle = dict(model.named_modules())[boundary_modules(model, 2)[0]]
    with middle.register_forward_hook(lambda _, __, y: xs.append((y[0] if isinstance(y, tuple) else y).clone())):
        for ids in messages:
            model(input_ids=ids, use_cache=False)
    anchor = TokenAnchor(embedding=model.get_input_embeddings().weight.detach())
    fit = Fit(anchor, "the middle", xs[0].shape[-1], xs[0].device)
    for ids, x in zip(messages[:exact], xs, strict=False):
        fit.learn(ids, x)
    if any(fit.predict(ids) is None for ids in messages):
        raise ValueError("tokens leave too much of the activations, so that the anchor is off; allowed: more --exact")
    for bits in rates:
        plain, anchored = (Ends(TransformQuant(bits=bits), xs[0], each) for each in (None, fit))
        for turn in range(5):
            for ids, x in zip(messages[exact:], xs[exact:], strict=True):
                for ends in (plain, anchored) if turn % 2 else (anchored, plain):  # the second finds x in the caches
                    ends.send(ids, x)
            if not turn:  # compiles
                for ends in (plain, anchored):
                    ends.encoding.clear()
                    ends.decoding.clear()
        both = [[a + b for a, b in zip(ends.encoding, ends.decoding, strict=True)] for ends in (plain, anchored)]
        ratios = [b / a for a, b in zip(*both, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        medians = [statistics.median(x) for e in (plain, anchored) for x in (e.encoding, e.decoding)]
        print(  # noqa: T201
            f"{bits:g} bits: encoding and decoding take {medians[0]:.1f} and {medians[1]:.1f} ns an element, with "
            f"anchors {medians[2]:.1f} and {medians[3]:.1f}; together {statistics.median(ratios):.2f} times as long "
            f"(half of the messages: {low:.2f} to {high:.2f})"
        )


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
    parser.add_argument("--speed", action="store_true", help="measure how long messages of four windows take instead")
    given = parser.parse_args()
    if absent := [str(file) for file in (*given.fit, *given.text) if not file.is_file()]:
        parser.error(f"there is no file {absent[0]}")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    [(_, tokenizer, load)] = opened([given.model])
    model = load().eval()
    each = -(-(given.exact + given.warm) // len(given.fit))
    fitted = torch.cat([windows(tokenizer, file, each, given.tokens) for file in given.fit])
    fitted = fitted[torch.randperm(len(fitted), generator=torch.Generator().manual_seed(0))]
    texts = {file.name: windows(tokenizer, file, given.windows, given.tokens) for file in given.text}
    if given.speed:
        messages = torch.cat([fitted, *texts.values()])
        messages = messages[: len(messages) // AT_ONCE * AT_ONCE].view(-1, AT_ONCE, given.tokens)
        print_speeds(model, messages, given.exact // AT_ONCE, given.bits)
        return
    exact, coded = fitted[: given.exact], fitted[given.exact :][: given.warm]
    embedding = model.get_input_embeddings().weight.detach()
    copies = {
        (bits, anchor is not None): warmed(model, TransformQuant(bits=bits), anchor, exact, coded)
        for bits in given.bits
        for anchor in (None, TokenAnchor(embedding=embedding))
    }
    for name, ids in texts.items():
        losses: list[Tensor] = []
        found: dict[tuple[float, bool], list[Tensor]] = {key: [] for key in copies}  # (2, windows) each
        for part in ids.split(AT_ONCE):
            expected, loss = read(model, part)
            losses.append(loss)
            for key, (copy, emulation) in copies.items():
                logs, coded_loss = read(copy, part, emulation)
                divergence = (expected.exp() * (expected - logs)).sum(-1).mean(1)
                found[key].append(torch.stack([coded_loss - loss, divergence]))
        print(f"{name}: exact {torch.cat(losses).mean():.4f} nats", flush=True)  # noqa: T201
        for bits in given.bits:
            both = zip(torch.cat(found[bits, False], 1), torch.cat(found[bits, True], 1), strict=True)
            for what, (plain, anchored) in zip(("loss", "divergence"), both, strict=True):
                print(  # noqa: T201
                    f"{name}, {bits:g} bits, {what}: {shown(plain)}; with anchors {shown(anchored)}; "
                    f"saved {shown(plain - anchored)}; {plain.mean() / anchored.mean():.2f} times less",
                    flush=True,
                )


if __name__ == "__main__":
    main()
