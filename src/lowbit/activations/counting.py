"""Counts the bytes that autograd saves for backward, by layer type, and names functions that save whole tensors."""

import re
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves


def layer_type(path: list[nn.Module]) -> str:
    """The layer type of tensors saved by the last of these modules, each of which is inside the one before it.

    A norm is always "norm"; everything else inside an MLP is "mlp"; other linear layers, also inside attention, are
    "linear"; the rest of an attention module (rotary embedding, kernel) is "attention". An embedding is "embedding",
    any other module "other"; an empty path, computed outside the model, is "loss".
    """
    if not path:
        return "loss"
    kinds = [_kind(module) for module in path]
    if "mlp" in kinds and kinds[-1] != "norm":
        return "mlp"
    if kinds[-1] in ("norm", "linear", "embedding"):
        return kinds[-1]
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
    """Bytes that autograd has saved, counted while `counted` is active.

    Attributes:
        held: bytes held now, by layer type.
        peak: the same at the time when the sum was largest.
        modules: bytes at the peak by layer type and name of the module that saved them ("": outside the model).
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.modules: dict[tuple[str, str], int] = {}
        self._by_module: Counter[tuple[str, str]] = Counter()
        self._storages: dict[int, list[Any]] = {}  # by address: references, bytes, type, module
        # Reentrant: a tensor may be freed, and so released, while this thread counts another.
        self._lock = threading.RLock()  # backward may free tensors in its own threads

    @property
    def total(self) -> int:
        """Most bytes that were held at one time, without copies of weights."""
        return _without_weights(self.peak)

    @property
    def now(self) -> int:
        """Bytes held now, without copies of weights."""
        return _without_weights(self.held)

    def reset(self) -> None:
        """Reset the peak to the bytes that are held now; counting continues."""
        with self._lock:
            self.peak = {kind: size for kind, size in self.held.items() if size}
            self.modules = {name: size for name, size in self._by_module.items() if size}

    def _add(self, key: int, size: int, kind: str, module: str) -> None:
        with self._lock:
            entry = self._storages.setdefault(key, [0, size, kind, module])
            entry[0] += 1
            if entry[0] == 1:
                self.held[kind] += size
                self._by_module[kind, module] += size
                if self.now >= self.total:
                    self.reset()

    def _release(self, key: int) -> None:
        with self._lock:
            entry = self._storages[key]
            entry[0] -= 1
            if entry[0] == 0:
                _, size, kind, module = self._storages.pop(key)
                self.held[kind] -= size
                self._by_module[kind, module] -= size


def _without_weights(sizes: Mapping[str, int]) -> int:
    return sum(size for kind, size in sizes.items() if kind != "weights")


class _Packed:
    """Stands for a saved tensor in autograd's graph; it is freed when the tensor is no longer needed."""

    __slots__ = ("_keys", "_saved", "tensor")

    def __init__(self, tensor: Tensor, saved: SavedBytes, keys: list[int]) -> None:
        self.tensor, self._saved, self._keys = tensor, saved, keys

    def __del__(self) -> None:
        for key in self._keys:
            self._saved._release(key)


class _SavedCounter:
    """Follows which module of a model is running, and counts the tensors that it saves."""

    def __init__(self, model: nn.Module) -> None:
        self.saved = SavedBytes()
        self.path: list[tuple[str, nn.Module]] = []
        self._inputs: set[int] = set()
        self._own = {key_of(t) for t in [*model.parameters(), *model.buffers()] for t in parts_of(t)}
        self.handles: list[Any] = []
        for name, module in model.named_modules():
            # Not a functools.partial: `experts` recognizes hooks of this library by their module.
            def enter(module: nn.Module, *inputs: Any, name: str = name) -> None:
                if not self.path:
                    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
                    self._inputs = {key_of(part) for t in tensors for part in parts_of(t)}
                self.path.append((name, module))

            self.handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def count(self, tensor: Tensor) -> list[int]:
        if torch._C._current_graph_task_id() != -1:  # recomputed in backward, so not kept from forward
            return []
        modules = [module for _, module in self.path]
        name = self.path[-1][0] if self.path else ""
        keys = []
        for part in parts_of(tensor):
            key = key_of(part)
            if key in self._own or key in self._inputs or not part.numel():
                continue
            copied = bool(modules) and copies_a_weight(part, modules[-1])
            kind = "weights" if copied else layer_type(modules)
            self.saved._add(key, part.untyped_storage().nbytes(), kind, name)
            keys.append(key)
        return keys

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.path.pop()
        if not self.path:
            self._inputs = set()  # their memory may be reused, so their keys are no longer valid

    def pack(self, tensor: Tensor) -> _Packed:
        # Detach outputs, which would form a cycle with the graph. Keep other tensors as the same object, by which
        # lowbit's own functions recognize payloads that are saved already.
        held = tensor.detach() if tensor.requires_grad else tensor
        return _Packed(held, self.saved, self.count(tensor))


_watching: list[_SavedCounter] = []


