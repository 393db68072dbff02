"""Sums of partial sums that every rank codes with scales of its own: what a loop over ranks gives, to the bit."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import FeatureInt, GroupInt
from lowbit.collectives import all_gather, all_reduce, all_reduce_bytes, calls, reduce_scatter
from lowbit.collectives.algorithms import ONE_SHOT_BYTES, Shards, automatic_algorithm
from tests.lowbit.collectives.traffic import sent_bytes
from tests.lowbit.pipeline import toy
from tests.processes import Ranks, on_ranks
from tests.refused import refused

SIZE = 72


def part(rank: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Partial sums with an outlier, of a size that depends on the rank."""
    x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rank + 7 * rows))
    x[:, 5] *= 40 * (rank + 1)
    return (x * (rank + 1)).to(dtype)


def codec_of(ranks: int, artifact: str = "") -> FeatureInt:
    return FeatureInt.fit([part(r, 64) for r in range(ranks)], outliers=2, artifact=artifact)


def summed(codec: FeatureInt, parts: list[Tensor], algorithm: str, divisor: int) -> Tensor:
    """In one process, all at once."""
    payloads = [codec.part(rank).encode(x) for rank, x in enumerate(parts)]
    total = codec.sum(payloads, out=torch.empty(parts[0].shape), divisor=divisor)
    return codec.whole().round_trip(total) if algorithm == "two_shot" else total


