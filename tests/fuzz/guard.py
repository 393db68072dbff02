"""Tensors in memory between two pages that may not be touched, with poison where there is room beside them."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit

PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
POISON = bytes(i * 37 % 251 + 3 for i in range(PAGE))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Outside(AssertionError):
    """Bytes beside a tensor have changed, or have been read."""


class Room:
    """Pages that one tensor at a time lies in: right behind a page that may not be touched, or right before one."""

    def __init__(self, pages: int) -> None:
        self._size = pages * PAGE
        self._map = mmap.mmap(-1, self._size + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for at in (start, start + PAGE + self._size):
            if _libc.mprotect(at, PAGE, NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._slack, self._start, self._length = slice(0, 0), PAGE, 0

    def place(self, nbytes: int, *, at_end: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of `nbytes` at one end; what is left of the pages is poisoned."""
        free = self._size - nbytes
        self._start, self._length = PAGE + (free if at_end else 0), nbytes
        first = PAGE if at_end else PAGE + nbytes
        self._slack = slice(first, first + free)
        self._map[self._slack] = POISON[:free]
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=self._start)
        return flat.view(shape)

    @property
    def content(self) -> bytes:
        """The tensor's bytes."""
        return self._map[self._start : self._start + self._length]

    @content.setter
    def content(self, value: bytes) -> None:
        self._map[self._start : self._start + self._length] = value

    def check(self, name: str) -> None:
        """Raise if the poison has changed."""
        free = self._slack.stop - self._slack.start
        if self._map[self._slack] != POISON[:free]:
            raise Outside(f"bytes beside {name} have been written")


class Rooms:
    """Rooms of every size, `kept` of each in turn."""

    def __init__(self, kept: int = 1) -> None:
        self._made: dict[int, Iterator[Room]] = {}
        self._kept = kept

    def take(self, nbytes: int) -> Room:
        """The next one that holds so many bytes with less than a page to spare."""
        pages = max(1, -(-nbytes // PAGE))
        if pages not in self._made:
            self._made[pages] = itertools.cycle([Room(pages) for _ in range(self._kept)])
        return next(self._made[pages])


class GuardedScratch:
    """Stands for `torch` in the modules of kernels, and places the scratch that they allocate in rooms."""

    at_end = True

    def __init__(self) -> None:
        self._rooms = Rooms(kept=16)  # more than a call has in use at a time, its threads counted
        self._taken: list[Room] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Uninitialised, as far as a kernel knows."""
        sizes = tuple(shape[0]) if isinstance(shape[0], tuple | torch.Size) else shape
        nbytes = math.prod(sizes) * dtype.itemsize
        room = self._rooms.take(nbytes)
        tensor = room.place(nbytes, at_end=self.at_end, shape=sizes, dtype=dtype)
        self._taken.append(room)
        return tensor

    def zeros(self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Zeros."""
        return self.empty(*shape, dtype=dtype).zero_()

    def check(self) -> None:
        """Raise if something beside scratch has been written since the last time."""
        taken, self._taken = self._taken, []
        for room in taken[-16:]:
            room.check("scratch")


def guard_scratch() -> GuardedScratch:
    """Let all kernels of this process allocate guarded scratch, and take payloads at any address as they are."""
    scratch = GuardedScratch()
    source = Path(lowbit.__path__[0])
    for file in [*source.glob("codecs/*/cpu*.py"), *source.glob("activations/*/cpu*.py")]:
        module = importlib.import_module(".".join(["lowbit", *file.relative_to(source).with_suffix("").parts]))
        if hasattr(module, "torch"):
            module.torch = scratch
    # A copy of a payload that lies at an odd address would lie elsewhere: kernels themselves take any address.
    vars(importlib.import_module("lowbit.kernels.operators"))["_is_aligned"] = lambda payload: True
    vars(importlib.import_module("lowbit.codecs.basis.session"))["ALIGNMENT"] = 1
    return scratch
