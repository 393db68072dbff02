"""Non-blocking output: threads of their own forward what this process and its ranks print.

A pipe that nobody reads is full after 64 KiB, and blocks the thread that prints next, for which all ranks then wait (or
torchft's, whose heartbeats stop). A reader that is gone, or a full disk, would end the run.
"""

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Never

_MOST = 1 << 20  # most bytes that wait for a reader
_PIECE = 4096  # bytes written at once: up to this size a pipe accepts a write as a whole
_LAST_SECONDS = 0.2  # to read what is still in the pipe when the run ends
_END_SECONDS = 2.0  # that a process which ends at once waits for the reader

_open: list[Callable[[float | None], None]] = []  # each ends a `passed_on`; argument: seconds to wait for a reader


@contextlib.contextmanager
def passed_on() -> Iterator[None]:
    """Forward all output of the block, also of processes started in it, without waiting for the reader.

    Not to terminals. Of output that nobody reads, the last MiB is kept; a line reports how much was dropped. At the end
    it waits until the reader has read what is kept, as every program does.
    """
    passing: dict[tuple[int, int], _Passing] = {}  # one per file: two streams to one file keep the order of lines
    saved: list[tuple[int, int]] = []

    def restore(patience: float | None) -> None:
        _flush()
        for fd, original in saved:
            os.dup2(original, fd)
        for forwarded in passing.values():
            forwarded.close(patience)

    _flush()
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # closed by the parent process: a pipe made here could get this number
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
    """End this process, from any thread, after a reader that reads has got all output.

    Without destructors: those of a broken process group can wait for peers that are gone.
    """
    while _open:
        _open.pop()(_END_SECONDS)
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()


class _Passing:
    """A pipe to write to (`entry`), a thread that keeps it empty, and one that writes its content to the target."""

    def __init__(self, target: int) -> None:
        self._exit, self.entry = os.pipe()
        self._target = target
        self._kept, self._left_out = bytearray(), 0
        self._closing, self._complete = threading.Event(), False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=work, name=f"lowbit-output-{work.__name__[1:]}", daemon=True)
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, patience: float | None) -> None:
        """Forward the rest, for at most `patience` seconds; None: until all is read."""
        os.close(self.entry)
        self._closing.set()
        for thread in self._threads:
            thread.join(patience)
        if patience is None:  # otherwise this process is about to end
            os.close(self._exit)

    def _read(self) -> None:
        while True:
            closing = self._closing.is_set()  # asked before the wait: what is written until `close` is read
            ready, _, _ = select.select([self._exit], [], [], _LAST_SECONDS)
            if ready:
                piece = os.read(self._exit, _PIECE)
                if not piece:
                    break
                self._keep(piece)
            elif closing:  # a process that outlives its rank still has the pipe open
                break
        with self._changed:
            self._complete = True
            self._changed.notify()

    def _keep(self, piece: bytes) -> None:
        with self._changed:
            self._kept += piece
            more = max(0, len(self._kept) - _MOST)
            del self._kept[:more]
            self._left_out += more
            self._changed.notify()

    def _next(self) -> bytes:
        """Return the next piece, from the beginning of a line on if output before it was dropped; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._complete)
            note = b""
            if self._left_out:
                torn = self._kept.find(b"\n") + 1  # the rest of a line that lost its beginning
                del self._kept[:torn]
                note = b"\n[%d bytes of output that nobody read are left out]\n" % (self._left_out + torn)
                self._left_out = 0
            piece = bytes(self._kept[:_PIECE])
            del self._kept[:_PIECE]
        return note + piece

    def _write(self) -> None:
        while piece := self._next():
            with contextlib.suppress(OSError):  # the reader is gone, or the disk is full: the run continues
                while piece:
                    try:
                        piece = piece[os.write(self._target, piece) :]
                    except BlockingIOError:  # the parent process made the pipe non-blocking
                        select.select([], [self._target], [])
