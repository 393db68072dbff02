"""`low_bit_saved`: saves activations in few bits, in code that cannot be changed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lowbit.activations.counting import key_of, note
from lowbit.activations.policy import WHOLE, LayerAware
from lowbit.codecs import Codec
from lowbit.codecs.checks import FLOATS

MINIMUM = 1024
"""Tensors with fewer elements are not coded; they are statistics and scalars."""

_FROM_WEIGHTS = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"}
_FROM_WEIGHTS |= {"UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"}


@contextlib.contextmanager
def low_bit_saved(policy: LayerAware | None = None) -> Iterator[None]:
    """Save the activations of a `with` block in few bits, in code that cannot be changed.

    Each saved storage is coded once, and decoded in backward. Nothing is recomputed, so more is saved than with
    `compress_saved_`. Not coded: parameters, their views and casts; leaves and tensors without a gradient (inputs,
    masks, tables); tensors with fewer than 1024 elements or with a dtype other than float32, bfloat16 and float16; and,
    unless `policy.attention` is set below 16, inputs, outputs and saved tensors of `scaled_dot_product_attention` (or
    any PyTorch function with "attention" in its name).

    Limits: attention written as matrix products and softmax is not recognized, and is coded like the rest. Outputs that
    autograd functions written in Python save are not coded. Regions under `torch.compile` and inside
    `torch.utils.checkpoint` are unchanged. PyTorch does not notice in-place changes of coded tensors; they are
    harmless, because backward uses the payload of the tensor before the change.

    Args:
        policy: `bits` (also for inputs of norms), `attention`, `group` and `rounding`; absent: `LayerAware()`.

    Raises:
        TypeError: not a policy.
        ValueError: bits for layers or layer types, which only `compress_saved_` supports.
    """
    policy = LayerAware() if policy is None else policy
    if not isinstance(policy, LayerAware):
        raise TypeError(f"policy is {type(policy).__name__}; allowed: LayerAware")
    for name in ("norm", "mlp", "linear", "layers"):
        if value := getattr(policy, name):
            raise ValueError(
                f"{name} is {value!r}, but low_bit_saved knows no layers; allowed: bits, attention, group, rounding"
            )
    attention = WHOLE if policy.attention is None else policy.attention
    with _Packing(policy.codec(policy.bits), policy.codec(attention)).active():
        yield


def coded_by(codec: Codec | None, *, attention: Codec | None) -> contextlib.AbstractContextManager[None]:
    """`low_bit_saved` with any format without state, and another for attention; None: not coded."""
    return _Packing(codec, attention).active()


class _Coded:
    def __init__(self, x: Tensor, codec: Codec) -> None:
        with torch.no_grad():
            self.payload = codec.encode(x)
        self.codec, self.numel, self.dtype = codec, x.numel(), x.dtype

    def decode(self) -> Tensor:
        return self.codec.decode(self.payload, shape=(self.numel,), dtype=self.dtype)


class _Held:
    """One saved tensor, unchanged until it is decided whether to code it."""

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor | None = x
        self.place = (x.size(), x.stride(), x.storage_offset())
        self.coded: _Coded | None = None

    def unpack(self) -> Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self.coded is not None
        return self.coded.decode().as_strided(*self.place)


class _Packing(TorchFunctionMode):
    """Codes saved tensors, after their function has returned: only then its outputs are known."""

    def __init__(self, codec: Codec | None, attention: Codec | None) -> None:
        super().__init__()
        self._codec, self._attention = codec, attention
        self._pending: list[_Held] | None = None
        self._coded: dict[Any, tuple[StorageWeakRef, weakref.ref[_Coded]]] = {}
        self._of_attention: dict[int, StorageWeakRef] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, _Held.unpack), self:
            yield
        self._coded.clear()
        self._of_attention.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pending: list[_Held] = []
        before, self._pending = self._pending, pending
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self._pending = before
        if not pending:
            return out
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        in_attention = "attention" in getattr(func, "__name__", "")
        if in_attention:
            for x in [*tree_leaves((args, kwargs)), *results]:
                if isinstance(x, Tensor) and x.requires_grad:
                    storage = x.untyped_storage()
                    self._of_attention[storage._cdata] = StorageWeakRef(storage)
        outputs = {key_of(t) for t in results}
        for held in pending:
            self._settle(held, outputs, in_attention)
        return out

    def _pack(self, x: Tensor) -> _Held:
        held = _Held(x)
        if self._pending is None:
            self._settle(held, set(), False)
        else:
            self._pending.append(held)
        return held

    def _settle(self, held: _Held, outputs: set[int], in_attention: bool) -> None:
        """Code a tensor if that is allowed, and let `counted` count the result."""
        x = held.tensor
        assert x is not None
        codec = self._codec_of(x, outputs, in_attention)
        if codec is None:
            held.tensor = x.detach()  # avoids a cycle: an output holds the graph
            note(held, [held.tensor])
        else:
            held.coded, held.tensor = self._code(x, held, codec), None
            note(held, [held.coded.payload])

    def _codec_of(self, x: Tensor, outputs: set[int], in_attention: bool) -> Codec | None:
        if x.dtype not in FLOATS or x.numel() < MINIMUM or hasattr(x, "to_local"):
            return None
        if x.layout != torch.strided or _is_weight(x):
            return None
        key = key_of(x)
        if not x.requires_grad and key not in outputs and not in_attention:
            return None
        return self._attention if in_attention or key in self._of_attention else self._codec

    def _code(self, x: Tensor, held: _Held, codec: Codec) -> _Coded:
        storage = x.untyped_storage()
        total = storage.nbytes() // x.element_size()
        if total > 2 * x.numel():  # part of a large storage: code it alone
            held.place = (x.size(), torch.empty(x.size(), device="meta").stride(), 0)
            return _Coded(x.detach().contiguous(), codec)
        key = (storage._cdata, x.dtype, x._version, codec)
        cached = self._coded.get(key)
        coded = cached[1]() if cached else None
        if coded is None:
            coded = _Coded(x.detach().as_strided((total,), (1,), 0), codec)
            self._coded[key] = StorageWeakRef(storage), weakref.ref(coded)
        return coded


def _is_weight(x: Tensor) -> bool:
    """Whether `x` is a leaf that requires a gradient, or a view or cast of one."""
    if x.is_leaf:
        return x.requires_grad
    node = x.grad_fn
    while node is not None and node.name() in _FROM_WEIGHTS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
