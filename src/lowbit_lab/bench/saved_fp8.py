"""Saves all activations in FP8, each storage once, as COAT does in fused layers; nothing is recomputed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowbit.activations.counting import key_of, note
from lowbit.codecs import BlockFloat8
from lowbit.codecs.checks import FLOATS

_CODEC = BlockFloat8()
_FEWEST = 1024  # smaller tensors are statistics and scalars
_FROM_WEIGHTS = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy")


class _Coded:
    """A storage in few bits."""

    def __init__(self, x: Tensor) -> None:
        with torch.no_grad():
            self.payload = _CODEC.encode(x)
        self.shape, self.dtype = x.shape, x.dtype

    def decode(self) -> Tensor:
        return _CODEC.decode(self.payload, shape=self.shape, dtype=self.dtype)


class _Held:
    """A saved tensor: unchanged, or a view of a coded storage."""

    def __init__(self, source: Tensor | _Coded, place: Any) -> None:
        self.source, self.place = source, place
        note(self, [source.payload if isinstance(source, _Coded) else source])

    def unpack(self) -> Tensor:
        return self.source if isinstance(self.source, Tensor) else self.source.decode().as_strided(*self.place)


@contextlib.contextmanager
def saved_in_fp8() -> Iterator[None]:
    """Code what autograd saves in the block, except parameters, their casts, and tensors of fewer than `_FEWEST`."""
    coded: dict[Any, tuple[StorageWeakRef, weakref.ref[_Coded]]] = {}

    def pack(x: Tensor) -> _Held:
        place = x.size(), x.stride(), x.storage_offset()
        if x.dtype not in FLOATS or x.numel() < _FEWEST or _is_weight(x):
            return _Held(x.detach(), place)
        storage, key = x.untyped_storage(), (key_of(x), x.dtype, x._version)
        whole = storage.nbytes() // x.element_size()
        if whole > 2 * x.numel():  # part of a large storage: code it alone
            return _Held(_Coded(x.detach().contiguous()), (x.size(), torch.empty(x.size(), device="meta").stride(), 0))
        known = coded[key][1]() if key in coded else None
        if known is None:
            known = _Coded(x.detach().as_strided((whole,), (1,), 0))
            coded[key] = StorageWeakRef(storage), weakref.ref(known)
        return _Held(known, place)

    with saved_tensors_hooks(pack, _Held.unpack):
        yield


def _is_weight(x: Tensor) -> bool:
    """Whether `x` is a leaf that requires a gradient, or a view or cast of one."""
    if x.is_leaf:
        return x.requires_grad
    node = x.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _FROM_WEIGHTS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
