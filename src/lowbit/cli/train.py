"""`lowbit train` and `lowbit config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.text import print_pairs

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser
    from lowbit.train import Summary

_SHORT = {
    "pipeline.ranks": "--ranks",
    "run.resume": "--resume",
    "run.allow_change": "--allow-change",
    "run.overwrite": "--overwrite",
    "run.supervise": "--supervise",
    "run.trace": "--trace",
}


_COMMON = (
    "model.pretrained", "data.text", "pipeline.forward", "run.output", "run.steps", "run.device",
)  # fmt: skip


class Config:
    """`lowbit config`."""

    summary = "Print the configuration of a run as TOML, every key explained."
    examples: tuple[str, ...] = ("lowbit config > run.toml", "lowbit config run.toml --run.steps 1000")

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit.cli.parser import Parser
        from lowbit.train import TrainConfig

        parser = Parser(
            program, self.summary, TrainConfig, short=_SHORT, common=_COMMON, examples=self.examples
        )  # fmt: skip
        parser.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file; options override it.")
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Print the configuration."""
        from lowbit.config import to_toml

        print(to_toml(self.parser(program).resolve(words, "config")[0]), end="")


class Train(Config):
    """`lowbit train`."""

    summary = "Train a causal language model with low-bit communication."
    examples = (
        "lowbit train --data.text my_texts --run.output runs/first",
        "lowbit train run.toml --resume",
        "torchrun --nproc-per-node 2 -m lowbit train run.toml",
    )

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        parser = super().parser(program)
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="Check the run as far as one machine can, print it, and start nothing.",
        )
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Train, or only check the run."""
        config, options = self.parser(program).resolve(words, "config")
        if options.get("dry_run"):
            from lowbit.train.launch import check_early

            check_early(config)
            from lowbit.cli.dry_run import dry_run

            return dry_run(config)
        from lowbit.job.output import passed_on
        from lowbit.report.training import PAGE
        from lowbit.train import run

        # Under torchrun, which forwards their output, only ranks of replicas have threads that must not stop.
        awaited = config.elastic.lighthouse or ("RANK" not in os.environ and (config.ranks > 1 or config.run.supervise))
        with passed_on() if awaited else nullcontext():
            if (outcome := run(config)) is None:
                return
            if os.environ.get("RANK", "0") == "0":
                print_pairs(_lines(outcome, Path(config.run.output) / PAGE))
            elif "LOCAL_RANK" not in os.environ:  # somebody started this rank, and waits for its last line
                print("finished; the results are on rank 0's machine")


def _lines(summary: Summary, page: Path) -> Iterator[tuple[str, str]]:
    if summary.loss is not None:
        yield "training loss", f"{summary.loss:.4f} (mean of the last steps)"
    if summary.held_out_loss is not None:
        yield "held-out loss", f"{summary.held_out_loss:.4f}"
    if summary.exact_match is not None:
        before = "" if summary.exact_match_before is None else f", {summary.exact_match_before:.1%} before training"
        yield "exact match", f"{summary.exact_match:.1%}{before}"
    if summary.tokens_per_second is not None:
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s"
    if summary.bits_forward is not None and summary.bits_backward is not None:
        yield "bits per element", f"{summary.bits_forward:.2f} forward, {summary.bits_backward:.2f} backward"
    if summary.bits_gradients is not None:
        yield "gradients", f"{summary.bits_gradients:.2f} bits per element between pipelines"
    if summary.bytes_sent:
        sent, saved = summary.bytes_sent / 1e6, summary.bytes_saved / 1e6
        yield "traffic", f"{sent:,.1f} MB sent, {saved:,.1f} MB less than in float32"
        parts = sorted(summary.parts.items(), key=lambda part: -part[1])
        yield "of that", ", ".join(f"{name} {nbytes / 1e6:,.1f}" for name, nbytes in parts)
    if page.exists():
        yield "report", str(page)
    if summary.model is not None:
        yield "model", summary.model