@contextmanager
def counted(model: nn.Module) -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves for backward, by layer type, in a `with` block.

        with counted(model) as saved:
            loss = model(x).square().mean()
        saved.peak      # {"norm": 8192, "mlp": 24576, ...}

    Every storage counts once and in full, for the layer that saved it first, until all tensors saved from it are freed.
    The model's parameters and buffers, and its inputs (those of the outermost module that is called), are not counted.
    Copies of parameters, as autocast makes them, count as "weights" and not in the totals. It works for forward and
    backward of any number of micro-batches, under any schedule.

    It is built on `torch.autograd.graph.saved_tensors_hooks`: it sees what operators and autograd functions save. If
    other such hooks inside the block replace tensors, their replacements are counted only if they `note` them. With
    non-reentrant activation checkpointing the inputs of the checkpointed parts are counted, which are held until
    backward; recomputed tensors are not. It does not work for compiled models, which have no modules.

    Args:
        model: the model whose modules define the layer types; an `nn.ModuleList` can hold several that run in turn.

    Yields:
        The count, which is still updated after the block for tensors saved inside.
    """
    watch = _SavedCounter(model)
    _watching.append(watch)
    try:
        with saved_tensors_hooks(watch.pack, lambda packed: packed.tensor):
            yield watch.saved
    finally:
        _watching.remove(watch)
        for handle in watch.handles:
            handle.remove()


def note(packed: object, tensors: Iterable[Tensor]) -> None:
    """Let `counted` count these tensors as long as `packed` lives; for hooks that replace saved tensors."""
    for watch in _watching[-1:]:
        for tensor in tensors:
            for key in watch.count(tensor):
                weakref.finalize(packed, watch.saved._release, key)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's data."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        parts = (getattr(tensor, name) for name in names)  # of a DTensor one is its mesh
        return [inner for part in parts if isinstance(part, Tensor) for inner in parts_of(part)]
    return [tensor]


def key_of(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage while it lives."""
    return tensor.untyped_storage()._cdata


def copies_a_weight(tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is a parameter of the module in another dtype, as autocast makes them, transposed or not."""
    if tensor.dim() != 2:
        return False
    return any(
        # A corner is enough: comparing whole weights for each saved matrix would be slow.
        x.shape == part.shape and torch.equal(x[:4, :4], part[:4, :4].to(x.dtype))
        for parameter in module.parameters()
        if tensor.dtype != parameter.dtype
        for part in parts_of(parameter.detach())
        for x in (tensor.detach(), tensor.detach().t())
    )


_EXPECTED = ("ScaledDotProduct", "LogSoftmax", "NllLoss", "CrossEntropy", "CheckpointFunction")
_WORTH_NAMING = 0.1  # share of what is kept


def uncompressed(module: nn.Module, inputs: Any, output: Any) -> list[str] | None:
    """Functions whose whole tensors are more than a tenth of what a graph keeps, largest first; None: it keeps nothing.

    Parameters, buffers and inputs do not count, nor what hooks on saved tensors keep elsewhere. Reading the graph,
    unlike hooks, changes nothing, and runs no checkpointed layer again.
    """
    given = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    seen = {key_of(part) for t in [*module.parameters(), *module.buffers(), *given] for part in parts_of(t)}
    nodes = {None, *(t.grad_fn for t in given)}  # what computed the inputs is not the module's
    saved: list[tuple[bool, str, Tensor]] = []
    # A result that is a dataclass may be unknown to PyTorch.
    results = tree_leaves([output, getattr(output, "__dict__", None)])
    new: list[Any] = [t.grad_fn for t in results if isinstance(t, Tensor)]
    while new:
        if (node := new.pop()) in nodes:
            continue
        nodes.add(node)
        new += [function for function, _ in node.next_functions]
        ours = getattr(type(node), "_forward_cls", type(node)).__module__.startswith("lowbit.")
        expected = ours or any(word in node.name() for word in _EXPECTED)
        saved += [(expected, re.sub(r"Backward\d*$", "", node.name()), tensor) for tensor in _saved_by(node)]
    kept, whole = 0, Counter()
    for expected, name, tensor in sorted(saved, key=lambda each: not each[0]):  # who saves these too adds nothing
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):  # FSDP creates its own late
            continue
        for part in parts_of(tensor):
            if key_of(part) not in seen:
                seen.add(key_of(part))
                size = part.untyped_storage().nbytes()
                kept += size
                whole[name] += size if part.is_floating_point() and not expected else 0
    return [name for name, size in whole.most_common() if size > _WORTH_NAMING * kept] if kept else None


def _saved_by(node: Any) -> list[Tensor]:
    found: list[Any] = []
    with suppress(RuntimeError):  # a backward inside the forward pass has freed them
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                value = getattr(node, name)
                found += value if isinstance(value, tuple | list) else [value]
    held = (getattr(each.data, "tensor", each.data) for each in found)  # `counted` holds tensors in an object
    return [each for each in held if isinstance(each, Tensor)]
