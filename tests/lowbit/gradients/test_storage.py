import copy
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.codecs import AQSGD, BlockFloat8, Cast, GroupInt
from lowbit.collectives import algorithms, reduce
from lowbit.gradients import GradientStorage
from lowbit.gradients.stored import Stored, StoredGradient
from tests.lowbit.collectives.traffic import equal_everywhere
from tests.processes import on_ranks
from tests.refused import refused
from tests.views import View, packed, views

CODEC = BlockFloat8()


class Toy(nn.Module):
    """Matrices, vectors, an odd shape, a scalar, a weight that two layers share, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 24)
        self.first = nn.Linear(24, 192)  # enough elements for moments in 8 bits
        self.second = nn.Linear(192, 24)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(x + self.second(torch.tanh(self.first(x))) * self.gain)


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    ids = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: nn.Module, seed: int) -> list[Any]:
    return list(torch.autograd.grad(loss(model, seed), list(model.parameters()), allow_unused=True))


def filled(model: nn.Module, seeds: Iterable[int] = (1, 2, 3), **settings: Any) -> GradientStorage:
    storage = GradientStorage(model, **settings)
    for seed in seeds:
        loss(model, seed).backward()
    return storage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codec", [CODEC, GroupInt(bits=8, symmetric=True)], ids=repr)
def test_what_is_stored_is_what_the_codec_gives(dtype: torch.dtype, codec: Any) -> None:
    model = Toy().to(dtype)
    parts = [gradients(model, seed) for seed in (1, 2, 3)]
    storage = filled(model, codec=codec)
    for i, parameter in enumerate(model.parameters()):
        found: Any = storage.gradient(parameter)
        if parts[0][i] is None:
            assert found is None
            assert parameter.grad is None
            continue
        assert found is not None
        total = codec.round_trip(parts[0][i]).float()
        for part in parts[1:]:  # sums in float32, whatever the gradients are
            total = codec.round_trip(codec.round_trip(total) + part[i].float())
        assert found.dtype == dtype
        assert torch.equal(found, total.to(dtype))
        assert torch.equal(parameter.grad, found)
        exact = torch.stack([p[i].double() for p in parts]).sum(0)
        assert (found - exact).norm() <= 0.08 * exact.norm()


def test_bytes_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 2048))
    storage = GradientStorage(model)
    assert storage.nbytes == 0
    model(torch.randn(1, 512)).sum().backward()
    count = sum(p.numel() for p in model.parameters())
    assert count < storage.nbytes < 1.009 * count
    before = storage.nbytes
    storage.zero_()
    assert storage.gradient(model[0].weight) is None
    assert storage.nbytes == before, "memory is kept for the next step"


def storages(tree: Any) -> list[Any]:
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class Live(TorchDispatchMode):
    """Bytes of tensors made since it began that are still alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {s._cdata for s in storages(args)}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in given | self.sizes.keys():  # no view of what was there
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.sizes.values()))
        return out


