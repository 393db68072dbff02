"""`make speeds`, `python -m benchmarks.speeds`: record the speeds of the documentation at one sitting.

Figures of two days cannot stand in one table, nor those of two machines on two pages. So one command runs every
measurement whose speeds README, docs/index, pipelines, codecs, predictions, first-run and two-pcs state; then it writes
the pages and draws the figures from the records. Each part is a process with a time limit. A part that fails does not
end the others: its record and its pages stay as they are, and the command ends with status 1.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import picture
from benchmarks.pages import ROOT, write
from benchmarks.speed_blocks import FORMATS, STOCK
from benchmarks.terminals import draw

LEAST = 120.0
"""Least seconds after which a part is ended."""
GRACE = 20.0
"""Seconds between SIGINT and SIGKILL for a part that has exceeded its limit: it removes its hosts."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A measurement.

    Args:
        file: of the record, below docs/results/data. Records in speeds/ have no figure of their own.
        title: what is measured.
        program: what Python runs.
        options: of that program; quick: other values of some, for a test.
        minutes: that it takes on two quiet cores; it is ended after twice as long.
        output: the option that names the record. made: the record, if the program chooses its name in a folder.
    """

    file: str
    title: str
    program: tuple[str, ...]
    minutes: float
    options: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, str] = field(default_factory=dict)
    output: str = "--json"
    made: str = ""

    @property
    def name(self) -> str:
        return Path(self.file).stem

    def command(self, record: Path, *, quick: bool, texts: Path | None) -> list[str]:
        """Return its command line."""
        options = {**self.options, **(self.quick if quick else {})}
        if texts and "--start-steps" in options:
            options |= {"--start-text": "valid.txt", "--data.text": "valid.txt", "--data.held_out": "test.txt"}
        options |= {self.output: str(record)} if self.output else {}
        words = [word for pair in options.items() for word in pair if word]
        return [sys.executable, *self.program, *words, *(() if self.output else (str(record),))]


LOWBIT = ("-m", "lowbit", "bench")
_TINY = {
    "--model.dim": "64", "--model.layers": "2", "--model.heads": "2", "--model.kv_heads": "1", "--model.ffn": "64",
    "--data.batch": "8", "--data.sequence": "128", "--pipeline.stages_per_rank": "1", "--pipeline.schedule": "1F1B",
}  # fmt: skip
_WIDE = {
    "--compute": "50ms", "--link": "25mbit,100mbit,1gbit", "--rounds": "1", "--steps": "2", "--samples": "4",
    "--precision": "fp32", "--boundary": "stock-fp32,bf16,int4,tah-quant,transform", "--model.layers": "2",
    "--model.heads": "16", "--model.kv_heads": "4", "--model.ffn": "128", "--pipeline.stages_per_rank": "1",
    "--pipeline.schedule": "1F1B", "--data.batch": "4", "--data.sequence": "512",
}  # fmt: skip
_WIDE_QUICK = {"--compute": "1ms", "--model.dim": "64", "--model.heads": "4", "--data.sequence": "16", "--steps": "1"}
_CODECS = {"--data": "gaussian", "--dtype": "float32,bfloat16", "--thread": "1", "--no-reference": ""}
PARTS = (
    Part(
        file="pipeline.json", title="Pipelines by link and format", program=(*LOWBIT, "pipeline"), minutes=8,
        options={
            "--link": "25mbit,100mbit,500mbit,1gbit,unlimited", "--boundary": ",".join((*STOCK, *FORMATS)),
            "--precision": "fp32", "--rounds": "2", "--steps": "2",
        },
        quick={**_TINY, "--rounds": "1", "--steps": "1", "--samples": "8"},
    ),
    Part(
        file="race.json", title="The same loss over 25 Mbit/s", program=("-m", "benchmarks", "race"), minutes=8,
        options={
            "--link": "25mbit", "--boundary": "fp32,bf16,transform", "--precision": "fp32", "--start-steps": "100",
            "--samples": "1280", "--epochs": "1", "--evaluations": "8", "--lr": "1e-3", "--eval-batches": "8",
        },
        quick={**_TINY, "--start-steps": "2", "--samples": "16", "--evaluations": "2", "--eval-batches": "1"},
    ),
    *(
        Part(
            file=f"speeds/width-{width}.json", title=f"Pipelines of {width} channels", program=(*LOWBIT, "pipeline"),
            minutes=minutes, options={**_WIDE, "--model.dim": str(width)}, quick=_WIDE_QUICK,
        )
        for width, minutes in ((1024, 2), (4096, 4))
    ),
    Part(
        file="speeds/codecs.json", title="Codecs on one thread", program=(*LOWBIT, "codecs"), minutes=1,
        options={
            **_CODECS, "--shape": "1,1024,4096", "--rounds": "10",
            "--codec": "int4,int8,fp8,tah-quant,tah-quant-published,transform,TransformQuant(step='message')",
        },
        quick={"--shape": "1,64,128", "--rounds": "2"},
    ),
    Part(
        file="speeds/codecs-layer.json", title="TransformQuant and a decoder layer", program=(*LOWBIT, "codecs"),
        minutes=3,
        options={**_CODECS, "--codec": "transform", "--shape": "1,512,4096", "--rounds": "3", "--layer": ""},
        quick={"--shape": "1,64,128"},
    ),
    Part(
        file="speeds/terminals.json", title="Two terminals", program=("-m", "benchmarks.terminals"), minutes=1.5,
        quick={"--steps": "2", "--fp32-steps": "2"}, output="",
    ),
    Part(
        file="speeds/demo.json", title="lowbit demo", program=("-m", "benchmarks.speeds", "--demo"), minutes=3,
        quick={"--seconds": "1"}, output="--output", made="report.json",
    ),
)  # fmt: skip


def run_part(part: Part, folder: Path, *, quick: bool, texts: Path | None) -> str:
    """Run a part in a process; return why its record is missing, or nothing.

    Args:
        folder: gets its record and its log.
        texts: has valid.txt and test.txt, which the race then takes.
    """
    record = folder / (part.name if part.made else f"{part.name}.json")
    words = part.command(record, quick=quick, texts=texts)
    # This code, whatever else is installed.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    limit = max(LEAST, 120 * part.minutes)
    # In the folder of the texts, so that records name them without the machine's folders.
    with (folder / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=texts or folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return f"ended after its limit of {limit:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        last = (folder / f"{part.name}.log").read_text("utf-8", "replace").strip().splitlines()[-1:]
        return f"exit status {process.returncode}: {''.join(last)}"
    made = record / part.made if part.made else record
    try:
        json.loads(made.read_text("utf-8"))["rows"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"no record: {error}"
    return ""


def keep(part: Part, folder: Path, data: Path, commit: str) -> None:
    """Copy a part's record to its place, with the commit of the code."""
    record = folder / part.name / part.made if part.made else folder / f"{part.name}.json"
    values = json.loads(record.read_text("utf-8"))
    values["machine"]["commit"] = commit
    if part.made:
        values["rows"] = [{k: v for k, v in row.items() if k != "curve"} for row in values["rows"]]
    file = data / part.file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", "utf-8")


