"""Tensors in memory between two pages that may not be touched, with poison where there is room beside them."""

import ctypes
import importlib
import math
import mmap
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit

PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
POISON = bytes(i * 37 % 251 + 3 for i in range(PAGE))
BEFORE = {True: b"\xa5", False: b"\x5b"}  # what an output holds, by placement: nobody may depend on it
Shape = tuple[int, ...]
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

    def place(self, nbytes: int, content: bytes | None, *, at_end: bool, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor of `nbytes` at one end, with its content; what is left of the pages is poisoned."""
        free = self._size - nbytes
        start = PAGE + (free if at_end else 0)
        slack = PAGE if at_end else PAGE + nbytes
        self._place, self._slack = slice(start, start + nbytes), slice(slack, slack + free)
        self._map[self._slack] = POISON[:free]
        if content is not None:
            self._map[self._place] = content
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    @property
    def content(self) -> bytes:
        return self._map[self._place]

    def check(self, name: str) -> None:
        """Raise if the poison has changed."""
        if self._map[self._slack] != POISON[: self._slack.stop - self._slack.start]:
            raise Outside(f"bytes beside {name} have been written")


class Bench:
    """Where payloads, tensors and scratch are placed: all flush against the page behind them, or before them.

    Stands for `torch` in the modules of kernels, and so places the scratch that they allocate.
    """

    def __init__(self) -> None:
        self.at_end = True
        self._rooms: dict[int, list[Room]] = defaultdict(list)
        self._placed: list[tuple[str, Room, bytes | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def begin(self, *, at_end: bool) -> None:
        """Have all rooms free, and place everything at this end of its pages."""
        self.at_end = at_end
        for _, room, _ in self._placed:
            self._rooms[room._size // PAGE].append(room)
        self._placed.clear()

    def read_only(self, name: str, content: bytes, shape: Shape, dtype: torch.dtype) -> Tensor:
        return self._place(name, len(content), content, shape, dtype, fixed=True)[1]

    def written(self, name: str, content: bytes, shape: Shape, dtype: torch.dtype) -> tuple[Room, Tensor]:
        """A tensor to write, and the room that has its bytes."""
        return self._place(name, len(content), content, shape, dtype)

    def payload(self, content: bytes) -> Tensor:
        return self.read_only("the payload", content, (len(content),), torch.uint8)

    def out(self, shape: Shape, dtype: torch.dtype, *, base: bytes | None = None) -> tuple[Room, Tensor]:
        """A tensor to overwrite, or to add to what its elements hold: one element's bytes."""
        size = torch.Size(shape).numel() * dtype.itemsize
        content = (base or BEFORE[self.at_end]) * size
        return self.written("out", content[:size], shape, dtype)

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """Scratch, uninitialised as far as a kernel knows."""
        sizes = tuple(shape[0]) if isinstance(shape[0], tuple | torch.Size) else shape
        return self._place("scratch", math.prod(sizes) * dtype.itemsize, None, sizes, dtype)[1]

    def zeros(self, *shape: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return self.empty(*shape, dtype=dtype).zero_()

    def end(self) -> None:
        """Raise `Outside` if anything has changed but what was to be written."""
        for name, room, content in self._placed:
            room.check(name)
            if content is not None and room.content != content:
                raise AssertionError(f"{name} has changed")

    def _place(
        self, name: str, nbytes: int, content: bytes | None, shape: Shape, dtype: torch.dtype, *, fixed: bool = False
    ) -> tuple[Room, Tensor]:
        pages = max(1, -(-nbytes // PAGE))
        room = self._rooms[pages].pop() if self._rooms[pages] else Room(pages)
        self._placed.append((name, room, content if fixed else None))
        return room, room.place(nbytes, content, at_end=self.at_end, shape=shape, dtype=dtype)


def guarded() -> Bench:
    """A bench for all kernels of this process, which from now on take payloads at any address as they are."""
    bench, source = Bench(), Path(lowbit.__path__[0])
    for file in [*source.glob("codecs/*/cpu*.py"), *source.glob("activations/*/cpu*.py")]:
        module = importlib.import_module(".".join(["lowbit", *file.relative_to(source).with_suffix("").parts]))
        if hasattr(module, "torch"):
            module.torch = bench
    # A copy of a payload that lies at an odd address would lie elsewhere: kernels themselves take any address.
    vars(importlib.import_module("lowbit.kernels.operators"))["_is_aligned"] = lambda payload: True
    vars(importlib.import_module("lowbit.codecs.transform_quant.codec"))["ALIGNMENT"] = 1
    return bench