def sums() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    codec = codec_of(ranks)
    for rows, dtype, how in (
        (1, torch.bfloat16, {}),
        (37, torch.bfloat16, {"chunk": 1040}),
        (37, torch.float16, {"chunk": 16, "op": "avg"}),
        (150, torch.float32, {"transport": "collectives", "chunk": 2000}),
        (0, torch.bfloat16, {}),
        (2 * ONE_SHOT_BYTES // SIZE, torch.bfloat16, {}),
    ):
        parts = [part(r, rows, dtype) for r in range(ranks)]
        auto = automatic_algorithm(ranks, codec.nbytes((rows, SIZE)))
        assert (auto == "two_shot") == (ranks > 2 and rows > 150)
        for algorithm in ("one_shot", "two_shot", "auto"):
            x = parts[rank].clone().view(rows, 1, SIZE)
            options: dict[str, Any] = how | {"algorithm": algorithm, "small": 0}
            with sent_bytes() as sent:  # whichever rank's part is given: the same
                all_reduce(x, codec.part(ranks - 1 - rank), **options)
            used = auto if algorithm == "auto" else algorithm
            expected = summed(codec, parts, used, ranks if "op" in how else 1).to(dtype)
            assert torch.equal(x.view(rows, SIZE), expected), (rows, dtype, options)
            if "transport" not in how:
                options.pop("op", None)
                assert sum(sent) == all_reduce_bytes(x.numel(), codec, rank=rank, ranks=ranks, **options), options
    x = part(rank, 36)
    mine = torch.empty(36 // ranks * SIZE)
    reduce_scatter(mine, x, codec)
    everybodys = torch.empty(ranks * x.numel())
    all_gather(everybodys, x.reshape(-1), codec)
    decoded = [codec.part(r).round_trip(part(r, 36).float()) for r in range(ranks)]
    assert torch.equal(everybodys, torch.cat(decoded).view(-1))
    expected = summed(codec, [part(r, 36) for r in range(ranks)], "one_shot", 1).view(ranks, -1)
    assert torch.equal(mine, expected[rank])
    bad = part(rank, 8)
    if rank == 1:
        bad[3, 9] = torch.inf
    all_reduce(bad, codec, algorithm="one_shot", small=0)
    assert bad.isnan().nonzero().tolist() == [[3, e] for e in range(SIZE) if e not in codec.features]
    with torch.inference_mode():  # whose tensors no other mode may write to
        x = part(rank, 9)
        all_reduce(x, codec, algorithm="two_shot", small=0)
    y = part(rank, 9)
    all_reduce(y, codec, algorithm="two_shot", small=0)
    assert torch.equal(x, y)
    one_question_for_all_layers(rank, ranks)


def one_question_for_all_layers(rank: int, ranks: int) -> None:
    """Layers of one artifact and of one shape are one kind of call; others are not."""
    group = dist.group.WORLD
    assert group is not None
    kinds = calls.queue_of(group)._kinds
    layers = [codec_of(ranks, artifact="one") for _ in range(3)]
    changed = layers[1].ranges * 2
    layers[1] = FeatureInt(ranges=changed, total=layers[1].total, features=(1, 2), artifact="one")
    before = len(kinds)
    for layer in layers:
        x = part(rank, 5)
        all_reduce(x, layer, algorithm="one_shot", small=0)
        expected = summed(layer, [part(r, 5) for r in range(ranks)], "one_shot", 1)
        assert torch.equal(x, expected.bfloat16())
    assert len(kinds) == before + 1
    all_reduce(part(rank, 5), codec_of(ranks, "two"), algorithm="one_shot", small=0)
    assert len(kinds) == before + 2


@pytest.mark.parametrize("count", [2, 3])
def test_sums_are_those_of_one_process(ranks: Ranks, count: int):
    ranks.run(sums, ranks=count)


def differs() -> None:
    ranges = torch.ones(2, SIZE)
    ranges[1, 3] += dist.get_rank() * 1e-6
    codec = FeatureInt(ranges=ranges, total=torch.ones(SIZE), features=())
    all_reduce(part(0, 4), codec, small=0, timeout=40)


def test_other_ranges_are_the_same_error_on_all(ranks: Ranks):
    text = toy.disagreement(ranks.outcomes(differs))
    assert "codec: FeatureInt(4 bits, token gain, clip 0.8, 72 features, 0 outliers, rank 0 of 2" in text


def swapped(features: tuple[int, ...], first: bool) -> None:
    """Rank 0 in layer 0, rank 1 in layer 1, of a kind that is agreed on already, or of a new one."""
    layers = [codec_of(2, "one")]
    layers.append(FeatureInt(ranges=layers[0].ranges * 2, total=layers[0].total, features=features, artifact="one"))
    with mock.patch.multiple(calls, _SLOW=0.1, _LOOK=0.1):  # rather than wait for seconds
        if not first:
            all_reduce(part(0, 4), layers[0], small=0)
        all_reduce(part(0, 4), layers[dist.get_rank()], small=0, timeout=40)


def test_swapped_layers_are_the_same_error_on_all(ranks: Ranks):
    for features, first in (((1, 2, 3), False), ((1, 2), True)):
        assert "layer: " in toy.disagreement(ranks.outcomes(swapped, features, first))


@on_ranks(1)
def test_what_does_not_fit_is_refused_at_once() -> None:
    with torch.inference_mode():
        made = part(0, 4)
    share, codec, whole = torch.empty(4, SIZE), codec_of(1), r"\(\.\.\., 72\), or flat in multiples of it"

    def summing(x: Tensor, codec: FeatureInt = codec) -> Callable[[], Any]:
        return lambda: all_reduce(x, codec, small=0)

    refused(
        (summing(part(0, 4), codec_of(2)), ValueError, "allowed in a group of 1: one for 1 ranks"),
        (summing(torch.ones(4, SIZE + 1)), ValueError, rf"is float32 \(4, 73\); allowed with FeatureInt.*{whole}"),
        (summing(torch.ones(SIZE, 4)), ValueError, whole),
        (summing(torch.ones(SIZE + 1)), ValueError, whole),
        (lambda: all_reduce(made, codec), ValueError, "tensor was made in inference mode, which is off"),
        (lambda: all_gather(made, share, codec), ValueError, "output was made in inference mode"),
        (lambda: all_gather(share.view(8, -1), share, codec), ValueError, r"output is float32 \(8, 36\)"),
        (lambda: reduce_scatter(share, share.view(8, -1), codec), ValueError, r"input is float32 \(8, 36\)"),
    )


@pytest.mark.parametrize("numel", [0, 72, 720, 72 * 1001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("chunk", [16, 80, 1000, 1 << 20])
def test_shards_and_chunks_are_whole_rows(numel: int, ranks: int, chunk: int):
    shards = Shards(numel=numel, ranks=ranks, chunk=chunk, grain=72)
    pieces = [shards.piece(r, k) for r in range(ranks) for k in range(shards.chunks)]
    assert all(p.start % 72 == p.stop % 72 == 0 for p in pieces)
    assert sum(p.stop - p.start for p in pieces) == numel
    assert all(p.stop - p.start <= max(chunk, 72) for p in pieces)
    even = Shards(numel=numel, ranks=ranks, chunk=chunk)
    assert even.length == 16 * math.ceil(math.ceil(numel / ranks) / 16)
    assert even.chunk == max(chunk, 16)
    assert GroupInt().grain == 1
