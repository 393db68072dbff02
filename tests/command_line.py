"""The command line within this process, for tests."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from lowbit_run.cli import main


class Outcome(NamedTuple):
    """Outcome of a command."""

    exit_code: int
    stdout: str
    stderr: str
    exception: Exception | None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*words: str, columns: int = 160) -> Outcome:
    """Run `lowbit` with these words; an error that it lets through is `exception`, and code 1."""
    stdout, stderr = io.StringIO(), io.StringIO()
    code, exception = 0, None
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    with mock.patch.dict(os.environ, environment), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            code, exception = 1, error
    return Outcome(code, stdout.getvalue(), stderr.getvalue(), exception)
