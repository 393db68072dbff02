"""The commands: each makes its parser, and imports what it runs only when it is chosen."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit import escape
from lowbit_run.terminal import columns, console, print_pairs, wrapped, wrote

if TYPE_CHECKING:
    from lowbit_run.cli.parser import Parser
    from lowbit_run.report import Command, Row
    from lowbit_run.train import Summary, TrainConfig


def extension(name: str) -> Any | None:
    """Load the object that the entry point of this name refers to; None if it is not installed.

    Args:
        name: "commands" (a function that returns commands by name) or "results" (a module that makes pictures and
            pages of results).
    """
    try:
        points = distribution("lowbit").entry_points.select(group="lowbit.cli", name=name)
    except PackageNotFoundError:  # a plain checkout on PYTHONPATH
        return None
    return next((point.load() for point in points), None)


def measurements(package: str) -> dict[str, Measurement]:
    """Return the commands whose modules a package lists in its COMMANDS."""
    return {name: Measurement(place) for name, place in importlib.import_module(package).COMMANDS.items()}


class Measurement:
    """A `lowbit_run.report.Command` as a word of the command line.

    Args:
        place: the command's module, such as "lowbit_run.plan.memory", and after a colon its name, unless it is COMMAND.
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
        from lowbit_run.cli.parser import Parser

        parser = Parser(program, self.command.summary, self.command.settings, examples=self.examples)
        for option, about in (
            ("--json", "Write the rows to this file, and a page next to it (.html)."),
            ("--png", "Draw a chart into this file (.png, .svg or .pdf)."),
        ):
            parser.add_argument(option, metavar="FILE", type=Path, help=about)
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Measure, and show and write the results."""
        settings, options = self.parser(program).resolve(words)
        from lowbit_run.report import execute
        from lowbit_run.report.page import is_ours

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
        if os.environ.get("RANK", "0") == "0":
            pairs = list(command.ending(settings))
            if json is not None:
                page = json.with_suffix(".html")
                pairs += [("results", str(json)), *([("page", str(page))] if is_ours(page) else [])]
                pairs += [] if any(name == "next" for name, _ in pairs) else [wrote("", json, _COMPARES)[1]]
            if pairs:
                print_pairs(pairs)


_SHORT = {  # the word alone
    key: f"--{key.rpartition('.')[2].replace('_', '-')}"
    for key in ("pipeline.ranks", "run.resume", "run.allow_change", "run.overwrite", "run.supervise", "run.trace")
}
_COMMON = ("model.pretrained", "data.text", "pipeline.forward", "run.output", "run.steps", "run.device")


class Config:
    """`lowbit config`."""

    summary = "Print the configuration of a run as TOML, every key explained."
    examples: tuple[str, ...] = ("lowbit config > run.toml", "lowbit config run.toml --run.steps 1000")

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit_run.cli.parser import Parser
        from lowbit_run.train import TrainConfig

        parser = Parser(program, self.summary, TrainConfig, short=_SHORT, common=_COMMON, examples=self.examples)
        parser.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file; options override it.")
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Print the configuration."""
        from lowbit_run.config import to_toml

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
        about = "Check the run as far as one machine can, print it, and start nothing."
        parser.add_argument("--dry-run", action="store_true", help=about)
        about = "Download what model.pretrained or data.dataset names on the Hugging Face Hub, without asking."
        parser.add_argument("--yes", action="store_true", help=about)
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Train, or only check the run."""
        config, options = self.parser(program).resolve(words, "config")
        if config.model.pretrained:
            from lowbit_run.train.hub import with_model

            config = with_model(config, agreed=options.get("yes", False))
        if config.data.dataset:
            from lowbit_run.train.hub import check_dataset

            check_dataset(config, agreed=options.get("yes", False))
        if options.get("dry_run"):
            from lowbit_run.train.launch import check_early

            check_early(config)
            from lowbit_run.cli.dry_run import dry_run

            return dry_run(config)
        from lowbit_run.job.output import passed_on
        from lowbit_run.report.training import PAGE
        from lowbit_run.train import run

        # Under torchrun, which forwards their output, only ranks of replicas have threads that must not stop.
        awaited = config.elastic.lighthouse or ("RANK" not in os.environ and (config.ranks > 1 or config.run.supervise))
        with passed_on() if awaited else nullcontext():
            if (outcome := run(config)) is None:
                return
            if os.environ.get("RANK", "0") == "0":
                print_pairs(_lines(config, outcome, Path(config.run.output) / PAGE))
                if config.run.save_merged:
                    print_pairs([("merged model", str(Path(config.run.output) / "merged"))])
            elif "LOCAL_RANK" not in os.environ:  # somebody started this rank, and waits for its last line
                print("finished; the results are on rank 0's machine")


def _generates(config: TrainConfig, folder: Path) -> str:
    """Return the command that answers with what a run has made, in the same format of weights."""
    from lowbit_run.train.launch import on_several_machines

    model, words = config.model, ["lowbit generate", shlex.quote(str(folder))]
    if config.lora.rank and model.weights not in (None, "bf16"):
        words += [f"--weights {model.weights}", *["--double-quantization"] * model.double_quantization]
    where = " (on each machine, with its RANK, once it has this folder)" if on_several_machines() else ""
    return f'{" ".join(words)} --prompt "..."{where}'


def _lines(config: TrainConfig, summary: Summary, page: Path) -> Iterator[tuple[str, str]]:
    if summary.loss is not None:
        yield "training loss", f"{summary.loss:.4f} (mean of the last steps)"
    if summary.held_out_loss is not None:
        yield "held-out loss", f"{summary.held_out_loss:.4f}"
    if summary.exact_match is not None:
        before = "" if summary.exact_match_before is None else f", {summary.exact_match_before:.1%} before training"
        yield "exact match", f"{summary.exact_match:.1%}{before}"
    yield from summary.words.items()
    if summary.tokens_per_second is not None:
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s"
    if summary.bits_forward is not None and summary.bits_backward is not None:
        yield "bits per element", f"{summary.bits_forward:.2f} forward, {summary.bits_backward:.2f} backward"
    if summary.bits_gradients is not None:
        yield "gradients", f"{summary.bits_gradients:.2f} bits per element between pipelines"
    if summary.bytes_sent:
        sent, saved = summary.bytes_sent / 1e6, summary.bytes_saved / 1e6
        yield "traffic", f"{sent:,.1f} MB sent, {saved:z,.1f} MB less than in float32"
        parts = sorted(summary.parts.items(), key=lambda part: -part[1])
        yield "of that", ", ".join(f"{name} {nbytes / 1e6:,.1f}" for name, nbytes in parts)
    if summary.formats:
        from lowbit_run.train.auto import FormatChoice, described, why

        choice = FormatChoice.of(summary.formats[-1])
        yield "few bits", f"{described(choice.formats)}: {why(choice)}"
    if page.exists():
        yield "report", str(page)
    if summary.model is not None:
        yield "model", summary.model
        yield "next", _generates(config, page.parent)
    else:
        following = _COMPARES if page.exists() else "lowbit report {} (writes a page about it)"
        yield "next", following.format(shlex.quote(str(page.parent)))


class Generate:
    """`lowbit generate`."""

    summary = "Answer prompts with a model that is spread over machines."
    examples: tuple[str, ...] = (
        'lowbit generate runs/qlora --weights nf4 --prompt "What is 12 times 9?"',
        "lowbit generate runs/qlora --weights nf4 --prompts questions.txt",
        "lowbit generate runs/qlora --weights nf4 --score held_out.jsonl",
    )

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit_run.cli.parser import Parser
        from lowbit_run.generate.settings import GenerateSettings

        return Parser(program, self.summary, GenerateSettings, arguments=("folder",), examples=self.examples)

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Answer, or score."""
        settings, _ = self.parser(program).resolve(words)
        from lowbit_run.generate.launch import run

        run(settings)


