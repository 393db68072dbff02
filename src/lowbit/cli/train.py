"""`lowbit train`, `lowbit config` and `lowbit demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Command:
    """A command whose parser is made when it is chosen."""

    summary: str
    make_parser: Callable[[str, str], Parser]
    run: Callable[[Parser, Sequence[str]], None]

    def parser(self, program: str) -> Parser:
        """Of its command line."""
        return self.make_parser(program, self.summary)

    def __call__(self, program: str, words: Sequence[str]) -> None:
        self.run(self.parser(program), words)


def _config_parser(program: str, summary: str) -> Parser:
    from lowbit.cli.parser import Parser
    from lowbit.train import TrainConfig

    parser = Parser(program, summary, TrainConfig, short=_SHORT)
    parser.add_argument("config", nargs="?", help="TOML file; what it leaves out keeps its default.")
    return parser


def _train_parser(program: str, summary: str) -> Parser:
    parser = _config_parser(program, summary)
    parser.add_argument(
        "--dry-run", action="store_true", help="Check everything that needs no peers, show what would run, and end."
    )
    return parser


def _demo_parser(program: str, summary: str) -> Parser:
    from lowbit.cli.parser import Parser
    from lowbit.config import section

    @section()
    class DemoConfig:
        """Where the demo writes."""

        output: str = "runs/demo"
        """Folder for tables, picture and models."""

    return Parser(program, summary, DemoConfig)


def _train(parser: Parser, words: Sequence[str]) -> None:
    config, options = parser.resolve(words, "config")
    if options.get("dry_run"):
        from lowbit.cli.dry_run import dry_run

        return dry_run(config)
    from lowbit.cli.show import show_summary
    from lowbit.train import run

    if (outcome := run(config)) is not None:
        show_summary(outcome)


def _config(parser: Parser, words: Sequence[str]) -> None:
    from lowbit.config import to_toml

    print(to_toml(parser.resolve(words, "config")[0]), end="")


def _demo(parser: Parser, words: Sequence[str]) -> None:
    settings, _ = parser.resolve(words)
    from lowbit.bench.demo import run

    run(Path(settings.output))


TRAIN = _Command("Train a causal language model: on local ranks, or as one rank under torchrun.", _train_parser, _train)
CONFIG = _Command(
    "Print a training run's configuration as TOML: all keys, what they mean, what is allowed.", _config_parser, _config
)
DEMO = _Command(
    "Train a small Llama over a 100 Mbit/s link, in FP32 and in TAH-Quant, side by side.", _demo_parser, _demo
)
