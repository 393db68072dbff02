"""Tensors in and bytes out at one end of a boundary, and the reverse at the other."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.codecs import AQSGD, Cast, Codec, GroupInt, TAHQuant, TransformQuant
from lowbit.pipeline.arguments import StepKind
from lowbit.pipeline.boundary import Lane, Slot
from lowbit.wire.traffic import Traffic
from tests.forked import run_script
from tests.lowbit.pipeline.toy import INT4
from tests.views import View, packed, views

SHAPE = torch.Size((2, 16, 64))
SLOT = Slot(SHAPE, torch.float32)


def ready(lane: Lane, *slots: Slot, micro_batches: int = 3) -> Lane:
    lane.prepare(slots)
    lane.use([slots] * micro_batches)
    return lane


def unused(codec: Codec) -> Lane:
    return Lane(1, "forward", codec, "cpu", Traffic())


def lane(codec: Codec, *slots: Slot) -> Lane:
    return ready(unused(codec), *(slots or (SLOT,)))


def crosses(codec: Codec, x: Tensor, step: StepKind = StepKind()) -> tuple[Tensor, int]:
    """`x` at the other end, and the bytes that travelled."""
    sender, receiver = (lane(codec, Slot(x.shape, x.dtype)) for _ in range(2))
    assert sender.messages(0) == receiver.messages(0) == 1
    return pass_on(sender, receiver, step, 0, x), sender.nbytes(0, step, 0)


def pass_on(sender: Lane, receiver: Lane, step: StepKind, micro_batch: int, x: Tensor) -> Tensor:
    size = sender.nbytes(0, step, micro_batch)
    payload, out = sender.encode(0, step, micro_batch, x), torch.full(x.shape, 1).to(x.dtype)
    assert (payload.dtype, payload.shape) == (torch.uint8, (size,))
    assert size == receiver.nbytes(0, step, micro_batch)
    receiver.decode(0, step, micro_batch, payload, out)
    return out


FULL = StepKind(full_precision=True)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 5),
        torch.randn(4, 6).t(),
        torch.randn(3, 4, dtype=torch.bfloat16)[:, ::2],
        torch.randn(3, 4).half(),
        torch.tensor(3.5),
        torch.randn(0, 4),
        torch.randn(1, 3).expand(4, 3),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        *(torch.arange(6), torch.tensor([True, False]), torch.tensor([1j])),
    ],
    ids=lambda x: f"{x.dtype}-{tuple(x.shape)}",
)
def test_what_is_not_coded_is_exact_in_any_dtype_and_layout(x: Tensor):
    """All tensors of a warm-up, and those that are not floating."""
    out, size = crosses(INT4, x, FULL if x.is_floating_point() else StepKind())
    assert size == x.nbytes
    assert torch.equal(out.reshape(-1).view(torch.uint8), x.contiguous().reshape(-1).view(torch.uint8))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(view=views(), codec=st.sampled_from([INT4, TAHQuant(), Cast()]), full=st.booleans())
def test_a_view_of_any_strides_arrives_as_its_copy_would(view: View, codec: Codec, full: bool):
    x, step = view.make(1)[1], FULL if full else StepKind()
    assert torch.equal(crosses(codec, x, step)[0], crosses(codec, packed(x), step)[0])


def test_a_boundary_that_codes_nothing_is_a_warning(caplog: pytest.LogCaptureFixture):
    """As where a module computes under no_grad: nobody would learn why it is slow."""
    exact, integers = Slot(SHAPE, torch.float32, exact=True), Slot(SHAPE, torch.int64)
    for slots in ([SLOT, exact], [integers], []):
        unused(INT4).prepare(slots)
    assert not caplog.records
    unused(INT4).prepare([exact, integers])
    assert "boundary 1 forward: nothing is coded, as no tensor would require a gradient" in caplog.text


def test_the_payload_has_memory_of_its_own():
    x = torch.randn(SHAPE)
    for step in (StepKind(), FULL):
        there, before = lane(Cast()), x.clone()
        payload = there.encode(0, step, 0, x)
        x.zero_()
        assert torch.equal(payload.view(torch.float32).view(SHAPE), before)
        x.copy_(before)


def test_codecs_of_samples_get_the_ids_of_the_micro_batch_and_leave_evaluation_alone():
    codec = AQSGD(inner=INT4)
    sender, receiver = lane(codec), lane(codec)
    steps = [StepKind(samples=((1, 2), (3, 4))), StepKind(samples=((3, 4), (1, 5)))]
    sizes = []
    for step in [*steps, StepKind(training=False)]:
        for micro_batch in range(2):
            x = torch.randn(SHAPE)
            sizes.append(sender.nbytes(0, step, micro_batch))
            assert torch.allclose(pass_on(sender, receiver, step, micro_batch, x), x, atol=1.0)
    row = SHAPE[1:]
    first, later = 4 * row.numel(), INT4.nbytes(row)
    assert sizes == [2 * first, 2 * first, 2 * later, first + later, 2 * first, 2 * first]
    assert sender.states.nbytes() == receiver.states.nbytes() == 5 * first
    assert "boundary 1 forward state bytes" in sender.facts([SLOT])


def test_shapes_that_share_what_a_codec_keeps():
    """A basis belongs to a width: a smaller micro-batch and an evaluation are coded by it, and it is saved once."""
    codec = TransformQuant()
    sender, receiver = lane(codec), lane(codec)
    small = torch.Size((1, 16, 64))
    for shape, training in ((SHAPE, True), (small, False), (small, True), (SHAPE, True)):
        x = torch.randn(shape)
        for end in (sender, receiver):
            ready(end, Slot(shape, torch.float32))
        assert (pass_on(sender, receiver, StepKind(training), 0, x) - x).norm() < 0.6 * x.norm()
    assert sender.states.nbytes() == receiver.states.nbytes() > 4 * 16 * 64
    [(name, state)] = sender.states.state_dict().items()
    assert (name, state["messages"]) == ("tensor 0, width 64", 3)
    again = unused(codec)
    again.states.load_state_dict(sender.states.state_dict())
    for end in (again, sender):
        ready(end, Slot(small, torch.float32))
    x = torch.randn(small)
    assert torch.equal(again.encode(0, StepKind(), 0, x), sender.encode(0, StepKind(), 0, x))
    again.states.load_state_dict({})  # a checkpoint of before the first message
    fresh = lane(codec, Slot(small, torch.float32))
    assert torch.equal(again.encode(0, StepKind(), 0, x), fresh.encode(0, StepKind(), 0, x))


def test_a_tensor_too_short_for_a_set_rate_is_refused_first_and_sent_as_it_is_later():
    """As the last, smaller batch of an evaluation is; sent plainly, it leaves the basis as it was."""
    codec, large, small = TransformQuant(bits=2.0), torch.Size((4, 64, 64)), torch.Size((1, 8, 64))
    with pytest.raises(ValueError, match=r"bits is 2, .* messages of \(1, 8, 64\); allowed: at least"):
        lane(codec, Slot(small, torch.float32))
    sender, receiver = lane(codec, Slot(large, torch.float32)), lane(codec, Slot(large, torch.float32))
    pass_on(sender, receiver, StepKind(), 0, torch.randn(large))
    for dtype in (torch.float32, torch.bfloat16):
        for end in (sender, receiver):
            ready(end, Slot(small, dtype))
        x = torch.randn(small).to(dtype)
        assert sender.nbytes(0, StepKind(), 0) == x.nbytes
        assert torch.equal(pass_on(sender, receiver, StepKind(), 0, x), x)
    assert sender.facts([Slot(small, torch.float32)]) == receiver.facts([Slot(small, torch.float32)])
    [state] = receiver.states.state_dict().values()
    assert state["messages"] == 1


def test_micro_batches_may_differ_in_what_crosses():
    """And a lane that is told of other tensors goes on with what it has learned of the ones before."""
    slots = [[Slot(torch.Size((n, 3, 64)), torch.float32)] for n in (2, 2, 1)]
    sender, receiver = (unused(INT4) for _ in range(2))
    assert sender.messages(0) == 0, "nothing crosses yet"
    for end in (sender, receiver):
        for each in slots:
            end.prepare(each)
        end.use([*slots, []])
    assert [sender.messages(i) for i in range(4)] == [1, 1, 1, 0]
    for i, [(shape, _, _)] in enumerate(slots):
        x = torch.randn(shape)
        assert sender.nbytes(0, StepKind(), i) == INT4.nbytes(shape)
        assert torch.equal(pass_on(sender, receiver, StepKind(), i, x), INT4.round_trip(x))
    with pytest.raises(ValueError, match=r"\(1, 3, 64\); both ends expect float32 \(2, 3, 64\)"):
        sender.encode(0, StepKind(), 1, x)


FIRST_MESSAGES = """
import gc
import torch
from numba.core.dispatcher import Dispatcher
from lowbit.codecs import parse
from lowbit.codecs.foreign import open_session
from lowbit.codecs.names import short_names
from lowbit.pipeline.boundary import warm_up

