"""Errors that several ranks have a part in, and errors in words."""

from __future__ import annotations

from lowbit.terminal import lines


class PeerError(RuntimeError):
    """A peer ended, or did not answer in time.

    Attributes:
        rank: the rank, within the group, that failed first as far as can be told; -1 where it cannot be.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(lines(message))  # others wrote parts of it
        self.rank = rank


class AgreementError(RuntimeError):
    """The ranks contradict each other, or some never came; the same text on every rank."""

    on_all_ranks = True

    def __init__(self, message: str) -> None:
        super().__init__(lines(message))  # others wrote parts of it


def described(error: BaseException) -> str:
    """An error on one line, behind its cause: PyTorch's schedules wrap the errors of a model."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if error.__cause__ is None else f"{described(error.__cause__)}; {text}"


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
