"""Views of any strides in collectives: right on all ranks, or refused before anything is sent, and the group works."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lowbit.codecs import BlockFloat8, Cast, Codec, GroupInt
from lowbit.collectives import all_gather, all_reduce, reduce_scatter
from lowbit.collectives.calls import CollectiveCall
from lowbit.wire.pytorch import default_group
from tests.lowbit.collectives.traffic import sent_bytes
from tests.processes import Ranks, on_ranks
from tests.refused import refused
from tests.views import View, negated, packed, views, widened

INT8 = GroupInt(bits=8, group=64)
CODECS: list[Codec] = [INT8, GroupInt(bits=3, group=8, symmetric=True), Cast(dtype=torch.bfloat16), BlockFloat8()]
RANKS = 2
ALGORITHMS = st.fixed_dictionaries(
    {"algorithm": st.sampled_from(["two_shot", "one_shot"]), "small": st.sampled_from([0, 1 << 14])}
)


@dataclass(frozen=True)
class Case:
    """A call with views: of the tensor, or of the share and the whole of a scatter or gather."""

    name: str
    codec: Codec
    dtype: torch.dtype
    view: View
    other: View
    how: dict[str, Any]

    def call(self, x: Tensor, y: Tensor) -> None:
        """Call the collective. What it writes is `x`."""
        if self.name == "all_reduce":
            all_reduce(x, self.codec, **self.how)
        else:
            (reduce_scatter if self.name == "reduce_scatter" else all_gather)(x, y, self.codec)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name, view = draw(st.sampled_from(["all_reduce", "all_reduce", "reduce_scatter", "all_gather"])), draw(views())
    codec, dtype = draw(st.sampled_from(CODECS)), draw(st.sampled_from([torch.float32, torch.bfloat16]))
    how = draw(ALGORITHMS) if name == "all_reduce" else {}
    share = View(view.sizes, tuple(draw(st.integers(0, 7)) for _ in view.sizes), negated=draw(st.booleans()))
    written, read = (widened(view, RANKS), share) if name == "all_gather" else (view, widened(share, RANKS))
    return Case(name, codec, dtype, written, read, how)


def right_or_refused(several: list[Case]) -> None:
    rank = dist.get_rank()
    for case in several:
        (memory, x), (_, y) = case.view.make(rank, case.dtype), case.other.make(7 + rank, case.dtype)
        before, expected = memory.clone(), packed(x)
        case.call(expected, packed(y))
        try:
            with sent_bytes() as sent:
                case.call(x, y)
        except ValueError:
            assert case.view.overlaps or case.view.negated or case.view.is_strange, case
            assert not sent, case
            assert torch.equal(memory, before), case
            continue
        assert not case.view.overlaps, case
        assert torch.equal(packed(x), expected), case
        assert torch.equal(case.view.rest(memory), case.view.rest(before)), case


def run_all(ranks: Ranks, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(several=st.lists(cases(), min_size=12, max_size=12))
    def check(several: list[Case]) -> None:
        ranks.run(right_or_refused, several, ranks=RANKS)

    check()


def test_any_view_is_right_or_refused_and_the_group_works(ranks: Ranks) -> None:
    run_all(ranks, 3)


@pytest.mark.slow
def test_many_views(ranks: Ranks) -> None:
    run_all(ranks, 60)


@pytest.mark.parametrize("how", [{}, {"small": 0}, {"small": 0, "algorithm": "one_shot"}], ids=str)
@on_ranks
def test_sums_of_views_leave_the_memory_between_alone(how: dict[str, Any]) -> None:
    for view in (lambda x: x[::2], lambda x: x.view(2, 4)[:, :1], lambda x: torch.view_as_complex(x.view(4, 2)).real):
        memory = torch.arange(8.0) + 100 * dist.get_rank()
        others = memory.clone()
        expected = 2 * view(torch.arange(8.0)) + 100
        all_reduce(view(memory), INT8, **how)
        torch.testing.assert_close(view(memory), expected, atol=0.5, rtol=0)
        view(others).copy_(view(memory))
        assert torch.equal(memory, others)


@on_ranks
def test_what_has_no_memory_to_send_is_refused_and_the_group_works() -> None:
    mesh, x = init_device_mesh("cpu", (RANKS,)), torch.ones(64)
    distributed, nested = DTensor.from_local(x, mesh), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    def summing(tensor: Any, **how: Any) -> Callable[[], Any]:
        return lambda: all_reduce(tensor, INT8, **how)

    freed = torch.ones(64)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(64)

    def transformed(transform: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: transform(lambda y: (all_reduce(y, INT8), y.sum())[1])(torch.ones(2, 64))

    with sent_bytes() as sent:
        refused(
            (summing(fake), TypeError, "tensor is traced, and has no memory; allowed: plain tensors, outside"),
            (transformed(torch.func.vmap), TypeError, "tensor is traced"),
            (transformed(torch.func.grad), TypeError, "tensor is traced"),
            (lambda: reduce_scatter(x[:32], fake, INT8), TypeError, "input is traced"),
            (summing(freed), ValueError, "tensor has no memory, as parameters that FSDP has freed; allowed: "),
            (summing(torch.ops.aten._efficientzerotensor([64])), ValueError, "tensor has no memory"),
            (lambda: reduce_scatter(x[:32], freed, INT8), ValueError, "input has no memory"),
            (summing(torch.ones(1).expand(64)), ValueError, "tensor has elements that share memory, as after expand"),
            (summing(torch.ones(1).expand(40_000)), ValueError, "tensor has elements that share memory"),
            (summing(torch.arange(9.0).unfold(0, 4, 1), small=0), ValueError, "tensor has elements that share memory"),
            (summing(negated(x)), ValueError, "tensor is a negated view"),
            (summing(distributed), TypeError, "tensor is DTensor; allowed: a plain tensor"),
            (summing(AsyncCollectiveTensor(x)), TypeError, "tensor is AsyncCollectiveTensor"),
            (summing(x.to_sparse()), TypeError, "tensor is a sparse_coo tensor; allowed: dense tensors"),
            (summing(x.to_mkldnn()), TypeError, "tensor is a _mkldnn tensor"),
            (summing(nested), TypeError, "tensor is a nested tensor"),
            (summing(x + 1j), TypeError, "tensor has dtype torch.complex64"),
            (summing(x.to("meta")), ValueError, "tensor is on meta; allowed in this group: cpu"),
            (summing([1.0]), TypeError, "tensor is list"),
            (summing(x, errors=x), ValueError, "errors shares memory with tensor"),
            (summing(x, errors=x.to_sparse()), TypeError, "errors is a sparse_coo tensor"),
            (summing(x, errors=x[:1].expand(64)), ValueError, "errors has elements that share memory"),
            (lambda: all_gather(torch.ones(1).expand(128), x, INT8), ValueError, "output has elements that share"),
            (lambda: reduce_scatter(x[:32], distributed, INT8), TypeError, "input is DTensor"),
        )
        group = default_group()
        with pytest.raises(ValueError, match="transport is 'messages', on meta; allowed: tensors on the CPU"):
            CollectiveCall(
                facts={}, group=group, device=torch.device("meta"), timeout=1, work=lambda exchange: None,
                transport="messages",
            )  # fmt: skip
    assert not sent
    all_reduce(x, INT8)
    assert torch.equal(x, torch.full((64,), 2.0))


@on_ranks(1)
def test_output_and_input_may_overlap() -> None:
    memory = torch.arange(9.0)
    reduce_scatter(memory[1:], memory[:8], INT8)
    assert torch.equal(memory, torch.tensor([0.0, 0, 1, 2, 3, 4, 5, 6, 7]))


@on_ranks
def test_calls_in_compiled_code_check_as_others() -> None:
    def total(x: Tensor) -> Tensor:
        all_reduce(x, INT8)
        return 2 * x

    compiled = torch.compile(lambda x: total(x[::2] * 1), backend="eager")
    assert torch.equal(compiled(torch.ones(128)), torch.full((64,), 2.0 * RANKS))
    with pytest.raises(ValueError, match="tensor has elements that share memory"):
        torch.compile(lambda x: total(x.sum().expand(64)), backend="eager")(torch.ones(4))