class Export:
    """`lowbit export`."""

    summary = "Make a model of a checkpoint, in Hugging Face format."
    examples: tuple[str, ...] = (
        "lowbit export runs/train",
        "lowbit export runs/train/checkpoints/step-00000100 --output model",
    )

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit_run.cli.parser import Parser
        from lowbit_run.config import section

        @section()
        class ExportConfig:
            """Output of the command."""

            output: str = ""
            """Folder for the model, new or empty. If omitted, one named after the step in the folder of the run."""

        parser = Parser(program, self.summary, ExportConfig, examples=self.examples)
        about = "Folder of a run, for its newest step, or of a step in its `checkpoints`."
        parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=about)
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Write the model and print its path."""
        settings, options = self.parser(program).resolve(words)
        from lowbit_run.train.from_checkpoint import export

        folder = export(options["checkpoint"], Path(settings.output) if settings.output else None)
        print_pairs(wrote("model", folder, 'lowbit generate {} --prompt "..."'))


_HEADINGS = {"stop": "STOPS", "warning": "warning", "note": "note"}


class Doctor:
    """`lowbit doctor`."""

    summary = "Check machines before they train together; write cluster.toml."
    examples: tuple[str, ...] = ("lowbit doctor run.toml --meet 192.168.1.10:29400",)

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit_run.cli.parser import Parser
        from lowbit_run.doctor.settings import DoctorSettings

        parser = Parser(program, self.summary, DoctorSettings, arguments=("recipe",), examples=self.examples)
        about = "Write the rows to this file, and a page next to it (.html). -: print them."
        parser.add_argument("--json", metavar="FILE", help=about)
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Check, print and write; exit with 1 if anything would stop the training."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before importing PyTorch: else it logs C++ traces
        settings, options = self.parser(program).resolve(words)
        from lowbit_run.doctor.settings import check_place

        check_place(settings)  # before the slow imports
        from lowbit_run.doctor.command import COMMAND, examine, write_output
        from lowbit_run.job.output import end
        from lowbit_run.report import Report, check_output, machine

        printed = options.get("json") == "-"
        file = Path(options["json"]) if options.get("json") and not printed else None
        check_output(file)
        if file and settings.output and file.resolve() == Path(settings.output).resolve():
            raise ValueError(f"--json and output are both {file}; allowed: two files")
        if file and file.exists():
            Report.read_json(file, command=COMMAND.name)  # another file is not replaced
        rows, writes = examine(settings)
        report = Report(command=COMMAND.name, settings=settings, machine=machine(), rows=rows)
        ending = write_output(settings, rows) if writes else ""
        if printed:
            json.dump({"rows": rows}, sys.stdout)
        else:
            _show(rows, COMMAND.tables[1:], ending)
        if file:
            report.write_json(file)
            if results := extension("results"):
                results.write_results(COMMAND, file)
        stops = any(row["kind"] == "finding" and row["level"] == "stop" for row in rows)
        end(int(stops))  # skips destructors: those of a broken process group can wait for machines that are gone


def _show(rows: Sequence[Row], tables: Sequence[Any], ending: str) -> None:
    findings = [row for row in rows if row["kind"] == "finding"]
    count = sum(row["level"] == "stop" for row in findings)
    number = "1 finding" if count == 1 else f"{count} findings"
    print(f"{number} would stop the training:" if count else "Nothing would stop the training.")
    for row in findings:
        where = f"{row['machine']}: " if row["machine"] else ""
        text = wrapped(f"{_HEADINGS[row['level']]:<8}{where}{row['what']}", columns(), 8)
        print("\n".join(text + (wrapped(f"        → {row['fix']}", columns(), 10) if row["fix"] else [])))
    print()
    for table in tables:
        console().print(table.render(rows))
    if ending:
        print(ending)


_COMPARISON = Path("comparison.html")
_COMPARES = "lowbit report {} OTHER (compares it with another)"
log = escape.logger(__name__)


class MakeReport:
    """`lowbit report`."""

    summary = "Write a page about a run or results, or compare several."
    examples: tuple[str, ...] = (
        "lowbit report runs/train",
        "lowbit report runs/fp32 runs/transform --output comparison.html",
        "lowbit report speed.json",
    )

    def parser(self, program: str) -> Parser:
        """Make the parser of the command line."""
        from lowbit_run.cli.parser import Parser
        from lowbit_run.config import section

        @section()
        class ReportConfig:
            """Output of the command."""

            output: str = ""
            """File for the page. If omitted, `report.html` in the folder of the run, the file of results with .html, or
            `comparison.html` for several."""

        parser = Parser(program, self.summary, ReportConfig, examples=self.examples)
        about = "Folder of `lowbit train`, or file that `--json` wrote."
        parser.add_argument("run", metavar="RUN", nargs="+", help=about)
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Write the page and print its path."""
        settings, options = self.parser(program).resolve(words)
        runs = options["run"]
        print(write([Path(run) for run in runs], Path(settings.output) if settings.output else None))
        following = f"; next: {_COMPARES.format(shlex.quote(runs[0]))}" if len(runs) == 1 else ""
        sys.stderr.write(f"open it in a browser{following}\n")  # programs take the path from standard output


