"""The command line: parse, call, show. What a command needs is imported when it is chosen."""

from __future__ import annotations

import os
import sys

try:
    import typer  # noqa: F401
except ModuleNotFoundError:
    sys.exit('error: the command line needs typer; install it with: pip install "lowbit[train]"')

from lowbit.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """The `lowbit` command."""
    # PyTorch writes pages of stack traces when a store ends or does not answer; errors name the cause in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    app(prog_name="lowbit")
