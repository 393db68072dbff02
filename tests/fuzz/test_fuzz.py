"""Decoders survive hostile bytes; and the harness would tell if they did not."""

import ctypes
import math
import random
import re
from collections.abc import Callable

import pytest
import torch

from lowbit import kernels
from lowbit.codecs import BlockFloat8, Codec, GroupInt, TAHQuant, names
from tests.lowbit.codecs.feature_int.examples import for_three_ranks
from tests.lowbit.codecs.tah_quant.examples import BY_TOKEN
from tests.lowbit.codecs.tah_quant.examples import GPU as TAH_QUANT

from .attack import attack, carry_out, case_of, targets
from .guard import Bench, Shape, guarded
from .targets import DTYPES, as_bytes, as_tensor, damage, hard, layout_of, same, spans_of

CASES = 3000


def test_decoders_and_encoders_of_every_format_survive() -> None:
    """A process of its own, in which payloads, tensors and scratch lie between pages that may not be touched."""
    outcome = attack(0, range(CASES))
    assert not outcome.faults, "\n".join(f"{f.text}: {f.why}" for f in outcome.faults)
    assert sum(outcome.survived.values()) >= CASES
    assert set(outcome.survived) == {target.name for target in targets()}
    assert [codec for codec in names.formats().values() if not targets(codec.__name__)] == []


def touch(say: Callable[[str], None], at_end: bool, byte: int, write: bool) -> None:
    """Read or write one byte near a tensor of 100 that lies at one end of its pages."""
    bench = Bench()
    bench.begin(at_end=at_end)
    room, x = bench.written("x", bytes(100), (100,), torch.uint8)
    if write:
        ctypes.memset(x.data_ptr() + byte, 0, 1)
    else:
        ctypes.string_at(x.data_ptr() + byte, 1)
    room.check("x")


@pytest.mark.parametrize(
    ("at_end", "byte", "write", "said"),
    [
        (True, 100, False, "^signal 11$"), (False, -1, True, "^signal 11$"),  # a byte behind or before ends the process
        (True, -1, False, "^$"), (True, -1, True, "bytes beside x have been written"),
        (False, 100, False, "^$"), (False, 100, True, "bytes beside x have been written"),
    ],
)  # fmt: skip
def test_guards_catch_what_leads_outside_and_poison_what_is_written_on_the_other_side(
    at_end: bool, byte: int, write: bool, said: str
) -> None:
    assert re.search(said, "".join(carry_out(touch, at_end, byte, write)))


FAULTS: list[tuple[Codec, Shape, str, int]] = [
    (TAHQuant.published(), (4, 640), "widths", 0xFF),
    (TAHQuant.published(), (4, 640), "widths", 0x00),
    (BY_TOKEN, (1, 64, 64), "widths", 0xFF),
    (TAHQuant(high_fraction=0.5), (4, 640), "widths", 0x00),
    (TAHQuant(tile=8, pivot_ratio=2.0), (1, 64), "pivots", 0xFF),  # beyond the tile
    (TAHQuant(pivot_ratio=2.0), (3, 40), "pivots", 0x80),  # beyond a ragged tile
]
"""A section of a valid payload, and the value of all its bytes that once led outside, or to other numbers than NaN."""


def decode_guarded(say: Callable[[str], None]) -> None:
    bench = guarded()
    for codec, shape, section, value in FAULTS:
        say(f"{codec} {section} {value}")
        payload = codec.encode(hard(random.Random(0), shape))
        layout_of(codec, shape).section(payload, section).fill_(value)
        for at_end in (True, False):
            bench.begin(at_end=at_end)
            _, out = bench.out(shape, torch.float32)
            codec.decode(bench.payload(payload.numpy().tobytes()), shape=shape, out=out)
            bench.end()
            assert out.isnan().all()


def test_what_once_led_outside() -> None:
    """One section of a valid payload overwritten: all that it stands for is NaN."""
    assert [*carry_out(decode_guarded)] == [f"{codec} {section} {value}" for codec, _, section, value in FAULTS]


GPU = [*TAH_QUANT, GroupInt(bits=3, group=24), BlockFloat8(block=96), for_three_ranks(70, (3, 69))]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("index", range(len(GPU)), ids=map(repr, GPU))
def test_triton_kernels_do_the_same_and_touch_nothing_else(index: int) -> None:
    pytest.importorskip("triton", reason="no Triton; make test-cpus installs it")
    codec, rng = GPU[index], random.Random(index)
    shapes = [(2, 70), (1, 70)] if codec.grain == 70 else [(2, 8, 100), (3, 5, 64), (2, 7)]
    for shape in shapes:
        valid = as_bytes(codec.encode(hard(rng, shape)))
        for i, dtype in enumerate(DTYPES):
            kind, payload = damage(rng, valid, spans_of(layout_of(codec, shape)))
            found = []
            for backend, poison in (("reference", 0), ("gpu", 77), ("gpu", 255)):
                buffer = torch.full((len(payload) + 512,), poison, dtype=torch.uint8, device=DEVICE)
                buffer[256:-256] = as_tensor(payload, torch.uint8)
                around = torch.full((math.prod(shape) + 256,), poison, dtype=dtype, device=DEVICE)
                out = around[128:-128].fill_(1.5).view(shape)
                with kernels.backend(backend):
                    codec.decode(buffer[256:-256], shape=shape, out=out, accumulate=(i + len(shape)) % 2 == 0)
                edges = around[:128], around[-128:], buffer[:256], buffer[-256:]
                assert all((edge == poison).all() for edge in edges), (backend, shape, dtype, kind)
                found.append(out)
            assert all(same(found[1], other).all() for other in found), (shape, dtype, kind)


def test_damage_that_is_found_stays_within_its_scope() -> None:
    """NaN for the tokens whose flags are wrong, unchanged numbers for all others, behind them too."""
    codec, shape = TAHQuant.published(), (4, 640)
    payload = codec.encode(hard(random.Random(0), shape))
    expected = codec.decode(payload, shape=shape)
    layout_of(codec, shape).section(payload, "widths")[2] ^= 1  # of the second token's two bytes
    for backend in ("reference", "cpu"):
        with kernels.backend(backend):
            found = codec.decode(payload, shape=shape)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


def test_a_case_can_be_repeated() -> None:
    """It is made of its seed and number alone."""
    runs = []
    for number in [*range(20)] * 2:
        name, case, rng = case_of(3, number, "GroupInt(bits=4")
        bench = Bench()
        bench.begin(at_end=True)
        runs.append((name, case.text, rng.random(), case.run(bench)))
    assert runs[:20] == runs[20:]
