"""A figure on several pages is one figure: pages quote what the recorded results, or a results page, hold.

An entry of `QUOTED` is a page, a phrase of it with a format for each figure, and where the figures come from. After a
new measurement change the source; this test names the pages that still have the old figure.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"


def plain(path: Path) -> str:
    """The page without emphasis, code marks, targets of links and line breaks."""
    text = re.sub(r"\]\([^)]*\)", "]", path.read_text())
    return " ".join(re.sub(r"\*\*|[\[\]`]", "", text).split())


def recorded(name: str, field: str, **where: Any) -> float:
    """A field of the one recorded row that has these values."""
    rows = json.loads((RESULTS / f"data/{name}.json").read_text())["rows"]
    (row,) = (row for row in rows if all(row[key] == value for key, value in where.items()))
    return row[field]


def stated(page: str, pattern: str) -> float:
    """The one number that a results page states where the pattern matches."""
    numbers = set(re.findall(pattern, plain(RESULTS / f"{page}.md")))
    assert len(numbers) == 1, f"{page}.md states {numbers} where {pattern!r} matches"
    return float(numbers.pop().replace(",", ""))


def cell(page: str, start: str, column: int) -> float:
    """The number in a row of a results page: in so many cells after the one that begins with `start`."""
    return stated(page, rf"\| {re.escape(start)}[^|]*(?:\|[^|]*){{{column - 1}}}\| ?([-+]?[\d,]+\.?\d*)")


def saved(field: str, method: str = "low-bit") -> float:
    return 100 * recorded("memory", f"{field}_vs_bf16", method=method)


def reduced(ranks: int, link: str, name: str = "fp8", against: str = "fp32") -> float:
    return recorded("gradients", f"speedup_{against}", ranks=ranks, link=link, format=name)


SPEED = [recorded("pipeline", f"speedup_{f}", boundary="transform", link="25mbit") for f in ("fp32", "stock_fp32")]
MINUTES = [recorded("race", "seconds_to_loss", boundary=name) / 60 for name in ("transform", "bf16", "fp32")]
SOONER = recorded("race", "speedup_fp32", boundary="transform")
SOONER_BF16 = SOONER / recorded("race", "speedup_fp32", boundary="bf16")
LEAST = min(reduced(ranks, "100mbit", name) for ranks in (2, 4) for name in ("fp8", "int8"))
TP = "tensor-parallel"
STATIC = cell(TP, "SmolLM2, perplexity, 3 ranks", 1)
OURS = [cell(TP, "feature-int4: a gain", 4), cell(TP, "feature-int4, 4-bit codes everywhere", 2)]
BUDGET = [cell(TP, f"budget 4.25: attention by its inputs in {bits}", column) for bits, column in ((6, 4), (8, 2))]
SAME = [
    cell(TP, start, 2) for start in ("as published: static", "4-bit codes everywhere, a gain", "the default: a budget")
]
ALL_REDUCE = stated(TP, r"2,048 tokens: ([\d.]+) times as fast as BF16")
CHECKPOINTS = [cell("memory", "a plan with at most 0.7: checkpoints", n) for n in (2, 3)]
NORMS = [cell("memory", "4 bits for norms, too: AGoQ's", n) for n in (1, 2, 3)]
AGOQ = 100 - cell("memory", "agoq |", 2)
SMOLLM = cell("convergence", "SmolLM2-135M | TransformQuant | cold", 2)
LESS, WITH_8BIT = [100 - saved("saved"), 100 - saved("peak")], 100 - saved("peak", "low-bit+8bit")
GRID = stated("predictions", r"Off by ([\d.]+) % \(median\)")
README, INDEX, COMPARISON, LIMITS = "README.md", "docs/results/index.md", "docs/comparison.md", "docs/limits.md"
PAPERS, TENSOR, SAVED = "docs/papers.md", "docs/how-to/tensor-parallel.md", "docs/how-to/saved-activations.md"
QUOTED: list[tuple[str, str, list[float]]] = [
    (INDEX, "{:.1f}x as fast as FP32 through the same stage, {:.1f}x as fast as FP32 through PyTorch's", SPEED),
    (README, "held-out loss {:.1f} times faster than FP32, and {:.1f} times faster than BF16", [SOONER, SOONER_BF16]),
    (INDEX, "the same held-out loss {:.1f}x faster", [SOONER]),
    (README, "after {:.1f} minutes, BF16 after {:.1f}, FP32 after {:.1f}", MINUTES),
    (INDEX, "FP8: {:.1f}x as fast as PyTorch's FP32 at 100 Mbit/s, 2 and 4 ranks", [LEAST]),
    (PAPERS, "{:.1f}x at 100 Mbit/s, 2 and 4 ranks", [LEAST]),
    (COMPARISON, "FP8 of lowbit {:.2f}x, PowerSGD (rank 4) {:.1f}x",
     [reduced(2, "100mbit", "fp8"), reduced(2, "100mbit", "powersgd")]),
    (LIMITS, "{:.2f}x (FP8) and {:.2f}x (INT8) over FP32", [reduced(4, "1gbit", f) for f in ("fp8", "int8")]),
    (LIMITS, "FP8 {:.2f}x over BF16", [reduced(4, "1gbit", against="bf16")]),
    (README, "{:.0f} % less saved, {:.0f} % less at the peak of a step than under BF16 autocast", LESS),
    (INDEX, "{:.0f} % less saved, {:.0f} % less at the peak of a step than under BF16 autocast", LESS),
    (INDEX, "4096 tokens; {:.0f} % with 8-bit gradients and optimizer", [WITH_8BIT]),
    (LIMITS, "the peak falls by {:.0f} %", [WITH_8BIT]),
    (PAPERS, "{:.0f} % less at 4096 tokens, 2 layers; as published: {:.0f} % less", [WITH_8BIT, AGOQ]),
    (SAVED, "a small Llama kept {:.0f} % less", LESS),
    (COMPARISON, "checkpointing keeps {:.0f} % of the saved bytes, peaks at {:.0f} % of the memory and takes {:.0f} %",
     [saved(field, "checkpoint") for field in ("saved", "peak", "time")]),
    (COMPARISON, "keeps {:.0f} %, peaks at {:.0f} % and takes {:.0f} %", [saved(f) for f in ("saved", "peak", "time")]),
    (COMPARISON, "fell from {:.0f} % to {:.0f} % of BF16 autocast", [saved("peak"), saved("peak", "low-bit+8bit")]),
    (INDEX, "16 layers: {:.2f} of the peak of checkpointing", CHECKPOINTS),
    (PAPERS, "({:+.4f}, {:+.4f}, {:+.4f}), ours", NORMS),
    (SAVED, "lost {:.3f}, {:.3f} and {:.3f} nats", NORMS),
    (README, "an all-reduce is {:.1f} times as fast", [ALL_REDUCE]),
    (INDEX, "2048 tokens: {:.1f}x as fast as PyTorch's BF16", [ALL_REDUCE]),
    (COMPARISON, "{:.1f}x PyTorch's BF16 all-reduce", [ALL_REDUCE]),
    (LIMITS, "{:.1f}x over BF16 at 2048 tokens", [ALL_REDUCE]),
    (PAPERS, "2 ranks: {:.1f}x BF16", [ALL_REDUCE]),
    (TENSOR, "summed 2048 tokens {:.1f} times as fast", [ALL_REDUCE]),
    (INDEX, "{:.1f} % of its perplexity with 4-bit codes, {:.1f} % with a budget", [OURS[1], BUDGET[1]]),
    (INDEX, "by default it gives {:.1f} % of the answers", [SAME[2]]),
    (PAPERS, "as published {:.1f} %, ours in 4 bits {:.1f} %, our default {:.1f} %", SAME),
    (INDEX, "and {:.1f} % with the published format", [STATIC]),
    (LIMITS, "4 bits everywhere keep {:.1f} % of an encoder's 10 nearest neighbours", OURS),
    (LIMITS, "{:.1f} % of a language model's perplexity; a budget with inputs keeps {:.1f} %", [OURS[1], *BUDGET]),
    (PAPERS, "ours in 4 bits {:.1f} %, with a budget of 4.25 bits {:.1f} %", [OURS[0], BUDGET[0]]),
    (PAPERS, "3 ranks: as published {:.1f} %, ours", [STATIC]),
    (PAPERS, "ours in 4 bits {:.1f} %, ours with a budget of 4.25 bits {:.2f} %", [OURS[1], BUDGET[1]]),
    (INDEX, "perplexity times {:.3f}", [SMOLLM]),
    (INDEX, "off by {:.1f} % (median)", [GRID]),
]  # fmt: skip


def test_pages_quote_what_was_recorded():
    pages = {page: plain(ROOT / page) for page, _, _ in QUOTED}
    quotes = [(page, phrase.format(*figures)) for page, phrase, figures in QUOTED]
    assert [(page, text) for page, text in quotes if text not in pages[page]] == []
