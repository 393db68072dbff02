"""Activation checkpointing of layers whose inputs may be kept in few bits.

The first forward pass builds autograd's graph with an empty slot for every tensor that it saves, and keeps only the
layer's input. When backward reads the first slot, the layer runs again from the kept input until all slots are filled.
Every slot is emptied when it is read; reading it once more makes the layer run again.
"""

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from lowbit.activations.counting import note
from lowbit.codecs import Codec
from lowbit.codecs.checks import FLOATS
from lowbit.escape import shown

log = logging.getLogger(__name__)
MARK = "_lowbit_checkpointed"
"""The attribute of a checkpointed layer that holds its own forward."""
_now = threading.local()


def checkpoint_(layer: nn.Module, *, codec: Codec | None = None, name: str = "") -> None:
    """Keep only a layer's input for backward, and run the layer again there; changes the layer in place.

    The first tensor with a gradient among the layer's arguments is its input; the others are kept unchanged. A cache of
    keys and values (Hugging Face's `use_cache`) is left out, because the layer runs twice. The second run uses the
    random numbers and autocast of the first. Under autocast, casts of weights are freed after use. Gradients are exact
    if the input is kept unchanged. Every kind of backward pass works, and so do DDP and FSDP2 around the layer. In
    evaluation mode and without gradients the layer runs unchanged. Graphs of `torch.compile` break around it.

    Args:
        layer: any module that computes the same when it runs twice, and does not change its input.
        codec: format without state in which the input is kept; absent: unchanged.
        name: name of the layer in messages.

    Raises:
        ValueError: the layer is checkpointed already, by this function or by Hugging Face.
    """
    if is_checkpointed(layer) or getattr(layer, "gradient_checkpointing", False):
        raise ValueError(
            f"layer {shown(name)} is checkpointed already; allowed: restore_(model), and "
            "model.gradient_checkpointing_disable() of Hugging Face, first"
        )
    own = layer.forward
    layer.forward = functools.partial(_checkpointed_forward, layer, own, codec, name)
    setattr(layer, MARK, own)


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether `checkpoint_` has changed this module."""
    return MARK in vars(layer)


def restore_checkpointed(layer: nn.Module) -> None:
    """Undo `checkpoint_`; other modules are not changed."""
    own = vars(layer).pop(MARK, None)
    if own is not None:
        del layer.forward
        if layer.forward != own:
            layer.forward = own


def first_pass() -> bool:
    """Whether a checkpointed layer runs for the first time: its saved tensors are not kept, so they are not coded."""
    call: _Call | None = getattr(_now, "call", None)
    return call is not None and not call.again


def product_needed() -> bool:
    """Whether the product of the linear layer that runs now is used; also counts the linear layers.

    A checkpointed layer's second run ends with the last saved tensor, which may be the input of a linear layer.
    """
    call: _Call | None = getattr(_now, "call", None)
    if call is None:
        return True
    call.linears += 1
    return not (call.again and call.linears == call.last)


def after_linear(out: Tensor) -> Tensor:
    """Note that a linear layer has saved its tensors; return `out`."""
    call: _Call | None = getattr(_now, "call", None)
    if call is not None and not call.again:
        call.last, call.saved_at_last = call.linears, len(call.slots)
    return out


class _Slot:
    """Stands for a saved tensor in autograd's graph."""

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: "_Call") -> None:
        self.call = call
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        if self.value is None:
            self.call.run_again()
        value, self.value = self.value, None
        assert value is not None
        return value


class _Filled(Exception):
    """Ends the second run of a layer once all slots are filled."""


