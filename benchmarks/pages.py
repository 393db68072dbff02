"""Figures of the documentation, written from the records in docs/results/data.

A figure on several pages is one figure. `BLOCKS` are texts between marks (`benchmarks.marks`), such as tables; `QUOTED`
are sentences with a format for each figure, which may also come from a page of results. What a record lacks stays as
it is, and is named.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.marks import replaced
from benchmarks.speed_blocks import SPEED_BLOCKS, SPEED_QUOTES
from benchmarks.speed_records import Missing, Records

ROOT = Path(__file__).parents[1]
_NUMBER, _TEXT = r"([-+]?\d+(?:,\d{3})*(?:\.\d+)?)", r"([^|]{0,80}?)"
_NOISE = r"(?:\]\([^)]*\)|\*\*|[\[\]`])*"
_TOKEN = re.compile(r"\{[^}]*\}|\s+|\w+|[^\w\s]")


def pattern_of(phrase: str) -> re.Pattern[str]:
    """Return a pattern of a sentence, whatever its emphasis, code marks, links and line breaks, with its figures."""
    parts = []
    for token in _TOKEN.findall(phrase):
        if token.startswith("{"):
            parts.append(_TEXT if token == "{}" else _NUMBER)
        else:
            parts.append(r"\s+" if token.isspace() else re.escape(token))
    return re.compile(_NOISE.join(parts))


def filled(page: str, phrase: str, figures: list[Any]) -> str:
    """Return the page with these figures in every sentence of this form.

    Raises:
        ValueError: the page has no such sentence.
    """
    found = list(pattern_of(phrase).finditer(page))
    if not found:
        raise ValueError(f"no sentence {phrase!r}")
    if len({match.groups() for match in found}) > 1:
        raise ValueError(f"sentences {phrase!r} with different figures")
    texts = [form.format(figure) for form, figure in zip(re.findall(r"\{[^}]*\}", phrase), figures, strict=True)]
    for match in reversed(found):
        for number, text in reversed(list(enumerate(texts, start=1))):
            page = page[: match.start(number)] + text + page[match.end(number) :]
    return page


@dataclass(frozen=True, kw_only=True)
class Written:
    """Pages by their path, as the records have them, and what stays as it is, and why."""

    pages: dict[str, str]
    left: list[str] = field(default_factory=list)


def written(root: Path = ROOT) -> Written:
    """Return all pages with figures of the records below `root`.

    Raises:
        ValueError: a page lacks a mark or a sentence.
    """
    names = dict.fromkeys([page for page, _ in BLOCKS] + [page for page, _, _ in QUOTED])
    made = Written(pages={name: (root / name).read_text("utf-8") for name in names})
    records = Records(root, made.pages)
    for (page, mark), block in BLOCKS.items():
        replaced(made.pages[page], mark, "")  # or an error, also where the record lacks something
        try:
            made.pages[page] = replaced(made.pages[page], mark, block(records))
        except Missing as missing:
            made.left.append(f"{page}, {mark}: {missing}")
    for page, phrase, figures in QUOTED:
        try:
            values = figures(records)
        except Missing as missing:
            made.left.append(f"{page}, {phrase!r}: {missing}")
            if not pattern_of(phrase).search(made.pages[page]):
                raise ValueError(f"{page}: no sentence {phrase!r}") from None
            continue
        try:
            made.pages[page] = filled(made.pages[page], phrase, values)
        except ValueError as error:
            raise ValueError(f"{page}: {error}") from None
    return made


def write(root: Path = ROOT) -> Written:
    """Write all pages that differ from their records; return all pages, and what stays as it is."""
    made = written(root)
    for name, text in made.pages.items():
        if (root / name).read_text("utf-8") != text:
            (root / name).write_text(text, "utf-8")
    return made


def saved(field: str, method: str = "low-bit") -> Callable[[Records], float]:
    """Return what gives a figure of saved activations over BF16 autocast, in percent."""
    return lambda r: 100 * r.value("memory", f"{field}_vs_bf16", method=method)


def less(field: str, method: str = "low-bit") -> Callable[[Records], float]:
    """Return what gives by how many percent a figure of saved activations is lower than under BF16 autocast."""
    return lambda r: 100 - saved(field, method)(r)


def reduced(ranks: int, link: str, name: str = "fp8", against: str = "fp32") -> Callable[[Records], float]:
    """Return what gives the speed of a sum over PyTorch's."""
    return lambda r: r.value("gradients", f"speedup_{against}", ranks=ranks, link=link, format=name)


