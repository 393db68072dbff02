"""Errors that involve several ranks, and formatting of errors."""

from lowbit.escape import Printable, one_line


class PeerError(Printable, RuntimeError):
    """A peer ended, or did not answer in time; `rank` (in the group) seems to have failed first; -1: unknown."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class AgreementError(Printable, RuntimeError):
    """Ranks contradict each other, or some never came; the same text on every rank."""

    on_all_ranks = True


def described(error: BaseException) -> str:
    """Format an error as one line, its cause first: PyTorch's schedules wrap the errors of a model."""
    text = f"{type(error).__name__}: {one_line(str(error))}"
    return text if error.__cause__ is None else f"{described(error.__cause__)}; {text}"


def first_line(error: BaseException) -> str:
    """Format an error as its type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {one_line(text.splitlines()[0])}" if text else type(error).__name__