class _Call:
    """One forward pass of a checkpointed layer.

    Attributes:
        slots: slots of the saved tensors, in order. again: whether the layer is in its second run.
        linears: linear layers that have run in this pass. last: number of the last one, or 0 if the layer saves
            something after it. saved_at_last: number of slots after it had run.
    """

    def __init__(self, name: str, codec: Codec | None, x: Tensor, run: Callable[[Tensor], Any]) -> None:
        self.name, self.run, self.x, self.wants_grad = name, run, x, x.requires_grad
        # Codecs take plain tensors of numbers; a DTensor (`to_local`) is kept unchanged.
        codec = codec if x.dtype in FLOATS and x.numel() and not hasattr(x, "to_local") else None
        self.codec, self.shape, self.dtype = codec, x.shape, x.dtype
        self.kept = x.detach() if codec is None else codec.encode(x.detach())
        self.version = self.kept._version
        # Weak: only the graph keeps slots, and what backward no longer needs is not filled again.
        self.slots: list[weakref.ref[_Slot]] = []
        self.again, self.linears, self.last, self.saved_at_last = False, 0, 0, 0
        device = x.device.type
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys((device, "cpu"))
        ]
        self.random = torch.get_rng_state()
        self.devices, self.states = get_device_states(x) if device != "cpu" else ([], [])
        self.device = device
        note(self, [self.kept])

    def first(self, given: list[Tensor]) -> Any:
        """Run the layer, with slots in place of what it saves; `given`: the tensors among its arguments."""

        def reserve(value: Tensor) -> _Slot:
            slot = _Slot(self)
            self.slots.append(weakref.ref(slot))
            return slot

        versions = [t._version for t in given]
        self.others = [(t, t._version) for t in given if t is not self.x]  # which `run` holds as well
        with self._active(), saved_tensors_hooks(reserve, _Slot.take):
            out = self.run(self.x)
        # Slots in the graph hold this object, which would keep the unrounded input alive.
        del self.x
        if versions != [t._version for t in given]:
            raise RuntimeError(
                f"layer {self.name!r} changes an argument in place, so it cannot run again from it; "
                "allowed: keep or low-bit for this layer, or a layer that leaves its arguments as they are"
            )
        if len(self.slots) > self.saved_at_last:
            self.last = 0
        if not self.devices and self.random is not None:
            with _disable_current_modes():  # fake tensors cannot be compared
                if torch.equal(self.random, torch.get_rng_state()):
                    self.random = None  # there is nothing to restore
        return out

    def run_again(self) -> None:
        if self.codec is None and self.kept._version != self.version:
            raise RuntimeError(
                f"the input of layer {self.name!r} was changed in place after the layer ran, so it cannot run "
                "again from it; allowed: a low-bit input for this layer, or no changes in place"
            )
        if any(t._version != version for t, version in self.others):
            raise RuntimeError(
                f"an argument of layer {self.name!r}, such as a mask, was changed in place after the layer ran, so it "
                "cannot run again from it; allowed: no changes in place before backward"
            )
        x = self.kept
        if self.codec is not None:
            x = self.codec.decode(x, shape=self.shape, dtype=self.dtype)
        x = x.detach().requires_grad_(self.wants_grad)
        position = 0

        def fill(value: Tensor) -> Tensor:
            nonlocal position
            value = value.detach() if value.requires_grad else value  # avoids a cycle: an output holds the graph
            slot = self.slots[position]() if position < len(self.slots) else None
            position += 1
            if slot is not None and slot.value is None:
                slot.value = value
            # What the layer computes after its last saved tensor is not needed.
            if position == len(self.slots):
                raise _Filled
            return value

        self.again, self.linears = True, 0
        try:
            with ExitStack() as stack:
                for kind, dtype, enabled in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                if self.random is not None:
                    stack.enter_context(torch.random.fork_rng(self.devices, device_type=self.device))
                    torch.set_rng_state(self.random)
                    if self.devices:
                        set_device_states(self.devices, self.states, device_type=self.device)
                stack.enter_context(self._active())
                with torch.enable_grad(), saved_tensors_hooks(fill, lambda value: value):
                    self.run(x)
        except _Filled:
            return
        finally:
            self.again = False
        raise RuntimeError(
            f"layer {self.name!r} saved {len(self.slots)} tensors for backward, but {position} when it ran "
            "again; allowed: layers that compute the same both times"
        )

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Make this the current call; keep autocast from caching casts of weights until the model's forward ends."""
        before, _now.call = getattr(_now, "call", None), self
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            _now.call = before


@torch.compiler.disable(reason="a layer checkpointed by lowbit runs again from the input that it kept")
def _checkpointed_forward(
    module: nn.Module, own: Callable[..., Any], codec: Codec | None, name: str, *args: Any, **kwargs: Any
) -> Any:
    if not (torch.is_grad_enabled() and module.training):
        return own(*args, **kwargs)
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    if not any(t.requires_grad for t in (*tensors, *module.parameters())):
        return own(*args, **kwargs)
    floats = {k: t for k, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}
    if not floats:
        raise RuntimeError(
            f"layer {name!r} is checkpointed, but none of its arguments is a tensor of floats; allowed: keep or "
            "low-bit for this layer, or one that takes its input as an argument of its own"
        )
    first = "hidden_states" if "hidden_states" in floats else next(iter(floats))
    key = next((k for k, t in floats.items() if t.requires_grad), first)  # of the tensor to keep
    given = {k: None if hasattr(value, "get_seq_length") else value for k, value in given.items()}
    if any(given[k] is not value for k, value in enumerate(args)) or any(given[k] is not kwargs[k] for k in kwargs):
        _say_no_cache()

    # `run` lives until backward: it must not hold the whole input.
    (x, given[key]), count, names = (given[key], None), len(args), tuple(kwargs)

    def run(x: Tensor) -> Any:
        values = given | {key: x}
        return own(*(values[k] for k in range(count)), **{k: values[k] for k in names})

    return _Call(name, codec, x, run).first(tensors)


@functools.cache
def _say_no_cache() -> None:
    log.warning(
        "checkpointed layers run again, so they leave out the cache of keys and values that they are given; "
        "allowed: use_cache=False in training"
    )
