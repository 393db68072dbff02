"""`python -m benchmarks.gpu_report`: test and measure on this machine's GPU, and write docs/results/gpu.md.

Runs the GPU tests, then benchmarks of codecs, memory and training, each in a process of its own. The page
says which steps failed; the others still run. Rows are kept as JSON in runs/gpu-report.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.figures import command_of
from benchmarks.which_model import replaced
from lowbit_run.config import ConfigError
from lowbit_run.report import Command, Row, machine

PAGE, FOLDER = Path(__file__).parents[1] / "docs/results/gpu.md", Path("runs/gpu-report")
BENCHMARKS = {
    "Codecs": "bench codecs --device cuda --dtype bfloat16 --shape 8,4096,4096 --data gaussian",
    "Memory of a training step": "bench memory --device cuda --sequence 1024,4096",
    "Training, two ranks on this GPU": "bench pipeline --device cuda --link 100mbit,1gbit,unlimited "
    "--boundary fp32,bf16,int4,tah-quant,transform --model.dim 1024 --model.ffn 2816 --model.heads 16 "
    "--data.sequence 512",
}
"""Titles of sections, and what follows `lowbit`."""
UNLIMITED = ("--link 100mbit,1gbit,unlimited", "--link unlimited")
"""What is measured instead where this machine does not permit slow links."""


def tested(tests: Sequence[str], folder: Path) -> str:
    """Run tests, and return how many passed, failed and were skipped."""
    file = folder / "tests.xml"
    file.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={file}", *tests], check=False)
    if not file.exists():
        return f"The tests ended with exit status {done.returncode} before any result."
    (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
    count, failed, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", 0))
    return f"{count - failed - skipped} tests passed, {failed} failed, {skipped} were skipped."


def measured(title: str, words: str, folder: Path) -> str:
    """Run a benchmark, and return its section of the page."""
    file = folder / f"{title.split(',')[0].lower().replace(' ', '-')}.json"
    file.unlink(missing_ok=True)
    line = f"lowbit {words} --json {file}"
    done = subprocess.run([sys.executable, "-m", *line.split()], check=False, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    tables = "" if done.returncode else "\n\n".join(markdown(command_of(words), json.loads(file.read_text())["rows"]))
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return f"### {title}\n\n{tables or f'**Failed**: {last[0]}'}\n\n```console\n{line}\n```"


def markdown(command: Command, rows: Sequence[Row]) -> list[str]:
    """Return the tables of a command, without empty ones."""
    texts = []
    for table in command.tables:
        for title, columns, part in table.parts(rows):
            lines = [[column.title.replace("-\n", "").replace("\n", " ") for column in columns], ["---"] * len(columns)]
            lines += [[column.cell(row) for column in columns] for row in part]
            texts.append("\n".join([f"{title}:\n", *(f"| {' | '.join(line)} |" for line in lines)]))
    return texts


def section(benchmarks: Mapping[str, str], tests: Sequence[str], folder: Path) -> str:
    """Test and measure, and return what was measured as text for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    here = machine()
    about = f"{here['date']}, {here.get('gpu', here['cpu'])}, torch {here['torch']}, by `make gpu-report`."
    return "\n\n".join([f"{about} {tested(tests, folder)}", *(measured(*each, folder) for each in benchmarks.items())])


def main(tests: Sequence[str]) -> None:
    """Fill the page.

    Raises:
        ConfigError: PyTorch can use no GPU.
    """
    from lowbit_lab.network import SlowLink

    if not torch.cuda.is_available():
        raise ConfigError("PyTorch can use no GPU on this machine; allowed: a machine with CUDA and its PyTorch")
    slow = SlowLink.available() is None
    benchmarks = {title: words if slow else words.replace(*UNLIMITED) for title, words in BENCHMARKS.items()}
    PAGE.write_text(replaced(PAGE.read_text("utf-8"), "measured", section(benchmarks, tests, FOLDER)), "utf-8")
    sys.stdout.write(f"Wrote {PAGE}; rows are in {FOLDER}\n")


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
