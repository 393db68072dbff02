"""What autograd keeps between forward and backward, in bytes, by layer type: counted where it is saved."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_watching: list[_Watch] = []


def layer_type(path: list[nn.Module]) -> str:
    """The type of what the last of these modules saves, given those that it lies in, outermost first.

    A norm is "norm" wherever it is; everything else inside an MLP is "mlp"; linear layers, inside an attention module
    too, are "linear"; the rest of an attention module (rotary embedding, kernel) is "attention". "other": none of
    these; "embedding"; "loss": an empty path, what is computed outside the model.
    """
    if not path:
        return "loss"
    innermost = _kind(path[-1])
    if innermost == "norm":
        return "norm"
    kinds = [_kind(module) for module in path]
    if "mlp" in kinds:
        return "mlp"
    if innermost in ("linear", "embedding"):
        return innermost
    return "attention" if "attention" in kinds else "other"


def _kind(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    if isinstance(module, nn.Linear) or (name == "conv1d" and hasattr(module, "nf")):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "norm" in name:
        return "norm"
    if "mlp" in name or "feedforward" in name:
        return "mlp"
    return "attention" if "attention" in name else ""


class SavedBytes:
    """Bytes that autograd keeps, counted while `counted` is active.

    Attributes:
        held: bytes by layer type that are kept now.
        peak: the same at the moment at which they were most.
        modules: bytes at that moment by layer type and name of the module that saved them ("": outside the model).
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.modules: dict[tuple[str, str], int] = {}
        self._by_module: Counter[tuple[str, str]] = Counter()
        self._storages: dict[int, list[Any]] = {}  # by address: references, bytes, type, module
        self._lock = threading.RLock()  # what backward frees, it may free in threads of its own

    @property
    def total(self) -> int:
        """Most bytes that were kept at one time, without copies of weights."""
        return _without_weights(self.peak)

    @property
    def now(self) -> int:
        """Bytes kept now, without copies of weights."""
        return _without_weights(self.held)

    def reset(self) -> None:
        """Forget the peak; what is kept now goes on to be counted."""
        with self._lock:
            self._remember()

    def _add(self, key: int, size: int, kind: str, module: str) -> None:
        with self._lock:
            entry = self._storages.setdefault(key, [0, size, kind, module])
            entry[0] += 1
            if entry[0] == 1:
                self.held[kind] += size
                self._by_module[kind, module] += size
                if self.now >= self.total:
                    self._remember()

    def _release(self, key: int) -> None:
        with self._lock:
            entry = self._storages[key]
            entry[0] -= 1
            if entry[0] == 0:
                _, size, kind, module = self._storages.pop(key)
                self.held[kind] -= size
                self._by_module[kind, module] -= size

    def _remember(self) -> None:
        self.peak = {kind: size for kind, size in self.held.items() if size}
        self.modules = {name: size for name, size in self._by_module.items() if size}


def _without_weights(sizes: Mapping[str, int]) -> int:
    return sum(size for kind, size in sizes.items() if kind != "weights")


class _Saved:
    """What autograd holds in place of a saved tensor; its end is the end of the tensor's use."""

    __slots__ = ("_kept", "_keys", "tensor")

    def __init__(self, tensor: Tensor, kept: SavedBytes, keys: list[int]) -> None:
        self.tensor, self._kept, self._keys = tensor, kept, keys

    def __del__(self) -> None:
        for key in self._keys:
            self._kept._release(key)


class _Watch:
    """Follows which module of a model computes, and counts what is saved meanwhile."""

    def __init__(self, model: nn.Module, kept: SavedBytes) -> None:
        self.kept = kept
        self.path: list[tuple[str, nn.Module]] = []
        self.inputs: set[int] = set()
        self.own = {_key(t) for t in [*model.parameters(), *model.buffers()] for t in _parts(t)}
        self.handles: list[Any] = []
        for name, module in model.named_modules():
            self.handles += [
                module.register_forward_pre_hook(self._enter(name), with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def pack(self, tensor: Tensor) -> _Saved:
        # An output would hold the graph that holds it. What wants no gradient stays the very object: lowbit's own
        # functions see by it whether something is kept already.
        held = tensor.detach() if tensor.requires_grad else tensor
        return _Saved(held, self.kept, self.count(tensor))

    def count(self, tensor: Tensor) -> list[int]:
        """Count a tensor's storages and return their keys, to release them by."""
        if torch._C._current_graph_task_id() != -1:  # what backward computes again is not kept until then
            return []
        modules = [module for _, module in self.path]
        name = self.path[-1][0] if self.path else ""
        keys = []
        for part in _parts(tensor):
            key = _key(part)
            if key in self.own or key in self.inputs or not part.numel():
                continue
            copied = bool(modules) and _copies_a_weight(part, modules[-1])
            kind = "weights" if copied else layer_type(modules)
            self.kept._add(key, part.untyped_storage().nbytes(), kind, name)
            keys.append(key)
        return keys

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.path:
                given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                self.inputs = {_key(part) for t in given for part in _parts(t)}
            self.path.append((name, module))

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.path.pop()
        if not self.path:
            self.inputs = set()  # their memory may be used again


@contextmanager
def counted(model: nn.Module) -> Iterator[SavedBytes]:
    """Count the bytes that autograd keeps for backward, by layer type, in a `with` block.

        with counted(model) as kept:
            loss = model(x).square().mean()
        kept.peak      # {"norm": 8192, "mlp": 24576, ...}

    Every storage counts once, whole, for the layer that saved it first, however many operators save it or views of it,
    until the last of them is freed. Not counted: the model's parameters and buffers, and its inputs (those of the
    outermost module that is called). Copies of parameters, such as autocast makes, count as "weights" and not in the
    totals. Works for forward and backward of any number of micro-batches, under any schedule.

    Built on `torch.autograd.graph.saved_tensors_hooks`, so it sees what operators and autograd functions save. What
    other such hooks inside the block put in place of tensors is theirs, and counted if they `note` it. With
    non-reentrant activation checkpointing the inputs of the checkpointed parts are counted, which is what stays.
    What backward computes again is not counted. Not for compiled models, which have no modules.

    Args:
        model: whose modules give the layer types; several that run one after the other may share an `nn.ModuleList`.

    Yields:
        The count, which goes on after the block for what was saved inside.
    """
    kept = SavedBytes()
    watch = _Watch(model, kept)
    _watching.append(watch)
    try:
        with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda saved: saved.tensor):
            yield kept
    finally:
        _watching.remove(watch)
        watch.close()


def note(packed: object, tensors: Iterable[Tensor]) -> None:
    """For hooks that put something else in place of saved tensors: tell a `counted` around them what that keeps.

    Costs nothing without one.

    Args:
        packed: what the hook returns; as long as it lives, the tensors count.
        tensors: what it holds.
    """
    for watch in _watching[-1:]:
        for tensor in tensors:
            for key in watch.count(tensor):
                weakref.finalize(packed, watch.kept._release, key)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's data."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]


def _key(tensor: Tensor) -> int:
    """Tells storages apart as long as they live."""
    return tensor.untyped_storage()._cdata


def _copies_a_weight(tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is a parameter of the module in another dtype, as autocast makes them, transposed or not."""
    for parameter in module.parameters():
        if tensor.dim() != 2 or parameter.dim() != 2 or tensor.dtype == parameter.dtype:
            continue
        for one in (tensor, tensor.t()):
            if one.shape == parameter.shape:
                corner = parameter.detach()[:4, :4].to(one.dtype)
                if torch.equal(one.detach()[:4, :4], corner):
                    return True
    return False
