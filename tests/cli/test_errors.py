"""What a user can fix is one line; a fault in lowbit keeps its traceback."""

import subprocess
import sys

import pytest

from lowbit.cli.app import COMMANDS as APP
from lowbit.cli.errors import describe, exit_code, one_line_errors
from lowbit.pipeline import PeerError
from lowbit_lab.bench import COMMANDS


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("bits is 9;\n  allowed: 2 to 8"), 2, "bits is 9; allowed: 2 to 8"),
        (TypeError("x has dtype torch.int64"), 2, "x has dtype torch.int64"),
        (FileNotFoundError(2, "No such file", "text.txt"), 2, "text.txt: No such file"),
        (ConnectionError("no rank 1 at 127.0.0.1:1"), 1, "no rank 1 at 127.0.0.1:1"),
        (PeerError("rank 1 (stage 1) closed its connection", 1), 1, "rank 1 (stage 1) closed its connection"),
        (
            ModuleNotFoundError("No module named 'datasets'", name="datasets.arrow"),
            2,
            'datasets.arrow is missing; install it with: pip install "lowbit[datasets]"',
        ),
        (
            ModuleNotFoundError("No module named 'rich'", name="rich"),
            2,
            'rich is missing; install it with: pip install "lowbit[train]"',
        ),
    ],
)
def test_errors_of_the_user_are_one_line(error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, one_line_errors(traceback=False):
        raise error
    assert ended.value.code == code == exit_code(error)
    assert capsys.readouterr().err == f"error: {line}\n" == f"error: {describe(error)}\n"


def test_ctrl_c_is_a_word_and_a_code(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, one_line_errors(traceback=False):
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize("error", [ValueError("bits is 9"), PeerError("gone", 1)])
def test_the_traceback_can_be_had(error: Exception):
    with pytest.raises(type(error)), one_line_errors(traceback=True):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("fault"),
        RuntimeError("of PyTorch"),
        ModuleNotFoundError("No module named 'lowbit.fault'", name="lowbit.fault"),
    ],
)
def test_a_fault_is_not_hidden(error: Exception):
    with pytest.raises(type(error)), one_line_errors(traceback=False):
        raise error


BASE = """
import sys
from lowbit.cli import main
from lowbit_lab.bench import COMMANDS
from lowbit.cli.app import COMMANDS as APP
from lowbit.cli.errors import EXTRAS

sys.modules |= dict.fromkeys(EXTRAS)
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
        print("code 0")
    except SystemExit as end:
        print("code", end.code)
"""
NEEDS = [
    "train", "train run.toml", "train --help", "train --dry-run", "config", "config --help", "demo", "demo --help",
    "calibrate model", "evaluate model", "plan memory", *(f"bench {name}" for name in COMMANDS), "bench codecs --help",
]  # fmt: skip
NEEDS_NOT = ["", "--help", "--version", "bench", "bench --help", "plan"]


def test_a_base_install_says_what_to_install():
    words = [*NEEDS, *NEEDS_NOT, "nonsense"]
    done = subprocess.run(
        [sys.executable, "-c", BASE], input="\n".join(words), text=True, capture_output=True, check=True
    )  # fmt: skip
    codes = [line for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == ["code 2"] * len(NEEDS) + ["code 0"] * len(NEEDS_NOT) + ["code 2"], done.stderr
    told = done.stderr.splitlines()
    assert told[: len(NEEDS)] == ['error: pydantic is missing; install it with: pip install "lowbit[train]"'] * len(
        NEEDS
    )
    assert told[len(NEEDS) :] == [f"error: lowbit has no 'nonsense'; known: {', '.join(APP.commands())}"]
    assert done.stdout.count("where to begin:") == 2


def test_ctrl_c_ends_a_command_without_a_traceback():
    with pytest.raises(SystemExit) as ended, one_line_errors(False):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    with pytest.raises(KeyboardInterrupt), one_line_errors(True):
        raise KeyboardInterrupt
