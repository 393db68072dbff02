"""Layouts of tensors as JSON: what arrives, and what a peer that sends something else comes to."""

import json
import pickle
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.collectives import PeerError
from lowbit.pipeline import layouts as layouts_module
from lowbit.pipeline.layouts import MESSAGE_BYTES, Constant, layout_of, parse, receive_layouts, send_layouts
from lowbit.wire.pytorch import default_group
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.toy import FP32
from tests.processes import on_ranks
from tests.refused import refused

LAYOUTS = [
    torch.empty(2, 3, 4, dtype=torch.bfloat16, requires_grad=True),
    torch.empty(5, 2).T,
    torch.empty(3, 0, 7, dtype=torch.int64),
    torch.empty((), dtype=torch.bool),
    torch.empty(3, dtype=torch.complex64, requires_grad=True),
    torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.empty(5, 2).T.as_subclass(Constant),
]


def facts(x: Any) -> Any:
    return x.shape, x.stride(), x.dtype, x.requires_grad, isinstance(x, Constant)


@pytest.mark.parametrize(
    "x", [torch.empty(1, 7).expand(5, 7), torch.empty(9).unfold(0, 4, 1), torch.empty(4, 9)[:, ::2]]
)
def test_what_shares_memory_or_has_gaps_arrives_without(x: torch.Tensor):
    layout = layout_of(x)
    assert facts(layout) == facts(x.contiguous())
    stated = {"shape": list(x.shape), "stride": list(x.stride()), "dtype": "float32", "requires_grad": False}
    stated["constant"] = False
    assert facts(parse(json.dumps([stated]).encode())[0]) == facts(layout)


@on_ranks
def test_every_layout_arrives_as_it_is() -> None:
    group = default_group()
    for layouts in ([layout_of(x) for x in LAYOUTS], []):
        if dist.get_rank() == 0:
            send_layouts(layouts, group, 1, 20)
        else:
            received = receive_layouts(group, 0, "rank 0", 20)
            assert [facts(x) for x in received] == [*map(facts, LAYOUTS[: len(layouts)])]


GOOD: dict[str, Any] = {
    "shape": [2, 3], "stride": [3, 1], "dtype": "float32", "requires_grad": False, "constant": False,
}  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"shape": [2]},
    {"shape": [-2, 3]},
    {"shape": [2.0, 3]},
    {"shape": [True, 3]},
    {"shape": [2**20, 2**21], "stride": [0, 0]},
    {"shape": [2**63, 0]},
    {"stride": [2**40, 1]},
    {"stride": [-1, 1]},
    {"stride": "31"},
    {"shape": "23"},
    {"dtype": "os"},
    {"dtype": "float32\n"},
    {"dtype": None},
    {"requires_grad": 1},
    {"dtype": "int8", "requires_grad": True},
    {"constant": 1},
    {"constant": True, "requires_grad": True},
    {"constant": True, "dtype": "int8"},
    {"more": 0},
]


def test_layouts_that_cannot_be_or_cross_are_refused():
    assert facts(*parse(json.dumps([GOOD]).encode())) == facts(torch.empty(2, 3))
    changed = [json.dumps([GOOD | change]).encode() for change in BAD]
    no_lists = (b'{"shape": [2]}', b"1", b'"text"', b"[1]", b"[[]]", b"")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    many, not_used = [torch.empty(2)] * 1000, mock.Mock()
    refused(
        *((partial(parse, text), ValueError, "is not the layout of a tensor") for text in changed),
        *((partial(parse, text), ValueError, "is no|Expecting value") for text in no_lists),
        (lambda: layout_of(torch.eye(3).to_sparse()), TypeError, "a sparse_coo tensor cannot cross .*: dense tensors"),
        (lambda: layout_of(nested), TypeError, "a nested tensor cannot cross .*; allowed: dense tensors"),
        (lambda: send_layouts(many, not_used, 0, 20), ValueError, "the layouts of 1000 tensors .* allowed: 16384"),
    )


class Opened:
    """Tells, when it is unpickled, that it was."""

    def __reduce__(self) -> Any:
        return exec, ("import torch.distributed as dist; dist.unpickled = True",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (pickle.dumps(Opened()), ""),
        (b"[" * MESSAGE_BYTES, ""),
        (json.dumps([GOOD | {"shape": [2**41, 1]}]).encode(), "{"),
        (b"[null]", "None is not the layout"),
    ],
    ids=["pickled", "deep", "huge", "missing"],
)
@on_ranks
def test_a_peer_that_sends_something_else_is_named(text: bytes, said: str) -> None:
    """Rank 0 sends a text of its own when the upper stage, of rank 1, wants layouts."""
    if dist.get_rank() == 0:
        message = torch.frombuffer(bytearray(text.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
        default_group().send([message], 1, layouts_module._TAG).wait()
        return
    with pytest.raises(PeerError, match=f"^rank 0 sent something other than layouts of tensors: {said}") as caught:
        receive_layouts(default_group(), 0, "rank 0", 20)
    assert caught.value.rank == 0
    assert not hasattr(dist, "unpickled")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks
def test_a_pipeline_unpickles_nothing(schedule: str) -> None:
    """Steps and evaluations while nothing that a peer sent can be unpickled."""
    run = toy.Run(schedule, toy.lowbit(forward=FP32, backward=FP32))
    with ExitStack() as stack:
        for module in (dist, dist.distributed_c10d):
            for name in ("send_object_list", "recv_object_list", "_tensor_to_object"):
                stack.enter_context(mock.patch.object(module, name, None, create=True))
        for step in range(2):
            run.train(step)
            run.evaluate(step)
    assert len(run.losses) == 2 * toy.MICRO_BATCHES * run.last