gc.unfreeze()  # in forks of the tests, kernels that are known there

def compiled():
    return {f"{kernel.py_func.__module__}.{kernel.py_func.__name__}": len(kernel.signatures)
            for kernel in gc.get_objects() if isinstance(kernel, Dispatcher)}

shape = torch.Size((2, 16, 64))
for codec in map(parse, short_names()):
    warm_up(codec, shape, torch.float32, torch.device("cpu"))
before = compiled()
for codec in map(parse, short_names()):
    sender, receiver = (open_session(codec, shape=shape, dtype=torch.float32, device="cpu") for _ in range(2))
    if codec.needs_key:
        sender.samples = receiver.samples = range(2)
    for _ in range(3):
        receiver.decode(sender.encode(torch.randn(shape)))
assert (now := compiled()) == before, dict(now.items() - before.items())
"""


def test_nothing_is_compiled_after_warming_up(tmp_path: Path):
    """In a process of its own, which has few kernels."""
    (tmp_path / "script.py").write_text(FIRST_MESSAGES)
    done = run_script(tmp_path / "script.py", folder=tmp_path)
    assert done.code == 0, done.output


def test_warming_up_uses_kernels_once_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    used: list[tuple[str, torch.dtype]] = []
    monkeypatch.setattr(GroupInt, "_encode", lambda self, x, payload: used.append(("encode", x.dtype)))
    monkeypatch.setattr(GroupInt, "_decode", lambda self, payload, out, add: used.append(("decode", out.dtype)))
    slots = Slot(torch.Size((5, 70)), torch.bfloat16), Slot(torch.Size((5,)), torch.int64)
    for _ in range(2):
        lane(GroupInt(bits=7, group=40), *slots).warm_up(slots)
    assert used == [("encode", torch.bfloat16), ("decode", torch.bfloat16)]
    used.clear()
    warm = lane(AQSGD(inner=GroupInt(bits=7, group=40)), *slots)
    warm.warm_up(slots)
    assert ("encode", torch.float32) in used  # of the differences, which a first visit has not
    assert warm.states.nbytes() == 0
    assert warm._traffic == Traffic()


def test_warming_up_draws_no_random_numbers() -> None:
    """A resumed run does it where the run before had done it, and its dropout would differ."""
    before = torch.get_rng_state()
    slots = [Slot(torch.Size((3, 41)), torch.float32)]
    lane(GroupInt(bits=4, group=48, rounding="stochastic"), *slots).warm_up(slots)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_number_without_dimensions_crosses_like_any_other_tensor() -> None:
    """Such as an auxiliary loss, also next to a codec that needs sample ids."""
    slots = [Slot(torch.Size((2, 4)), torch.float32), Slot(torch.Size(()), torch.float32)]
    for codec in (GroupInt(bits=4), AQSGD()):
        unused(codec).check_samples(slots, [[1, 2]])
    with pytest.raises(ValueError, match="the sample ids of a micro-batch are 1; allowed: 2"):
        unused(AQSGD()).check_samples(slots, [[1]])
