"""`python -m benchmarks real`: cost of boundary formats for pretrained models, in perplexity, divergence and error.

A copy of the model has a pipeline's codecs between its layers (`emulate_`). It reads the same windows as the exact
model. "cold": each window is the first message of its boundaries. "warm": `warm` windows of other text were sent
before, with their gradients, as in fine-tuning, but the weights are unchanged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lowbit.codecs import parse_pair
from lowbit.pipeline import emulate_
from lowbit_lab.bench.settings import AtLeastTwo, Names, check_stages, formats_of
from lowbit_lab.bench.training import boundary_modules
from lowbit_lab.charts.style import row_name
from lowbit_run.config import ConfigError, Positive, section
from lowbit_run.report import Column, Command, Row, Table
from lowbit_run.train.data import files_named, library_files
from lowbit_run.train.pretrained import check_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["text", "code", "chat", "padded"]
Window = tuple[Tensor, Tensor]
"""Token ids (sequences, tokens), and which of them are not padding."""
PADDED = (1.0, 0.75, 0.5, 0.25)
"""Lengths of the sequences of a padded window, as shares of the longest."""
QUESTION = "Continue this text:\n"
FEW = 8
"""Number of channels of most energy whose error is reported separately."""


@section()
class RealBenchmark:
    """Models, formats and texts."""

    models: Names
    """Folders of causal language models in Hugging Face format, such as those of `make real-models`."""
    boundaries: Names = ("int8 / int8", "int4 / int4", "tah-quant-published", "tah-quant", "transform")
    """Formats of activations, by name or in full, or of both ways, such as "int4 / int6"."""
    stages: AtLeastTwo = 4
    """Stages of the pipeline, with as many layers each as possible."""
    kinds: tuple[Kind, ...] = ("text",)
    """text: windows of `text`; code: of Python's standard library; chat: pieces of `text` as the answers of a chat, by
    the tokenizer's template; padded: 4 sequences of `text` to a window, the shorter ones padded on the right."""
    text: tuple[str, ...] = ()
    """Files to evaluate on. If omitted, Python's language reference."""
    warm_text: tuple[str, ...] = ()
    """Files to warm up on. If omitted, and always for code, the windows of `text` that follow those to evaluate on."""
    tokens: Annotated[int, Field(ge=16)] = 512
    """Tokens of a window."""
    windows: AtLeastTwo = 8
    """Windows to evaluate on."""
    warm: Positive = 8
    """Windows that are sent before "warm"."""
    threads: Positive = 1
    """Threads of this process."""

    def __post_init__(self) -> None:
        for boundary in self.boundaries:
            pair = parse_pair(boundary, "")
            if any(codec.needs_key for codec in pair):
                raise ConfigError(f"boundary is {boundary!r}; allowed: formats that need no sample ids")


