"""Errors that involve several ranks, and formatting of errors."""

from lowbit.terminal import lines


class PeerError(RuntimeError):
    """A peer ended, or did not answer in time; `rank` (in the group) seems to have failed first; -1: unknown."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(lines(message))  # parts of it come from other ranks
        self.rank = rank


class AgreementError(RuntimeError):
    """Ranks contradict each other, or some never came; the same text on every rank."""

    on_all_ranks = True

    def __init__(self, message: str) -> None:
        super().__init__(lines(message))  # others wrote parts of it


def described(error: BaseException) -> str:
    """Format an error as one line, its cause first: PyTorch's schedules wrap the errors of a model."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if error.__cause__ is None else f"{described(error.__cause__)}; {text}"


def first_line(error: BaseException) -> str:
    """Format an error as its type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
