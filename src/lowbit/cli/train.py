"""`lowbit train`, `lowbit config` and `lowbit demo`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser
    from lowbit.train import TrainConfig


@dataclass(frozen=True)
class _Command:
    """A command: its parser is made when it is chosen."""

    summary: str
    make_parser: Callable[[str, str], Parser]
    run: Callable[[Parser, Sequence[str]], None]

    def parser(self, program: str) -> Parser:
        """Of its command line."""
        return self.make_parser(program, self.summary)

    def __call__(self, program: str, words: Sequence[str]) -> None:
        self.run(self.parser(program), words)


def _config_parser(program: str, summary: str) -> Parser:
    """A parser of the recipe's options, and of short ones for some of them."""
    from lowbit.cli.parser import Parser
    from lowbit.train import TrainConfig

    parser = Parser(program, summary, TrainConfig)
    parser.add_argument("config", nargs="?", help="TOML file; what it leaves out keeps its default.")
    parser.add_argument(
        "--ranks", metavar="INTEGER", dest="pipeline.ranks", help="Local processes to start: sets pipeline.ranks."
    )
    parser.add_flag(
        "--resume",
        "true",
        dest="run.resume",
        help="Go on from the newest checkpoint; --resume=auto: begin where there is none. Sets run.resume.",
    )
    parser.add_argument(
        "--allow-change",
        metavar="SECTION.KEY",
        action="append",
        help="Go on with another value of this, such as run.steps; may be repeated. Sets run.allow_change.",
    )
    parser.add_flag(
        "--supervise",
        "true",
        dest="run.supervise",
        help="Start again from the newest checkpoint when a rank, a machine or a link fails: sets run.supervise.",
    )
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
    config, _options = _read(parser, words)
    from lowbit.cli.show import show_summary
    from lowbit.train import run

    if (outcome := run(config)) is not None:
        show_summary(outcome)


def _config(parser: Parser, words: Sequence[str]) -> None:
    from lowbit.config import to_toml

    config, _ = _read(parser, words)
    print(to_toml(config), end="")  # noqa: T201


def _demo(parser: Parser, words: Sequence[str]) -> None:
    settings, _ = parser.resolve(words)
    from lowbit.bench.demo import run

    run(Path(settings.output))


def _read(parser: Parser, words: Sequence[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration that a command line means, and its other options."""
    from lowbit.config import resolve
    from lowbit.train import TrainConfig

    pairs, options = parser.read(words)
    if changes := options.get("allow_change"):
        pairs.append(("run.allow_change", json.dumps(changes)))
    return resolve(TrainConfig, options.get("config"), pairs), options


TRAIN = _Command("Train a causal language model: on local ranks, or as one rank under torchrun.", _train_parser, _train)
CONFIG = _Command(
    "Print a training run's configuration as TOML: all keys, what they mean, what is allowed.", _config_parser, _config
)
DEMO = _Command(
    "Train a small Llama over a 100 Mbit/s link, in FP32 and in TAH-Quant, side by side.", _demo_parser, _demo
)