def least(records: Records) -> float:
    """Return the least speed of 8-bit sums over FP32 at 100 Mbit/s."""
    return min(reduced(ranks, "100mbit", name)(records) for ranks in (2, 4) for name in ("fp8", "int8"))


def cell(page: str, start: str, column: int) -> Callable[[Records], float]:
    """Return what reads a cell of a page of results."""
    return lambda r: r.cell(page, start, column)


def percent(share: Callable[[Records], float]) -> Callable[[Records], float]:
    """Return what gives a share in percent."""
    return lambda r: 100 * share(r)


def rest(kept: Callable[[Records], float]) -> Callable[[Records], float]:
    """Return what gives by how many percent a figure is lower, from what is left of it."""
    return lambda r: 100 - kept(r)


def all_of(*figures: Callable[[Records], float]) -> Callable[[Records], list[Any]]:
    """Return what gives all of these figures."""
    return lambda r: [figure(r) for figure in figures]


TP = "tensor-parallel"
STATIC = cell(TP, "SmolLM2, perplexity, 3 ranks", 1)
OURS = [cell(TP, "feature-int4: a gain", 4), cell(TP, "feature-int4, 4-bit codes everywhere", 2)]
BUDGET = [cell(TP, f"budget 4.25: attention by its inputs in {bits}", column) for bits, column in ((6, 4), (8, 2))]
SAME = [
    cell(TP, start, 2) for start in ("as published: static", "4-bit codes everywhere, a gain", "the default: a budget")
]
QWEN = [
    cell(TP, f"{start}, Qwen2.5", 2) for start in ("static ranges", "4-bit codes with a gain", "the default's budget")
]
CHECKPOINTS = [cell("memory", "a plan with at most 0.7: checkpoints", n) for n in (2, 3)]
NORMS = [cell("memory", "4 bits for norms, too: AGoQ's", n) for n in (1, 2, 3)]
GRADIENTS = [
    percent(cell("memory", f"{model} | ours", 2)) for model in ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Gemma 3 270M")
]
GSM8K = [
    cell("convergence", f"{name}, GSM8K", n)
    for name in ("TAH-Quant as published, by tile", "TAH-Quant as published, by token", "TAHQuant()") for n in (2, 3)
]  # fmt: skip
COAT = [
    rest(cell("memory", start, n)) for start in ("fp8: all saved tensors", "AGoQ as published, agoq") for n in (2, 4)
]
LESS = all_of(less("saved"), less("peak"))
WITH_8BIT = less("peak", "low-bit+8bit")


def all_reduce(records: Records) -> float:
    """Return the speed of a large sum of tensor-parallel ranks over PyTorch's in BF16."""
    return records.stated(TP, r"2,048 tokens: ([\d.]+) times as fast as BF16")


def agoq(records: Records) -> float:
    """Return by how many percent AGoQ's peak is lower."""
    return 100 - records.cell("memory", "agoq |", 2)


