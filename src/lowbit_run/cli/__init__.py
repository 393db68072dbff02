"""The command line: parse, call, show. A command's modules are imported only when it is chosen."""

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from lowbit import __version__
from lowbit.escape import one_line
from lowbit_run.cli.app import COMMANDS
from lowbit_run.job.output import end
from lowbit_run.terminal import filtered

__all__ = ["main"]


def main(
    words: Sequence[str] | None = None, *, program: str = "lowbit", command: Callable[[str, list[str]], None] = COMMANDS
) -> None:
    """Run the `lowbit` command.

    Args:
        words: the command line without the program; if omitted, this process's.
        program: the program's name in help.
        command: runs the words.

    Without `words` it ends the process, otherwise it returns.

    Raises:
        SystemExit: 2 for a wrong value, file or installation, 1 for a run that failed, 130 or 143 for an interruption.
    """
    # PyTorch writes pages of stack traces when a store ends or does not answer; our errors name the cause in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    process = _own_process() if words is None else nullcontext()
    words = list(sys.argv[1:] if words is None else words)
    others_wait = words[:1] in (["train"], ["generate"]) and "--dry-run" not in words
    with process, filtered(), one_line_errors("--traceback" in words, others_wait=others_wait):
        if words[:1] == ["--version"]:
            print(f"lowbit {__version__}")
        else:
            command(program, [word for word in words if word != "--traceback"])
        sys.stdout.flush()  # a full disk is an error


@contextmanager
def _own_process() -> Iterator[None]:
    """Run the block and all exit functions, then end this process without ending the interpreter.

    While it ends, a thread of PyTorch that still holds tensors would abort a run that has succeeded (`wire.threads`).
    """
    code: object = None
    try:
        yield
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = FAILURE
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = FAILURE
    atexit._run_exitfuncs()
    end(code or 0)


TRAIN = "train"
"""The extra that every command needs."""
_OURS = ("lowbit", "lowbit_run", "lowbit_lab")
_TRAIN = ("pydantic", "transformers", "tokenizers", "safetensors", "rich", "tensorboard")
EXTRAS = dict.fromkeys(_TRAIN, TRAIN) | {
    "matplotlib": "lab",
    "datasets": "datasets",
    "pyarrow": "datasets",
    "torchao": "8bit",
    "lm_eval": "tasks",
    "accelerate": "tasks",
    "plotly": "report",
    "jinja2": "report",
}
USAGE, FAILURE, INTERRUPTED = 2, 1, 130


@contextmanager
def one_line_errors(traceback: bool, *, others_wait: bool = False) -> Iterator[None]:
    """Turn an expected error into one line and an exit code.

    A wrong value, a bad file or a missing extra exits with 2, a failed run with 1, Ctrl-C with 130, a run that SIGTERM
    ended with 143. Anything else is a bug in lowbit and keeps its traceback.

    Args:
        traceback: let every error through. others_wait: a rank that refuses its settings tells the others why.
    """
    try:
        yield
    except KeyboardInterrupt:
        if traceback:
            raise
        sys.stderr.write("interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        code = exit_code(error)
        if traceback or code is None:
            raise
        rank = os.environ.get("RANK")
        sys.stderr.write(f"{f'rank {rank}: ' if rank else ''}error: {describe(error)}\n")
        sys.stderr.flush()
        if rank:
            if others_wait and code == USAGE and not getattr(error, "told", False):
                from lowbit_run.job.decline import tell

                tell(describe(error))
            # Skip destructors: those of a broken process group can wait for peers that are gone.
            sys.stdout.flush()
            os._exit(code)
        raise SystemExit(code) from None


def exit_code(error: Exception) -> int | None:
    """Return the exit code of an error; None for a bug in lowbit."""
    if getattr(error, "interrupted", False):
        return getattr(error, "code", FAILURE)
    if isinstance(error, ModuleNotFoundError):
        return USAGE if _extra(error) else None
    if isinstance(error, ConnectionError | ChildProcessError | TimeoutError):
        return FAILURE
    if isinstance(error, ValueError | TypeError | OSError):
        return USAGE
    if isinstance(error, RuntimeError) and type(error).__module__.partition(".")[0] in _OURS:
        return FAILURE
    return None


def describe(error: Exception) -> str:
    """Describe an error on one line."""
    if isinstance(error, ModuleNotFoundError):
        return f'{error.name} is missing; install it with: pip install "lowbit[{_extra(error)}]"'
    if isinstance(error, OSError) and error.filename is not None:
        return one_line(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return one_line(str(error))


def _extra(error: ModuleNotFoundError) -> str | None:
    return EXTRAS.get((error.name or "").partition(".")[0])
