"""Damage on the way between two stages: noticed over every transport, before an optimizer uses what came of it."""

from typing import Any

import pytest
import torch.distributed as dist

from lowbit.pipeline import DamagedError, PeerError
from lowbit.wire.checksum import CHECKSUM_BYTES
from tests.damage import Flip, Replay, on_the_way
from tests.lowbit.collectives.traffic import sent_bytes
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.test_staged import FIT, over
from tests.lowbit.pipeline.toy import INT4, INT6
from tests.processes import Ranks, on_ranks

N = toy.MICRO_BATCHES


def trained(transport: str, sender: int, change: Any, evaluated: bool = False) -> tuple[str, str, int, int]:
    """Steps, or a step and evaluations, until something that a rank sends is changed on its way."""
    with over(transport):
        run = toy.Run("1f1b", toy.lowbit(timeout=10, **FIT))
    if evaluated:
        run.train(0)
    with on_the_way(sender, change):
        for step in range(3):
            try:
                (run.evaluate if evaluated else run.train)(step)
            except RuntimeError as error:
                return type(error).__name__, str(error), getattr(error, "rank", -1), step
    return "", "", -1, 3


@pytest.mark.parametrize("transport", ["early", "staged"])
@pytest.mark.parametrize(("sender", "direction"), [(0, "forward"), (1, "backward")])
def test_a_flipped_bit_names_sender_boundary_and_step(ranks: Ranks, transport: str, sender: int, direction: str):
    announced = sender == 0  # the pass, by one more message, which is the first of step 2
    found = ranks.run(trained, transport, sender, Flip(N + announced + 2))
    error, text, culprit, step = found[1 - sender]
    assert error == "DamagedError"
    assert text == (
        f"boundary 0 {direction}, micro-batch 2, tensor 0, step 2: the message from rank {sender} (stage {sender}) is "
        "damaged: it does not fit the checksum behind it; bytes changed on the way, or it is the message of another "
        "step or place"
    )
    assert (culprit, step) == (sender, 1)
    error, told, culprit, _ = found[sender]  # hears why the other one ended
    assert (error, culprit) == ("PeerError", 1 - sender)
    assert told == f"rank {1 - sender} (stage {1 - sender}) gave up: DamagedError: {text}"


@pytest.mark.parametrize(
    ("change", "evaluated", "place"),
    [
        (Replay(1, N + 2), False, "micro-batch 1, tensor 0, step 2: "),
        (Replay(N + 1, N + 2), False, "micro-batch 1, tensor 0, step 2: "),
        (Flip(4), True, "micro-batch 3, tensor 0, evaluation after step 1:"),  # the first is the announcement
    ],
    ids=["step", "micro-batch", "evaluation"],
)
def test_a_message_of_another_step_or_place_is_noticed_and_damage_in_evaluation(
    ranks: Ranks, change: Any, evaluated: bool, place: str
):
    error, text, culprit, _ = ranks.run(trained, "early", 0, change, evaluated)[1]
    assert (error, culprit) == ("DamagedError", 0)
    assert text.startswith(f"boundary 0 forward, {place}")


@on_ranks
def test_nothing_that_is_damaged_is_decoded() -> None:
    run = toy.Run("gpipe", toy.lowbit(timeout=10, **FIT))
    run.train(0)
    if dist.get_rank() == 1:
        lane = run.stages[0].lanes.forward(outgoing=False)
        decode, decoded = lane.decode, []
        lane.decode = lambda *args: (decoded.append(args), decode(*args))
        with pytest.raises(DamagedError):
            run.train(1)
        assert len(decoded) == 1, "not the second one"
        return
    with on_the_way(0, Flip(2)), pytest.raises(PeerError, match="gave up: DamagedError"):
        run.train(1)


@on_ranks
def test_a_damaged_announcement_is_noticed() -> None:
    run = toy.Run("1f1b", toy.lowbit(timeout=10, **FIT))
    run.train(0)
    damage = r"the announcement of pass 2 from rank 0 \(stage 0\) is damaged: it does not fit the checksum"
    said = damage if dist.get_rank() else rf"rank 1 \(stage 1\) gave up: DamagedError: {damage}"
    with on_the_way(0, Flip(0)), pytest.raises(RuntimeError, match=f"^{said}"):
        run.train(1)


def sizes(transport: str, checksums: bool) -> Any:
    """Losses of two steps, and the bytes that this stage says it sent."""
    with over(transport):
        run = toy.Run("1f1b", toy.lowbit(warmup_steps=1, checksums=checksums, **FIT))
    with sent_bytes() as sent:
        for step in range(2):
            run.train(step)
    traffic = run.stages[0].traffic
    assert sum(sent) == traffic.forward_bytes + traffic.backward_bytes + traffic.announced_bytes
    return run.losses, traffic.forward_bytes + traffic.backward_bytes


@pytest.mark.parametrize("transport", ["early", "staged"])
def test_without_checksums_nothing_is_added_and_with_them_nothing_changes(ranks: Ranks, transport: str):
    off, on = (ranks.run(sizes, transport, checksums) for checksums in (False, True))
    shape = (toy.ROWS, 8, toy.WIDTH)
    plain = 4 * toy.ROWS * 8 * toy.WIDTH
    for (losses, few), (more_losses, more), codec in zip(off, on, (INT4, INT6), strict=True):
        assert few == N * (plain + codec.nbytes(shape))
        assert more == few + 2 * N * CHECKSUM_BYTES
        assert toy.same(losses, more_losses)
    assert len(off[1][0]) == 2 * N