def commit_of(folder: Path) -> str:
    """Return the commit of the code, and whether it has changes; "unknown" without git."""
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_pages(root: Path) -> None:
    """Write the pages and draw the figures from the records; say what stays as it is."""
    for line in write(root).left:
        say(f"left as it is: {line}")
    results = root / "docs/results"
    for name in ("race", "pipeline"):
        picture(results / f"data/{name}.json").write(results / "figures")
    if (record := results / "data/speeds/terminals.json").exists():
        draw(record, root / "docs/start/figures")
    say("wrote the pages and the figures of all records")


def say(line: str) -> None:
    """Print a line with the time."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {line}\n")
    sys.stdout.flush()


def sit(parts: Sequence[Part], root: Path, *, quick: bool, texts: Path | None) -> list[str]:
    """Run the parts in turn, keep their records and write the pages; return the names of those that failed."""
    commit, failed = commit_of(ROOT), list[str]()
    total = sum(part.minutes for part in parts)
    say(f"{len(parts)} parts at commit {commit}, {'a few minutes' if quick else f'about {total:.0f} minutes'}; "
        "nothing else should run")  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="speeds-"))
    for part in parts:
        say(f"{part.name}: {part.title}{'' if quick else f', about {part.minutes:g} minutes'}")
        began = time.monotonic()
        why = run_part(part, folder, quick=quick, texts=texts)
        say(f"{part.name}: {why or 'recorded'}, {time.monotonic() - began:.0f} s")
        if why:
            failed.append(part.name)
    for part in parts:  # all at the end, so that an interrupted sitting changes nothing
        if part.name not in failed:
            keep(part, folder, root / "docs/results/data", commit)
    write_pages(root)
    if failed:
        say(f"without a new record: {', '.join(failed)}; logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return failed


def run_demo(output: Path, seconds: float | None) -> None:
    """Run `lowbit demo`, with shorter runs for a test."""
    from lowbit_lab.bench import demo

    demo.SECONDS = seconds or demo.SECONDS
    demo.run(output)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speeds", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="only write pages and figures from the records")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and docs/ (this repository)")
    parser.add_argument("--texts", type=Path, help="folder with WikiText-2's valid.txt and test.txt (docs/papers.md), "
                        "for the race; if omitted, Python's own texts")  # fmt: skip
    parser.add_argument("--parts", default="", help=f"some only: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try it; needs --root with a copy")
    parser.add_argument("--demo", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.demo:
        run_demo(given.output, given.seconds)
        return
    if given.write:
        write_pages(given.root)
        return
    names = given.parts.split(",") if given.parts else [part.name for part in PARTS]
    if unknown := sorted(set(names) - {part.name for part in PARTS}):
        parser.error(f"--parts has {', '.join(unknown)}; allowed: {', '.join(part.name for part in PARTS)}")
    if given.quick and given.root.resolve() == ROOT.resolve():
        parser.error("--quick needs --root: a copy of README.md and docs/, for its figures mean nothing")
    if given.texts and not all((given.texts / name).is_file() for name in ("valid.txt", "test.txt")):
        parser.error(f"--texts is {given.texts}; allowed: a folder with valid.txt and test.txt")
    parts = [part for part in PARTS if part.name in names]
    if sit(parts, given.root, quick=given.quick, texts=given.texts and given.texts.resolve()):
        sys.exit(1)


if __name__ == "__main__":
    main()