def test_no_full_precision_copy_of_the_whole_ever_exists() -> None:
    """Twelve equal matrices in float32: at most a few of them at a time, in every phase of a step."""
    layers, width = 12, 256
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    matrix = 4 * width * width
    x = torch.randn(2, width)

    def peak(work: Callable[[], object]) -> float:
        with Live() as live:
            work()
        return live.most / matrix

    def backwards() -> None:
        for _ in range(3):
            model(x).square().sum().backward()

    assert peak(backwards) > layers, "the plain way keeps all of them"
    model.zero_grad()
    storage = GradientStorage(model)
    stored = layers * 1.01 / 4
    few = 3  # the gradient, what the codec makes of it, activations
    assert peak(backwards) < stored + few
    assert all(isinstance(p.grad, StoredGradient) for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert peak(lambda: storage.all_reduce(lambda flat: flat.mul_(2), bucket_bytes=matrix)) < few
    assert peak(lambda: storage.clip_(1.0)) < few
    assert peak(lambda: storage.step(optimizer)) < few


@on_ranks
def test_an_average_decodes_a_chunk_at_a_time() -> None:
    work, live, count = algorithms.two_shot_coded, Live(), 1 << 16

    def followed(*args: Any, **options: Any) -> None:  # in a thread of its own
        with live:
            work(*args, **options)

    parameter = nn.Parameter(torch.zeros(count))
    storage = GradientStorage([parameter])
    parameter.grad = torch.randn(count)
    storage.absorb()
    with mock.patch.object(algorithms, "two_shot_coded", followed), mock.patch.object(reduce, "CHUNK", 2048):
        storage.average()
    assert 4 * 2048 <= live.most < count, "its own half in float32 has twice as many bytes"


class CountsInGroups(torch.optim.SGD):
    """Keeps its step count with the hyperparameters, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-for": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "counts-in-groups": lambda p: CountsInGroups(p, lr=0.1),
    "torchao": lambda p: pytest.importorskip("torchao.optim").AdamW8bit(p, lr=1e-3),
    "bitsandbytes": lambda p: pytest.importorskip("bitsandbytes.optim").AdamW8bit(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_portions_is_the_whole_step(name: str) -> None:
    """Stored and whole steps give the same weights, with two groups, a scheduler and the same gradients."""
    ours, whole = Toy(), Toy()
    optimizers, schedulers = [], []
    for model in (ours, whole):
        p = list(model.parameters())
        groups = [{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.01}]
        optimizers.append(OPTIMIZERS[name](groups))
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizers[-1], 2, gamma=0.5))
    storage = GradientStorage(ours)
    for step in range(4):
        for seed in (2 * step, 2 * step + 1):
            loss(ours, seed).backward()
        for p, q in zip(whole.parameters(), ours.parameters(), strict=True):
            p.grad = storage.gradient(q)
        storage.step(optimizers[0])
        optimizers[1].step()
        for scheduler in schedulers:
            scheduler.step()
        storage.zero_()
        for p, q in zip(whole.parameters(), ours.parameters(), strict=True):
            assert torch.equal(p, q)
            assert q.grad is None
    a, b = (o.state_dict() for o in optimizers)
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    assert any(not torch.equal(p, q) for p, q in zip(ours.parameters(), Toy().parameters(), strict=True))


def test_a_factor_concerns_only_what_was_there() -> None:
    model = Toy()
    storage = filled(model, seeds=(1,))
    before: dict[str, Any] = {n: storage.gradient(p) for n, p in model.named_parameters()}
    storage.scale_(0.25)
    storage.scale_(2.0)
    more = dict(zip(before, gradients(model, 2), strict=True))
    loss(model, 2).backward()
    for name, parameter in model.named_parameters():
        if before[name] is not None:
            expected = CODEC.round_trip(before[name] * 0.5 + more[name])
            assert torch.equal(storage.gradient(parameter), expected)


def test_sparse_frozen_and_foreign_parameters() -> None:
    sparse = nn.Embedding(50, 32, sparse=True)
    storage = GradientStorage(sparse)
    for ids in ([1, 1, 7], [7, 9]):
        sparse(torch.tensor(ids)).sum().backward()
    found = storage.gradient(sparse.weight)
    assert found.layout == torch.strided
    assert found.sum(1).tolist() == [32.0 * [1, 1, 7, 7, 9].count(i) for i in range(50)]

    model = Toy()
    model.first.weight.requires_grad_(False)
    storage = filled(model)
    assert storage.gradient(model.first.weight) is None
    held = storage.gradient(model.second.weight)
    model.second.weight.requires_grad_(False)  # later: keeps what it has, gets no more
    loss(model, 4).backward()
    assert torch.equal(storage.gradient(model.second.weight), held)

    storage.close()
    some = GradientStorage([model.gain])  # the rest keeps its gradients, and is stepped as well
    loss(model, 5).backward()
    others = {p: p.grad.clone() for p in model.parameters() if p.grad is not None and p is not model.gain}
    assert len(others) == 3
    before = copy.deepcopy(model)
    some.step(torch.optim.SGD(model.parameters(), lr=1.0))
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        expected = q if p not in others else q - others[p]
        if p is model.gain:
            stored: Any = some.gradient(p)
            expected = q - stored
        assert torch.equal(p, expected)
        assert (p.grad is None) == (p not in others and p is not model.gain)


def test_shared_parameters_count_once() -> None:
    model = Toy()
    both = [model.embedding.weight, model.head.weight, model.gain]
    storage = GradientStorage(both)
    loss(model, 1).backward()
    assert len(list(storage.gradients())) == 2
    names = [name for name, _ in model.named_parameters()]
    expected = gradients(model, 1)[names.index("embedding.weight")]
    assert torch.equal(storage.gradient(model.head.weight), CODEC.round_trip(expected))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_stays_visible(bad: float) -> None:
    model = Toy()
    storage = filled(model)
    (loss(model, 4) * bad).backward()
    loss(model, 5).backward()
    assert math.isnan(storage.norm())
    assert math.isnan(storage.clip_(1.0))
    assert storage.gradient(model.first.weight).isnan().any()
    storage.zero_()
    loss(model, 5).backward()
    assert math.isfinite(storage.norm())


def test_gradients_with_a_graph_are_refused() -> None:
    model = Toy()
    storage = GradientStorage(model)
    with pytest.raises(RuntimeError, match="has a graph.*torch.autograd.grad"):
        loss(model, 1).backward(create_graph=True)
    storage.zero_()
    first = torch.autograd.grad(loss(model, 1), [model.gain], create_graph=True)[0]
    first.square().backward()  # gradients of gradients still pass
    assert storage.gradient(model.gain) is not None


def test_gradients_that_autograd_did_not_put_there() -> None:
    """Weight passes of zero-bubble schedules write `.grad` themselves."""
    model = Toy()
    storage = GradientStorage(model)
    first, more = torch.tensor(0.3), torch.tensor(0.5)
    model.gain.grad = first
    storage.absorb([model.gain, nn.Parameter(torch.ones(1))])
    model.gain.grad += more
    assert torch.equal(storage.gradient(model.gain), CODEC.round_trip(CODEC.round_trip(first) + more))
    model.gain.grad = more
    assert torch.equal(storage.gradient(model.gain), CODEC.round_trip(more))
    storage.put(model.gain, torch.tensor(0.25))
    assert storage.gradient(model.gain) == 0.25


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bucket_bytes", [4, 20_000, 1 << 20])
@on_ranks
def test_all_reduce_of_two_ranks(bucket_bytes: int, late: bool) -> None:
    """Each rank has both storages, to know what the other one sends."""
    rank, models, sizes = dist.get_rank(), [Toy(), Toy()], []
    codec = BlockFloat8(rounding="stochastic")
    storages = [filled(m, seeds=(r + 1,), codec=codec) for r, m in enumerate(models)]
    models[1].unused(torch.ones(3)).sum().backward()  # on one rank only
    models[0].gain.grad = torch.tensor(1.0)  # not absorbed yet
    storages[0].scale_(0.5)
    parts: list[list[Any]] = []
    for storage, model in zip(storages, models, strict=True):
        copied = copy.deepcopy({p: storage.gradient(p, torch.float32) for p in model.parameters()})
        parts.append(list(copied.values()))

    def total(flat: torch.Tensor) -> Any:
        sizes.append(flat.numel())
        return dist.all_reduce(flat, async_op=late)

    torch.manual_seed(rank)
    storages[rank].all_reduce(total, bucket_bytes=bucket_bytes)
    assert sizes[0] == len(parts[0])
    assert bucket_bytes < 1000 or max(sizes[1:]) * 4 <= bucket_bytes
    found: list[Any] = [storages[rank].gradient(p) for p in models[rank].parameters()]
    assert equal_everywhere(torch.tensor(sizes), *found)
    for (name, p), mean, a, b in zip(models[0].named_parameters(), found, *parts, strict=True):
        if name != "gain":
            none = torch.zeros_like(p)
            assert torch.equal(mean, CODEC.round_trip((none if a is None else a) + (none if b is None else b)))


def test_what_no_rank_has_stays_missing() -> None:
    model = Toy()
    storage = filled(model)
    storage.all_reduce(lambda flat: flat.mul_(2))
    assert storage.gradient(model.unused.weight) is None
    GradientStorage([]).all_reduce(lambda flat: flat)
    assert GradientStorage([]).norm() == 0


def test_what_cannot_be_stored_is_refused() -> None:
    model, closed, frozen = Toy(), Toy(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    storage, done = GradientStorage(model), GradientStorage(closed)
    done.close()
    frozen[0].requires_grad_(False)
    thawed, steps = GradientStorage(frozen), torch.optim.SGD(frozen.parameters(), lr=0.1)
    thawed.step(steps)
    frozen[0].requires_grad_(True)
    small, doubles = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1).double())

    def storing(codec: Any) -> Callable[[], Any]:
        return lambda: GradientStorage(model, codec=codec)

    refused(
        (lambda: GradientStorage([small, doubles]), TypeError, "parameter '1' has dtype torch.float64; allowed: tor"),
        (storing(AQSGD(inner=GroupInt())), TypeError, "codec is AQSGD.*a codec without state"),
        (storing("fp8"), TypeError, "codec is 'fp8'"),
        (storing(None), ValueError, "parameter 'gain' is in another GradientStorage; allowed: one storage, or close"),
        (lambda: storage.step(torch.optim.LBFGS(model.parameters())), TypeError, "optimizer is LBFGS"),
        (lambda: storage.step(torch.optim.SparseAdam([*model.parameters()])), TypeError, "optimizer is SparseAdam"),
        (lambda: done.step(torch.optim.SGD(closed.parameters())), RuntimeError, "this storage is closed"),
        (lambda: thawed.step(steps), RuntimeError, "parameter '0.weight' requires a gradient"),
        (lambda: thawed.all_reduce(lambda x: None), RuntimeError, "parameter '0.weight' requires a gradient"),
        (lambda: storage.clip_(-1), ValueError, "max_norm is -1; allowed: at least 0"),
        (lambda: storage.put(model.gain, torch.zeros(2)), ValueError, r"has shape \(2,\); its parameter is of"),
        (lambda: storage.put(small, torch.zeros(1)), ValueError, "not stored here"),
        (lambda: storage.put(model.gain, torch.zeros((), device="meta")), ValueError, "is on meta; its parameter is"),
        (lambda: storage.put(model.head.weight, torch.zeros(11, 24).to_sparse()), TypeError, "a sparse_coo tensor"),
        (lambda: storage.all_reduce(lambda x: x, bucket_bytes=3), ValueError, "bucket_bytes is 3; allowed: at least 4"),
    )


def test_a_storage_that_would_keep_nothing_says_so(caplog: pytest.LogCaptureFixture):
    assert GradientStorage(nn.ReLU()).nbytes == GradientStorage(nn.Linear(2, 2).requires_grad_(False)).nbytes == 0
    assert caplog.text.count("GradientStorage keeps nothing: no parameter requires a gradient") == 2


def test_means_of_float16_sums_that_float16_does_not_hold():
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.float16))
    storage = GradientStorage([parameter])
    for _ in range(4):
        (parameter * 30000.0).sum().backward()
    storage.scale_(1 / 4)
    storage.step(torch.optim.SGD([parameter], lr=1.0))
    assert torch.allclose(parameter, torch.full_like(parameter, -30000.0), rtol=2**-4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(view=views(), other=views())
def test_gradients_of_any_strides(view: View, other: View) -> None:
    """Assigned to `.grad`, added to a stored one, and put."""
    _, gradient = view.make(1)
    _, more = replace(other, sizes=view.sizes, strides=(*other.strides, 1, 0, 2)[: len(view.sizes)]).make(2)
    stored, expected = [], []
    for results, (first, second) in ((stored, (gradient, more)), (expected, (packed(gradient), packed(more)))):
        parameter = nn.Parameter(torch.zeros(view.sizes))
        storage = GradientStorage([parameter])
        parameter.grad = first
        storage.absorb()
        parameter.grad.add_(second)
        results.append(storage.gradient(parameter))
        storage.put(parameter, second)
        results.append(storage.gradient(parameter))
    assert all(torch.equal(*pair) for pair in zip(stored, expected, strict=True))


def in_threads(*works: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for each in [pool.submit(work) for work in works]:
            each.result()


def test_backward_passes_of_several_threads_lose_nothing() -> None:
    """One adds to a gradient while the other's is being stored, or is about to be."""
    parameter = nn.Parameter(torch.zeros(256))
    storage, parts = GradientStorage([parameter], codec=Cast()), torch.randn(2, 256)
    storing, over, add = threading.Event(), threading.Event(), Stored.add

    def slowly(stored: Stored, *args: Any) -> None:
        storing.set()
        over.wait(0.5)
        add(stored, *args)

    def second() -> None:
        storing.wait()
        (parameter * parts[1]).sum().backward()
        over.set()

    with mock.patch.object(Stored, "add", slowly):
        in_threads(lambda: (parameter * parts[0]).sum().backward(), second)
    assert torch.equal(storage.gradient(parameter), parts.sum(0))
    assert isinstance(parameter.grad, StoredGradient)

    storage.zero_()
    began, ended = threading.Event(), threading.Event()

    def wait_once(gradient: torch.Tensor) -> None:
        if not began.is_set():
            began.set()
            ended.wait(10)

    def other() -> None:
        began.wait()
        (parameter * parts[1]).sum().backward()
        assert not isinstance(parameter.grad, StoredGradient), "it waits for the thread that is still to add"
        ended.set()

    parameter.register_hook(wait_once)
    in_threads(lambda: (parameter * parts[0]).sum().backward(), other)
    assert torch.equal(storage.gradient(parameter), parts.sum(0))
    assert isinstance(parameter.grad, StoredGradient)
    storage.zero_()
    torch.autograd.grad((parameter * parts[0]).sum(), parameter)  # runs the first hook, but not the second
    (parameter * parts[0]).sum().backward()
    assert isinstance(parameter.grad, StoredGradient)


def test_a_stored_gradient_may_be_assigned_to_another_parameter() -> None:
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    one, other = GradientStorage(first), GradientStorage(second)
    first(torch.ones(2, 64)).sum().backward()
    second.weight.grad = first.weight.grad
    assert other.norm() == pytest.approx(float(one.norm()), rel=0.02)
    old = first.weight.grad
    first.weight.grad = None
    first(torch.zeros(2, 64)).sum().backward()
    first.weight.grad = old
    with pytest.raises(RuntimeError, match="is gone: the storage holds a later one or none"):
        one.norm()