README, INDEX, COMPARISON, LIMITS = "README.md", "docs/results/index.md", "docs/comparison.md", "docs/limits.md"
PAPERS, TENSOR, SAVED = "docs/papers.md", "docs/how-to/tensor-parallel.md", "docs/how-to/saved-activations.md"
BLOCKS: Mapping[tuple[str, str], Callable[[Records], str]] = SPEED_BLOCKS
"""Texts by page and mark."""
QUOTED: list[tuple[str, str, Callable[[Records], list[Any]]]] = [
    *SPEED_QUOTES,
    (INDEX, "FP8: {:.1f}x as fast as PyTorch's FP32 at 100 Mbit/s, 2 and 4 ranks", all_of(least)),
    (PAPERS, "{:.1f}x at 100 Mbit/s, 2 and 4 ranks", all_of(least)),
    (COMPARISON, "FP8 of lowbit {:.2f}x, PowerSGD (rank 4) {:.1f}x",
     all_of(reduced(2, "100mbit", "fp8"), reduced(2, "100mbit", "powersgd"))),
    (LIMITS, "{:.2f}x (FP8) and {:.2f}x (INT8) over FP32", all_of(reduced(4, "1gbit"), reduced(4, "1gbit", "int8"))),
    (LIMITS, "FP8 {:.2f}x over BF16", all_of(reduced(4, "1gbit", against="bf16"))),
    (README, "{:.0f} % less saved, {:.0f} % less at the peak of a step than under BF16 autocast", LESS),
    (INDEX, "{:.0f} % less saved, {:.0f} % less at the peak of a step than under BF16 autocast", LESS),
    (INDEX, "4096 tokens; {:.0f} % with 8-bit gradients and optimizer", all_of(WITH_8BIT)),
    (LIMITS, "the peak falls by {:.0f} %", all_of(WITH_8BIT)),
    (PAPERS, "{:.0f} % less at 4096 tokens, 2 layers; as published: {:.0f} % less", all_of(WITH_8BIT, agoq)),
    (PAPERS, "{:.0f} % less saved, {:.0f} % less at the peak; AGoQ as published {:.0f} and {:.0f} %", all_of(*COAT)),
    (PAPERS, "ours {:.1f}, {:.1f} and {:.1f} % (memory)", all_of(*GRADIENTS)),
    (PAPERS, "v2: loss {:+.4f}, evaluated through the codec {:+.4f}; v1: {:+.4f}, {:+.4f}; ours {:+.4f}, {:+.4f}",
     all_of(*GSM8K)),
    (PAPERS, "Qwen2.5, 2 ranks: {:.1f}, {:.1f} and {:.1f} %", all_of(*QWEN)),
    (SAVED, "a small Llama kept {:.0f} % less", all_of(less("saved"))),
    (COMPARISON, "checkpointing keeps {:.0f} % of the saved bytes, peaks at {:.0f} % of the memory and takes {:.0f} %",
     all_of(*(saved(field, "checkpoint") for field in ("saved", "peak", "time")))),
    (COMPARISON, "keeps {:.0f} %, peaks at {:.0f} % and takes {:.0f} %",
     all_of(saved("saved"), saved("peak"), saved("time"))),
    (COMPARISON, "fell from {:.0f} % to {:.0f} % of BF16 autocast",
     all_of(saved("peak"), saved("peak", "low-bit+8bit"))),
    (INDEX, "16 layers: {:.2f} of the peak of checkpointing", all_of(CHECKPOINTS[0])),
    (PAPERS, "({:+.4f}, {:+.4f}, {:+.4f}), ours", all_of(*NORMS)),
    (SAVED, "lost {:.3f}, {:.3f} and {:.3f} nats", all_of(*NORMS)),
    (README, "an all-reduce is {:.1f} times as fast", all_of(all_reduce)),
    (INDEX, "2048 tokens: {:.1f}x as fast as PyTorch's BF16", all_of(all_reduce)),
    (COMPARISON, "{:.1f}x PyTorch's BF16 all-reduce", all_of(all_reduce)),
    (LIMITS, "{:.1f}x over BF16 at 2048 tokens", all_of(all_reduce)),
    (PAPERS, "2 ranks: {:.1f}x BF16", all_of(all_reduce)),
    (TENSOR, "summed 2048 tokens {:.1f} times as fast", all_of(all_reduce)),
    (INDEX, "{:.1f} % of its perplexity with 4-bit codes, {:.1f} % with a budget", all_of(OURS[1], BUDGET[1])),
    (INDEX, "by default it gives {:.1f} % of the answers", all_of(SAME[2])),
    (PAPERS, "as published {:.1f} %, ours in 4 bits {:.1f} %, our default {:.1f} %", all_of(*SAME)),
    (INDEX, "and {:.1f} % with the published format", all_of(STATIC)),
    (LIMITS, "4 bits everywhere keep {:.1f} % of an encoder's 10 nearest neighbours", all_of(OURS[0])),
    (LIMITS, "{:.1f} % of a language model's perplexity; a budget with inputs keeps {:.1f} % and {:.1f} %",
     all_of(OURS[1], *BUDGET)),
    (PAPERS, "ours in 4 bits {:.1f} %, with a budget of 4.25 bits {:.1f} %", all_of(OURS[0], BUDGET[0])),
    (PAPERS, "3 ranks: as published {:.1f} %, ours", all_of(STATIC)),
    (PAPERS, "ours in 4 bits {:.1f} %, ours with a budget of 4.25 bits {:.2f} %", all_of(OURS[1], BUDGET[1])),
    (INDEX, "perplexity times {:.3f}", all_of(cell("convergence", "SmolLM2-135M | TransformQuant | cold", 2))),
    (INDEX, "off by {:.1f} % (median)", all_of(lambda r: r.stated("predictions", r"Off by ([\d.]+) % \(median\)"))),
]  # fmt: skip
"""Sentences by page, with the figures that they state."""
