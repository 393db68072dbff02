"""Commands that measure: each is a `lowbit.report.Command`, imported only when it is chosen."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.extensions import extension

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser
    from lowbit.report import Command


def measurements(package: str) -> dict[str, Measurement]:
    """Return the commands whose modules a package lists in its COMMANDS."""
    return {name: Measurement(place) for name, place in importlib.import_module(package).COMMANDS.items()}


class Measurement:
    """A `lowbit.report.Command` as a word of the command line.

    Args:
        place: the command's module, such as "lowbit.plan.memory", and after a colon its name, unless it is COMMAND.
        summary: one line for lists of commands; if omitted, the first line of the module's docstring.
    """

    def __init__(self, place: str, summary: str = "") -> None:
        self.module, _, name = place.partition(":")
        self.name, self._summary = name or "COMMAND", summary

    @property
    def command(self) -> Command:
        """Import and return the declaration."""
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def summary(self) -> str:
        """One line for lists of commands; found by reading the module's source, without importing it."""
        if self._summary or self.name != "COMMAND":  # a docstring of several commands describes all
            return self._summary or self.command.summary
        package, *within = self.module.split(".")
        file = Path(importlib.import_module(package).__path__[0], *within).with_suffix(".py")
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        line = text.partition("\n")[0].rpartition("`: ")[2]
        return line[:1].upper() + line[1:]

    @property
    def examples(self) -> tuple[str, ...]:
        """Whole command lines for its help."""
        return self.command.examples

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit.cli.parser import Parser

        parser = Parser(program, self.command.summary, self.command.settings, examples=self.examples)
        parser.add_argument(
            "--json", metavar="FILE", type=Path, help="Write the rows to this file, and a page next to it (.html)."
        )
        parser.add_argument(
            "--png", metavar="FILE", type=Path, help="Draw a chart into this file (.png, .svg or .pdf)."
        )
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Measure, and show and write the results."""
        settings, options = self.parser(program).resolve(words)
        from lowbit.report import execute

        command, json, png = self.command, options.get("json"), options.get("png")
        results = extension("results")
        if png is not None:
            if results is None:
                raise ValueError(f"--png is {str(png)!r}, and nothing draws: lowbit's benchmarks are not installed")
            results.check_picture(png)
        report = execute(command, settings, json=json)
        if results is not None and os.environ.get("RANK", "0") == "0":
            if png is not None:
                results.draw_results(command, report.rows, png)
            if json is not None:
                results.write_results(command, json)
