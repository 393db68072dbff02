from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from lowbit.codecs import AQSGD, GroupInt, Session
from tests.refused import refused

SHAPE = (2, 3, 64)
CODED, PLAIN = GroupInt().nbytes(SHAPE[1:]), 4 * 3 * 64  # bytes of a sample


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ends(codec: AQSGD | None = None) -> tuple[Session, Session]:
    sender, receiver = ((codec or AQSGD()).open(shape=SHAPE, dtype=torch.float32) for _ in range(2))
    return sender, receiver


def encoded(sender: Session, x: Tensor, samples: Sequence[int], *, training: bool = True) -> Tensor:
    sender.samples = samples
    return sender.encode(x, training=training)


def crossed(pair: tuple[Session, Session], x: Tensor, samples: Sequence[int], *, training: bool = True) -> Tensor:
    pair[1].samples = samples
    return pair[1].decode(encoded(pair[0], x, samples, training=training), training=training)


def test_first_visit_is_exact_and_later_ones_send_differences() -> None:
    pair, x = ends(), torch.randn(SHAPE)
    assert torch.equal(crossed(pair, x, (7, 3)), x)
    near = x + 0.01 * torch.randn(SHAPE)
    assert pair[0].nbytes() == pair[1].nbytes() == 2 * CODED < pair[0].max_nbytes() == 2 * PLAIN
    y = crossed(pair, near, (7, 3))
    # The difference is a hundredth of the tensor, and 4 bits of it are a thousandth.
    assert (y - near).norm() < 0.1 * (near - x).norm()
    assert (y - near).norm() < 0.1 * (GroupInt().round_trip(near) - near).norm()


def test_errors_do_not_pile_up_and_both_ends_agree() -> None:
    pair, x = ends(), torch.randn(SHAPE)
    for step in range(20):
        y = crossed(pair, x, (0, 1))
        assert torch.equal(y[0], pair[0].state_dict()["0"]), step
    assert (y - x).norm() < 1e-6 * x.norm()


@pytest.mark.parametrize("training", [True, False])
def test_messages_mix_new_and_known_samples_and_evaluation_keeps_nothing(training: bool) -> None:
    pair, x = ends(), torch.randn(SHAPE)
    crossed(pair, x, (0, 1))
    before = [{k: v.clone() for k, v in end.state_dict().items()} for end in pair]
    assert len(encoded(pair[0], x, (1, 2), training=False)) == CODED + PLAIN
    y = crossed(pair, x + 0.01, (1, 2), training=training)
    assert torch.equal(y[1], x[1] + 0.01)
    assert torch.allclose(y, x + 0.01, atol=2.0)
    for end, kept in zip(pair, before, strict=True):
        state = end.state_dict()
        assert (state.keys() == kept.keys() and all(torch.equal(state[k], v) for k, v in kept.items())) != training


def test_state_grows_with_the_samples_and_survives_a_restart() -> None:
    pair, again, x = ends(), ends(), torch.randn(SHAPE)
    for samples in ((0, 1), (2, 3)):
        crossed(pair, x, samples)
    for old, new in zip(pair, again, strict=True):
        assert old.state_bytes() == 4 * PLAIN
        new.load_state_dict(old.state_dict())
    assert torch.equal(crossed(again, x * 1.01, (3, 0)), crossed(pair, x * 1.01, (3, 0)))


def test_nan_reaches_the_other_side() -> None:
    pair, x = ends(), torch.randn(SHAPE)
    crossed(pair, x, (0, 1))
    x[1, 2, 5] = float("nan")
    y = crossed(pair, x, (0, 1))
    assert y[1, 2, 5].isnan()
    assert y[0].isfinite().all()
    again = crossed(pair, torch.ones(SHAPE), (0, 1))
    assert torch.equal(again[1], torch.ones(SHAPE[1:])), "the sample begins anew, at both ends"
    assert pair[0].state_dict().keys() == pair[1].state_dict().keys() == {"0", "1"}


def test_bad_input() -> None:
    (sender, receiver), x = ends(), torch.randn(SHAPE)
    receiver.samples, few, needs = (0, 1), torch.zeros(10, dtype=torch.uint8), "AQSGD needs 2 different sample ids"
    refused(
        *((partial(encoded, sender, x, wrong), ValueError, needs) for wrong in (None, (1,), (1, 1), (1, 2, 3))),
        (lambda: receiver.decode(few), ValueError, "expected one dimension of 1536 bytes"),
        (lambda: AQSGD().encode(x), ValueError, r"AQSGD keeps state between messages: use open\(\)"),
        (lambda: sender.load_state_dict({"5": few[:2]}), ValueError, r"state of sample 5 has shape \(2,\)"),
    )


def test_sums_beyond_float16_saturate() -> None:
    pair = tuple(AQSGD(inner=GroupInt(bits=2)).open(shape=(1, 64), dtype=torch.float16) for _ in range(2))
    for _ in range(12):
        x = (60000 * torch.randn(1, 64)).clamp(-65504, 65504).half()
        assert crossed(pair, x, (0,)).isfinite().all()  # type: ignore[arg-type]


def test_ids_in_a_tensor_are_those_of_a_list() -> None:
    pair, x = ends(), torch.randn(SHAPE)
    crossed(pair, x, torch.tensor([4, 9]))  # type: ignore[arg-type]
    assert pair[0].nbytes() == 2 * CODED
    assert pair[0].state_dict().keys() == {"4", "9"}
