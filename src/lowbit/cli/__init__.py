"""The command line: parse, call, show. A command's modules are imported only when it is chosen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lowbit import __version__
from lowbit.cli.app import COMMANDS, CliCommand
from lowbit.cli.errors import one_line_errors
from lowbit.terminal import filtered

__all__ = ["main"]


def main(words: Sequence[str] | None = None, *, program: str = "lowbit", command: CliCommand = COMMANDS) -> None:
    """Run the `lowbit` command.

    Args:
        words: the command line without the program; if omitted, this process's.
        program: the program's name in help.
        command: runs the words.

    Raises:
        SystemExit: 2 for a wrong value, file or installation, 1 for a run that failed.
    """
    # PyTorch writes pages of stack traces when a store ends or does not answer; our errors name the cause in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    given = list(sys.argv[1:] if words is None else words)
    with filtered(), one_line_errors("--traceback" in given):
        if given[:1] == ["--version"]:
            print(f"lowbit {__version__}")
        else:
            command(program, [word for word in given if word != "--traceback"])
