"""What the tests carry out in processes of their own, because it may crash, or must."""

from __future__ import annotations

import ctypes
import os
import random
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from lowbit.codecs import Codec, TAHQuant
from tests.codecs.tah_quant.examples import BY_TOKEN
from tests.forked import CONTEXT

from .guard import Room, guard_scratch
from .targets import Bench, Shape, hard, layout_of

LIMIT = 200.0  # seconds

FAULTS: dict[str, tuple[Codec, Shape, str, int]] = {
    "flags": (TAHQuant.published(), (4, 640), "widths", 0xFF),
    "flags missing": (TAHQuant.published(), (4, 640), "widths", 0x00),
    "flags by token": (BY_TOKEN, (1, 64, 64), "widths", 0xFF),
    "flags by range": (TAHQuant(high_fraction=0.5), (4, 640), "widths", 0x00),
    "pivot beyond the tile": (TAHQuant(tile=8, pivot_ratio=2.0), (1, 64), "pivots", 0xFF),
    "pivot of a ragged tile": (TAHQuant(pivot_ratio=2.0), (3, 40), "pivots", 0x80),
}
"""A section of a valid payload, and the value of all its bytes that once led outside, or to other numbers than NaN."""


def end_of(work: Callable[..., None], *arguments: object) -> str:
    """How a process ends that carries something out: nothing if well, else a signal or an exception's text."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_carry_out, args=(theirs, work, *arguments), daemon=True)
    process.start()
    theirs.close()
    told = ""
    try:
        told = ours.recv() if ours.poll(LIMIT) else f"no end within {LIMIT:.0f} s"
    except EOFError:
        process.join(LIMIT)
        told = f"signal {-(process.exitcode or 0)}"
    process.kill()
    process.join()
    return told


def _carry_out(to: Connection, work: Callable[..., None], *arguments: object) -> None:
    try:
        work(*arguments)
        to.send("")
    except Exception:
        to.send(traceback.format_exc())
    os._exit(0)


def touch(at_end: bool, byte: int, write: bool) -> None:
    """Read or write one byte near a tensor of 100 that lies at one end of its pages."""
    room = Room(1)
    x = room.place(100, at_end=at_end, shape=(100,), dtype=torch.uint8)
    if write:
        ctypes.memset(x.data_ptr() + byte, 0, 1)
    else:
        ctypes.string_at(x.data_ptr() + byte, 1)
    room.check("x")


def decode_guarded(name: str) -> None:
    """Decode the payload of a fault: all of it must be NaN."""
    codec, shape, section, value = FAULTS[name]
    payload = codec.encode(hard(random.Random(0), shape))
    layout_of(codec, shape).section(payload, section).fill_(value)
    bench = Bench(guard_scratch())
    for at_end in (True, False):
        bench.begin(at_end=at_end)
        _, out = bench.out(shape, torch.float32)
        codec.decode(bench.payload(payload.numpy().tobytes()), shape=shape, out=out)
        bench.end()
        assert out.isnan().all()
