"""Output that stops nobody: what this process and its ranks print is passed on by threads of their own.

A pipe that nobody reads (`| less` that is not scrolled, a program that started the run and waits for its end) is full
after 64 KiB, and blocks the thread that prints next: that of the steps, for which the other ranks wait, or those of
torchft, whose heartbeats end. A reader that is gone (`| head`) or a full disk would end the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Never

_MOST = 1 << 20  # bytes that wait for a reader
_PIECE = 4096  # bytes that are written at once; a pipe takes them whole, or a part of them later
_LAST_SECONDS = 0.2  # for what is on its way when the run ends
_END_SECONDS = 2.0  # for a reader, by a process that ends at once

_open: list[Callable[[float | None], None]] = []  # each ends a `passed_on`, and waits at most so long for a reader


@contextlib.contextmanager
def passed_on() -> Iterator[None]:
    """Pass on all that is printed meanwhile, by processes started here, too, without waiting for who reads it.

    Terminals stay as they are. Of what nobody reads, the last MiB is kept; a line says how much is left out. At the end
    it waits for the reader as every program does, until what is kept is read.
    """
    passing: dict[tuple[int, int], _Passing] = {}  # by file: the order of lines of two streams to one file stays
    saved: list[tuple[int, int]] = []

    def restore(patience: float | None) -> None:
        _flush()
        for fd, original in saved:
            os.dup2(original, fd)
        for each in passing.values():
            each.close(patience)

    _flush()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # closed by who started this process: a pipe made here could get its number
            os.open(os.devnull, os.O_RDWR)
    try:
        for fd in (1, 2):
            if not os.isatty(fd):
                saved.append((fd, os.dup(fd)))
                status = os.fstat(fd)
                file = (status.st_dev, status.st_ino)
                passing[file] = passing.get(file) or _Passing(saved[-1][1])
                os.dup2(passing[file].entry, fd)
        _open.append(restore)
        yield
    finally:
        if restore in _open:
            _open.remove(restore)
        restore(None)
        for _, original in saved:
            os.close(original)


def end(code: int) -> Never:
    """End this process without destructors, from any thread; what it has printed reaches a reader that reads."""
    while _open:
        _open.pop()(_END_SECONDS)
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()


class _Passing:
    """A pipe, a thread that empties it at once, and one that writes to where its content belongs.

    Attributes:
        entry: where to write.
    """

    def __init__(self, target: int) -> None:
        self._exit, self.entry = os.pipe()
        self._target = target
        self._pieces: deque[bytes] = deque()
        self._size = self._left_out = 0
        self._closing, self._complete = threading.Event(), False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name=f"lowbit-output-{work.__name__[1:]}", daemon=True)
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, patience: float | None) -> None:
        """Pass on the rest, for at most `patience` seconds; None: until all is read."""
        os.close(self.entry)
        self._closing.set()
        for thread in self._threads:
            thread.join(patience)
        if patience is None:  # else this process ends
            os.close(self._exit)

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._exit], [], [], _LAST_SECONDS)
            if ready:
                piece = os.read(self._exit, _PIECE)
                if not piece:
                    break
                self._keep(piece)
            elif self._closing.is_set():  # a process that outlives its rank has the pipe open
                break
        with self._changed:
            self._complete = True
            self._changed.notify()

    def _keep(self, piece: bytes) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._size += len(piece)
            while self._size > _MOST:
                oldest = self._pieces.popleft()
                self._size -= len(oldest)
                self._left_out += len(oldest)
            self._changed.notify()

    def _next(self) -> bytes:
        """The next piece, from the beginning of a line on if what was before it is left out; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._complete)
            if not self._pieces:
                return b""
            piece = self._pieces.popleft()
            self._size -= len(piece)
            left_out, self._left_out = self._left_out, 0
        if not left_out:
            return piece
        rest = piece[piece.find(b"\n") + 1 :]
        left_out += len(piece) - len(rest)
        return b"\n[%d bytes of output that nobody read are left out]\n" % left_out + rest

    def _write(self) -> None:
        while piece := self._next():
            with contextlib.suppress(OSError):  # no reader is left, or a disk is full: the run continues
                while piece:
                    try:
                        piece = piece[os.write(self._target, piece) :]
                    except BlockingIOError:  # who started this process made the pipe non-blocking
                        select.select([], [self._target], [])