def measure(settings: RealBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure each format on each model and kind of text.

    Yields:
        Rows: `model`, `kind`, `boundary`, `forward`, `backward`, `phase` (cold or warm), `bits_forward` (an element,
        every byte counted), `perplexity` (the exact model's), and for the coded model `ratio` (of perplexities),
        `first_ratio` (of tokens 1 to 15 of a window), `divergence` (Kullback-Leibler from the exact model, nats per
        token), each with its standard error as `..._error`; and relative squared errors of the boundaries' tensors:
        `error`, `error_first` (of the first token), `error_early` (tokens 1 to 15), `error_few` (of the 8 channels of
        most energy) and `energy_few` (their share of the energy).
    """
    torch.set_num_threads(settings.threads)
    rows: list[Row] = []
    for folder, tokenizer, load in opened(settings.models):
        exact, coded = load(), load()
        check_stages(settings.stages, coded.config.num_hidden_layers)
        places = boundary_modules(coded, settings.stages)
        for kind in settings.kinds:
            reading = Reading(tokenizer, kind, settings)
            for boundary in settings.boundaries:
                about = {"model": Path(folder).name, "kind": kind, "boundary": boundary, **formats_of(boundary, "")}
                for measured in _measure(exact.eval(), coded, places, boundary, reading):
                    rows.append({**about, **measured})
                    yield list(rows)


def opened(folders: Sequence[str]) -> Iterator[tuple[str, PreTrainedTokenizerBase, Callable[[], Any]]]:
    """Check all folders, and yield each with its tokenizer and a function that loads its model in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    for folder in folders:
        check_files(folder, "model")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    for folder in folders:
        load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32, **local)
        yield folder, AutoTokenizer.from_pretrained(folder, **local), load


class Reading:
    """The windows of one kind of text for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kind: Kind, settings: RealBenchmark) -> None:
        if kind == "chat" and not tokenizer.chat_template:
            raise ConfigError("kind is 'chat', and the tokenizer of the model has no chat template")
        self._tokenizer, self._kind = tokenizer, kind
        if kind == "code":
            text, warm = _read(library_files()[:200]), None
        else:
            text = _read(files_named(settings.text, "text")) if settings.text else "\n\n".join(topics.values())
            warm = _read(files_named(settings.warm_text, "text")) if settings.warm_text else None
        need = settings.windows + settings.warm * (warm is None)
        windows = self._windows(text, need, settings.tokens)
        self.held_out = windows[: settings.windows]
        self.warm = windows[settings.windows :] if warm is None else self._windows(warm, settings.warm, settings.tokens)

    def _windows(self, text: str, count: int, tokens: int) -> list[Window]:
        """Return `count` consecutive windows, each with the tokenizer's beginning of a text, if it has one."""
        plain = self._tokenizer(text[: 12 * tokens * (count + 1)], add_special_tokens=False)["input_ids"]
        begin = self._tokenizer("a")["input_ids"][: -len(self._tokenizer("a", add_special_tokens=False)["input_ids"])]
        lengths = [int(share * tokens) for share in (PADDED if self._kind == "padded" else (1.0,))]
        windows, at = [], 0
        for _ in range(count):
            ids, kept = torch.zeros(len(lengths), tokens, dtype=torch.long), torch.zeros(len(lengths), tokens)
            for row, length in enumerate(lengths):
                piece = self._begun(begin, plain[at : at + length], length)
                at += length
                if len(piece) < length:
                    raise ConfigError(f"the text has too few tokens for {count} windows of {tokens}; allowed: fewer")
                ids[row, :length], kept[row, :length] = torch.tensor(piece), 1
            windows.append((ids, kept.bool()))
        return windows

    def _begun(self, begin: list[int], piece: list[int], length: int) -> list[int]:
        if self._kind != "chat":
            return (begin + piece)[:length]
        turns = [(QUESTION, self._tokenizer.decode(piece))]
        messages = [m for q, a in turns for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]
        written: Any = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return self._tokenizer(written, add_special_tokens=False)["input_ids"][:length]


def _measure(
    exact: PreTrainedModel, coded: PreTrainedModel, places: list[str], boundary: str, reading: Reading
) -> Iterator[Row]:
    forward, backward = parse_pair(boundary, "")
    errors = Errors()
    before = [coded.get_submodule(name).register_forward_hook(errors.sent) for name in places]
    emulation = emulate_(coded, at=places, forward=forward, backward=backward)
    after = [coded.get_submodule(name).register_forward_hook(errors.received) for name in places]
    for phase in ("cold", "warm") if forward.stateful else ("cold",):
        if phase == "warm":
            coded.train()
            for window in reading.warm:
                model_loss(coded, window).backward()
                coded.zero_grad()
                emulation.step()
        coded.eval()
        traffic = replace(emulation.traffic)
        errors.begin()
        losses = [_compare(exact, coded, window) for window in reading.held_out]
        sent = emulation.traffic
        bits = 8 * (sent.forward_bytes - traffic.forward_bytes) / (sent.forward_elements - traffic.forward_elements)
        yield {"phase": phase, "bits_forward": bits, **_summary(losses), **errors.end()}
    for handle in (*before, *after):
        handle.remove()
    emulation.remove()


def model_loss(model: PreTrainedModel, window: Window) -> Tensor:
    """Return the mean loss of all tokens that are not padding."""
    ids, kept = window
    logits = model(input_ids=ids, attention_mask=kept.long()).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].masked_fill(~kept[:, 1:], -100).flatten())


@torch.no_grad()
def _compare(exact: PreTrainedModel, coded: PreTrainedModel, window: Window) -> dict[str, Tensor]:
    """Return exact and coded loss, divergence, and place in the sequence, of all tokens that are not padding."""
    ids, kept = window
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": kept.long()}
    there = kept[:, 1:]
    wanted = ids[:, 1:][there][:, None]
    logs = [model(**given).logits[:, :-1][there].log_softmax(-1) for model in (exact, coded)]
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    plain, changed = (-log.gather(1, wanted)[:, 0] for log in logs)
    place = torch.arange(1, ids.shape[1]).expand_as(there)[there]
    return {"exact": plain, "change": changed - plain, "divergence": divergence, "place": place}


