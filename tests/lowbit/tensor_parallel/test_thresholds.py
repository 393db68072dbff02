"""Thresholds: decided by what the slowest rank measures, the same on all of them."""

import time
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.codecs import FeatureInt, GroupInt
from lowbit.tensor_parallel import (
    SumSettings,
    Thresholds,
    emulate_tensor_parallel_,
    low_bit_,
    reduce,
    rowwise,
    tensor_parallel_,
)
from lowbit.tensor_parallel.reduce import kind_of, steps_of
from lowbit.wire import pytorch
from lowbit.wire.messages import gather_json
from tests.lowbit.tensor_parallel.models import WIDTH, Toy, calibrated, ids, logits
from tests.processes import Ranks, on_ranks

KIND = f"{WIDTH} features, float32, 4 bits"
SLOW, ROWS = 0.03, (1, 8)  # seconds; coding takes far less, even beside other tests


def slow_on_rank_1(owner: Any, name: str) -> Any:
    """While open, this function takes longer on rank 1; nobody else notices that."""
    own = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW if dist.get_rank() == 1 else 0)
        return own(*args, **kwargs)

    return mock.patch.object(owner, name, slow)


@pytest.mark.slow
@on_ranks
def test_all_ranks_decide_by_the_slowest() -> None:
    """First it is slow at coding, then at the engine's all-reduce."""
    model = tensor_parallel_(Toy())
    reduce.ROWS = ROWS
    with slow_on_rank_1(FeatureInt, "_encode"):
        installed = low_bit_(model, calibrated())
        coding, small = cast(Any, installed.thresholds), logits(model, ids())
        assert installed.traffic.share_coded == 0
    with slow_on_rank_1(pytorch, "all_reduce_sum"):
        installed.remove()
        installed = low_bit_(model, calibrated())
        known, engine = cast(Any, (installed.thresholds, installed.measure()))
    large = logits(model, ids())
    installed.remove()
    again = low_bit_(model, calibrated(), settings=SumSettings(small=engine))
    assert torch.equal(logits(model, ids()), large)
    assert (installed.traffic.share_coded, again.traffic.share_coded) == (1, 1)
    assert again.measure() == engine  # those that were given
    assert coding.steps == known.steps == {KIND: ()}
    assert engine.steps == {KIND: ((1, "one_shot"),)}
    assert list(engine.milliseconds[KIND]) == [str(rows) for rows in ROWS]
    assert coding.milliseconds[KIND]["1"]["one_shot"] > 1e3 * SLOW
    assert engine.milliseconds[KIND]["1"]["plain"] > 1e3 * SLOW
    assert str(engine).startswith(f"{KIND}: one_shot from 1 rows (2 ranks, ")
    assert str(coding).startswith(f"{KIND}: never coded (2 ranks, ")
    times = [dict(thresholds.milliseconds) for thresholds in (coding, known, engine)]
    first, second = gather_json([*times, small.tolist(), large.tolist()])
    assert first == second


def test_coded_is_what_is_faster_at_this_and_all_larger_sizes():
    def times(**ms: float) -> dict[Any, list[float]]:
        return {choice: [value * turn for turn in (1.0, 1.01, 0.99)] for choice, value in ms.items()}

    assert steps_of({}) == ()
    assert steps_of({1: times(plain=1, one_shot=0.99), 8: times(plain=1, one_shot=2)}) == ()
    assert steps_of(
        {
            1: times(plain=1, one_shot=0.5, two_shot=2),
            8: times(plain=1, one_shot=0.99, two_shot=2),  # within the noise
            32: times(plain=2, one_shot=1.8, two_shot=1.9),
            128: times(plain=4, one_shot=2, two_shot=3),
            512: times(plain=9, one_shot=5, two_shot=4),
        }
    ) == ((32, "one_shot"), (512, "two_shot"))


def test_thresholds_decide_by_rows(caplog: pytest.LogCaptureFixture):
    loaded = Thresholds(ranks=2, steps={KIND: ((8, "one_shot"), (64, "two_shot"))}, milliseconds={}, mbit=1.0, date="")
    taken = [loaded.choice(KIND, rows) for rows in (1, 7, 8, 63, 64, 9999)]
    assert taken == ["plain", "plain", "one_shot", "one_shot", "two_shot", "two_shot"]
    codec = calibrated().codec("layers.0.attn.o")
    assert kind_of(WIDTH, torch.float32, codec) == KIND
    with pytest.raises(ValueError, match="algorithm is 'two_shot' and small has thresholds for one_shot; allowed"):
        SumSettings(algorithm="two_shot", small=loaded)
    settings = SumSettings(small=loaded)
    assert settings.choice(torch.ones(2, 4, WIDTH), 2, codec) == "one_shot"
    for _ in range(2):
        assert settings.choice(torch.ones(2, 4, WIDTH).bfloat16(), 2, codec) == "plain"
    assert caplog.messages == [
        f"sums of {KIND.replace('float32', 'bfloat16')} are not coded: thresholds were measured for {KIND}; give the "
        "model its dtype before low_bit_, or a number as small"
    ]
    model = Toy()
    with emulate_tensor_parallel_(model, 2, calibrated(), settings=settings) as emulation:
        logits(model, ids(2, 4))
        logits(model, ids(1, 7))
    assert emulation.traffic.share_coded == 4 * 8 / (5 * 15)  # of five sums the embedding's is not coded


def measured_without_rank_1() -> None:
    model = tensor_parallel_(Toy())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(rowwise, "measured", lambda *_, **__: time.sleep(1.5))
        low_bit_(model, GroupInt(bits=8, group=64), settings=SumSettings(timeout=0.6))


def test_a_rank_that_does_not_measure_ends_the_others_in_time(ranks: Ranks):
    outcome, _ = ranks.outcomes(measured_without_rank_1)
    assert outcome.kind == "PeerError", outcome
    assert "did not take part within 0.6 s" in outcome.text
