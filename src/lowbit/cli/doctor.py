"""`lowbit doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.extensions import extension
from lowbit.cli.text import columns, wrapped
from lowbit.terminal import console

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser
    from lowbit.report import Row

_HEADINGS = {"stop": "STOPS", "warning": "warning", "note": "note"}


class Doctor:
    """`lowbit doctor`."""

    summary = "Check machines before they train together; write cluster.toml."
    examples: tuple[str, ...] = ("lowbit doctor run.toml --meet 192.168.1.10:29400",)

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit.cli.parser import Parser
        from lowbit.doctor.settings import DoctorSettings

        parser = Parser(program, self.summary, DoctorSettings, arguments=("recipe",), examples=self.examples)
        parser.add_argument(
            "--json", metavar="FILE", help="Write the rows to this file, and a page next to it (.html). -: print them."
        )
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Check, print and write; exit with 1 if anything would stop the training."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before importing PyTorch: else it logs C++ traces
        settings, options = self.parser(program).resolve(words)
        from lowbit.doctor.settings import check_place

        check_place(settings)  # before the slow imports
        from lowbit.doctor.command import COMMAND, examine, write_output
        from lowbit.job.output import end
        from lowbit.report import Report, check_output, machine

        file = options.get("json")
        check_output(Path(file) if file and file != "-" else None)
        rows, writes = examine(settings)
        report = Report(command=COMMAND.name, settings=settings, machine=machine(), rows=rows)
        ending = write_output(settings, rows) if writes else ""
        if file == "-":
            json.dump({"rows": rows}, sys.stdout)
        else:
            _show(rows, COMMAND.tables[1:], ending)
        if file and file != "-":
            report.write_json(file)
            if results := extension("results"):
                results.write_results(COMMAND, Path(file))
        stops = any(row["kind"] == "finding" and row["level"] == "stop" for row in rows)
        end(int(stops))  # skips destructors: those of a broken process group can wait for machines that are gone


def _show(rows: Sequence[Row], tables: Sequence[Any], ending: str) -> None:
    """Print one page: problems with their fixes, then the machines and links."""
    findings = [row for row in rows if row["kind"] == "finding"]
    count = sum(row["level"] == "stop" for row in findings)
    print("Nothing would stop the training." if not count else f"{count} of these would stop the training:")
    for row in findings:
        where = f"{row['machine']}: " if row["machine"] else ""
        print("\n".join(wrapped(f"{_HEADINGS[row['level']]:<8}{where}{row['what']}", columns(), 8)))
        if row["fix"]:
            print("\n".join(wrapped(f"        → {row['fix']}", columns(), 10)))
    print()
    for table in tables:
        console().print(table.render(rows))
    if ending:
        print(ending)