def _summary(losses: list[dict[str, Tensor]]) -> Row:
    """Return means over windows, with standard errors from their spread; for a ratio, that of its logarithm."""
    change = _mean_of([each["change"] for each in losses])
    first = _mean_of([each["change"][each["place"] < 16] for each in losses])
    divergence = _mean_of([each["divergence"] for each in losses])
    loss = statistics.fmean(each["exact"].mean().item() for each in losses)
    return {
        "perplexity": math.exp(loss),
        "ratio": math.exp(change[0]), "ratio_error": math.exp(change[0]) * change[1],
        "first_ratio": math.exp(first[0]), "first_ratio_error": math.exp(first[0]) * first[1],
        "divergence": divergence[0], "divergence_error": divergence[1],
    }  # fmt: skip


def _mean_of(windows: list[Tensor]) -> tuple[float, float]:
    means = [window.mean().item() for window in windows]
    return statistics.fmean(means), statistics.stdev(means) / len(means) ** 0.5


class Errors:
    """Squares of a boundary's tensors and of their errors, by place in the sequence and by channel."""

    def __init__(self) -> None:
        self._energy: dict[str, float] = {}
        self._error: dict[str, float] = {}
        self._counts = False

    def begin(self) -> None:
        """Start counting, and forget earlier counts."""
        self._energy, self._error, self._counts = {}, {}, True

    def sent(self, module: nn.Module, inputs: object, output: Any) -> None:
        """Forward hook that gets a tensor before it is coded."""
        self._x = _tensor_of(output).detach()

    def received(self, module: nn.Module, inputs: object, output: Any) -> None:
        """Forward hook that gets the tensor afterwards."""
        if not self._counts:
            return
        error, energy = (_tensor_of(output) - self._x).double().square(), self._x.double().square()
        few = energy.sum((0, 1)).topk(min(FEW, energy.shape[-1])).indices
        parts = {"": slice(None), "_first": (slice(None), slice(0, 1)), "_early": (slice(None), slice(1, 16)),
                 "_few": (..., few)}  # fmt: skip
        for name, part in parts.items():
            self._error[name] = self._error.get(name, 0.0) + float(error[part].sum())
            self._energy[name] = self._energy.get(name, 0.0) + float(energy[part].sum())

    def end(self) -> Row:
        """Return the fields of the row."""
        self._counts = False
        found: Row = {f"error{name}": error / self._energy[name] for name, error in self._error.items()}
        return {**found, "energy_few": self._energy["_few"] / self._energy[""]}


def _tensor_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _read(files: Iterable[Path]) -> str:
    return "\n".join(file.read_text(errors="replace") for file in files)


ABOUT = (
    Column("model", "model"),
    Column("kind", "kind"),
    Column("boundary", "boundary", row_name),
    Column("phase", "phase"),
)
COMMAND = Command(
    name="benchmarks real",
    summary="Cost of boundary formats for pretrained models: perplexity, divergence, errors.",
    examples=(
        "python -m benchmarks real runs/real-models/smollm2 --json real.json",
        "python -m benchmarks real a,b --stages 8 --kind text,code,padded",
    ),
    settings=RealBenchmark,
    measure=measure,
    tables=[
        Table(
            title="Pretrained models with coded boundaries",
            columns=[
                *ABOUT,
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("perplexity\nratio", "ratio", "{:.4f}"),
                Column("±", "ratio_error", "{:.4f}"),
                Column("tokens\n1-15", "first_ratio", "{:.3f}"),
                Column("±", "first_ratio_error", "{:.3f}"),
                Column("KL", "divergence", "{:.4f}"),
                Column("±", "divergence_error", "{:.4f}"),
            ],
        ),
        Table(
            title="Relative squared errors of the tensors at boundaries",
            columns=[
                *ABOUT,
                Column("all", "error", "{:.1e}"),
                Column("first\ntoken", "error_first", "{:.1e}"),
                Column("tokens\n1-15", "error_early", "{:.1e}"),
                Column("8 largest\nchannels", "error_few", "{:.1e}"),
                Column("their share\nof energy", "energy_few", "{:.0%}"),
            ],
        ),
    ],
    charts=[],
)  # fmt: skip