def write(paths: Sequence[Path], output: Path | None = None) -> Path:
    """Write a page about runs or files of results, leaving out unreadable ones of several, and return its path.

    Raises:
        ValueError: nothing can be read, runs and results are mixed, or the page cannot be written.
    """
    from lowbit_run.report import training
    from lowbit_run.report.page import write_page
    from lowbit_run.report.run_files import RunFiles, read_run

    measured = extension("results")
    read, problems = dict[Path, object](), list[str]()
    for path in dict.fromkeys(paths):
        try:
            if path.is_file() and measured is None:
                raise ValueError(f"{path} is a file of results, and lowbit's benchmarks are not installed")
            read[path] = measured.read_results(path) if path.is_file() and measured else read_run(path)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if not read:
        raise ValueError(problems[0])
    for problem in problems:
        log.warning("%s", problem)
    runs = [value for value in read.values() if isinstance(value, RunFiles)]
    results = {path: value for path, value in read.items() if isinstance(value, tuple)}
    if runs and results:
        raise ValueError("runs and files of results are given; allowed: all of one kind, which can be compared")
    if len(runs) == 1 and not problems:
        page, place = training.run_page(runs[0]), runs[0].folder / training.PAGE
    elif runs:
        page, place = training.comparison_page(runs, problems), _COMPARISON
    else:
        assert measured is not None  # files of results were refused above without it
        page = measured.results_page(results, problems)
        place = next(iter(results)).with_suffix(".html") if len(paths) == 1 else _COMPARISON
    write_page(page, output or place)
    if output is None and runs and place.name == training.PAGE:
        from lowbit_run.train.folder import RunFolder

        RunFolder(place.parent).note(training.PAGE)
    return output or place
