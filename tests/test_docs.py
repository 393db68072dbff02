"""The documentation runs: its Python, the options of its commands, and its links.

Python blocks of one file share a namespace and run in a process of their own, in an empty folder. A block that needs
several ranks is a whole script, marked with its number of ranks: ```python torchrun=2
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lowbit.cli.app import COMMANDS, Group
from lowbit.train import ConfigError, from_mapping
from tests.forked import run_script

ROOT = Path(__file__).parents[1]
PAGES = [
    path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))) if path.exists()
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\((?!\w+:|#)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text and its first line in the page."""

    language: str
    words: tuple[str, ...]
    body: str
    line: int

    @property
    def ranks(self) -> int:
        """Ranks that a `torchrun=N` asks for; 0 without it."""
        return next((int(w.split("=")[1]) for w in self.words if w.startswith("torchrun=")), 0)


def blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        indent, info = found["indent"], found["info"].split() or [""]
        body = "".join(line.removeprefix(indent) for line in found["body"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start("body")) + 1
        yield Block(info[0], tuple(info[1:]), body, line)


def joined(parts: list[Block]) -> str:
    """One program of a page's blocks, each at its own line, so that tracebacks point into the page."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines)) + block.body.splitlines()
    return "\n".join(lines) + "\n"


def commands(text: str) -> Iterator[list[str]]:
    """Every command of the page's shell blocks, as words; where commands follow a "$ ", the rest is output."""
    for block in blocks(text):
        if block.language in ("bash", "sh", "shell", "console"):
            lines = block.body.replace("\\\n", " ").splitlines()
            entered = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            yield from (shlex.split(line, comments=True) for line in entered or lines)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(script: Path, ranks: int) -> None:
    """Assert that a script ends well, alone or as the ranks that torchrun would start."""
    done = run_script(script, ranks=ranks, folder=script.parent)
    assert done.code == 0, done.output


PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks(page.read_text()))]
TORCHRUN = [
    pytest.param(page, block, id=f"{name(page)}:{block.line}")
    for page in PYTHON
    for block in blocks(page.read_text())
    if block.ranks
]


@pytest.mark.parametrize("page", PYTHON, ids=name)
def test_python_runs(page: Path, tmp_path: Path):
    found = [b for b in blocks(page.read_text()) if b.language == "python" and not b.ranks]
    script = tmp_path / f"{page.stem}.py"
    script.write_text(joined(found))
    run(script, ranks=0)


@pytest.mark.parametrize(("page", "block"), TORCHRUN)
def test_scripts_for_several_ranks_run(page: Path, block: Block, tmp_path: Path):
    script = tmp_path / f"{page.stem}.py"
    script.write_text(joined([block]))
    run(script, block.ranks)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist_with_their_options(page: Path):
    for words in commands(page.read_text()):
        check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


def check_command(words: list[str]) -> None:
    """Assert that a `lowbit` or `make` command line names what exists; others are not ours to judge."""
    programs = [Path(word).name for word in words]
    if "lowbit" in programs:
        check_lowbit(words[programs.index("lowbit") + 1 :])
    elif programs[:1] == ["make"]:
        goals = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{re.escape(goal)}:", makefile, re.M) for goal in goals), words


def check_lowbit(words: list[str]) -> None:
    command: Any = COMMANDS
    while isinstance(command, Group) and words and not words[0].startswith("-"):
        commands = command.commands()
        assert words[0] in commands, f"no {words[0]} among: {', '.join(commands)}"
        command, words = commands[words[0]], words[1:]
    if not isinstance(command, Group):
        words = [word for word in words if word not in ("--help", "--traceback")]
        command.parser("lowbit").read(words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_training_configurations_are_understood(page: Path):
    for block in blocks(page.read_text()):
        if block.language == "toml":
            from_mapping(tomllib.loads(block.body))


SAMPLE = """
Text.

```python
x = 1
```

1. A list:
   ```python
   raise SystemExit(x != 1)
   ```

```python torchrun=2
import os; assert os.environ["WORLD_SIZE"] == "2"
```

```console
$ lowbit train config.toml \\
    --nonsense 3   # a comment
output --of the command
```

```bash
make demo
```
"""


def test_blocks_are_found_with_their_lines():
    found = list(blocks(SAMPLE))
    assert [(b.language, b.ranks, b.line) for b in found] == [
        ("python", 0, 5), ("python", 0, 10), ("python", 2, 14), ("console", 0, 18), ("bash", 0, 24)
    ]  # fmt: skip
    assert joined(found[:2]).splitlines()[9] == "raise SystemExit(x != 1)"


def test_commands_are_found_without_comments_and_output():
    assert list(commands(SAMPLE)) == [
        ["lowbit", "train", "config.toml", "--nonsense", "3"],
        ["make", "demo"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "lowbit train config.toml --nonsense 3",
        "lowbit bench nonsense",
        "lowbit bench codecs --nonsense",
        "lowbit train --model.nonsense 3",
        "lowbit nonsense",
        "make nonsense",
    ],
)
def test_a_command_that_does_not_exist_fails(command: str):
    with pytest.raises((AssertionError, ConfigError)):
        check_command(shlex.split(command))


def test_a_failing_block_fails(tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text("raise ValueError('in the page')")
    with pytest.raises(AssertionError, match="in the page"):
        run(script, ranks=0)
