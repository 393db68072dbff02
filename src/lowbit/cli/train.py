"""`lowbit train`, `lowbit config` and `lowbit demo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser

_SHORT = {
    "pipeline.ranks": "--ranks",
    "run.resume": "--resume",
    "run.allow_change": "--allow-change",
    "run.supervise": "--supervise",
}


class Config:
    """`lowbit config`."""

    summary = "Print a training run's configuration as TOML: all keys, what they mean, what is allowed."

    def parser(self, program: str) -> Parser:
        """Parser of its command line."""
        from lowbit.cli.parser import Parser
        from lowbit.train import TrainConfig

        parser = Parser(program, self.summary, TrainConfig, short=_SHORT)
        parser.add_argument("config", nargs="?", help="TOML file; what it leaves out keeps its default.")
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Print the configuration."""
        from lowbit.config import to_toml

        print(to_toml(self.parser(program).resolve(words, "config")[0]), end="")


class Train(Config):
    """`lowbit train`."""

    summary = "Train a causal language model: on local ranks, or as one rank under torchrun."

    def parser(self, program: str) -> Parser:
        """Parser of its command line."""
        parser = super().parser(program)
        parser.add_argument(
            "--dry-run", action="store_true", help="Check everything that needs no peers, show what would run, and end."
        )
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Train, or only check the run."""
        config, options = self.parser(program).resolve(words, "config")
        if options.get("dry_run"):
            from lowbit.cli.dry_run import dry_run

            return dry_run(config)
        from lowbit.cli.show import show_summary
        from lowbit.train import run

        if (outcome := run(config)) is not None:
            show_summary(outcome)


class Demo:
    """`lowbit demo`."""

    summary = "Train a small Llama over a 100 Mbit/s link, in FP32 and in TAH-Quant, side by side."

    def parser(self, program: str) -> Parser:
        """Parser of its command line."""
        from lowbit.cli.parser import Parser
        from lowbit.config import section

        @section()
        class DemoConfig:
            """Where the demo writes."""

            output: str = "runs/demo"
            """Folder for tables, picture and models."""

        return Parser(program, self.summary, DemoConfig)

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Train and compare."""
        settings, _ = self.parser(program).resolve(words)
        from lowbit.bench.demo import run

        run(Path(settings.output))
