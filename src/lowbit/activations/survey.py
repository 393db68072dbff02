"""The share of the kept bytes that belongs to modules nobody compressed, measured once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

log = logging.getLogger(__name__)


class Survey:
    """Watches the first training pass of a model and logs one line.

    Args:
        model: whose forward is watched. modules: of it, by name, those to report by type.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        self._bytes: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._inside: list[str] = []
        self._hooks: saved_tensors_hooks | None = None
        self._own = {p.untyped_storage()._cdata for p in model.parameters()}
        self._count = Counter(type(m).__name__ for m in modules.values())
        self._handles = [
            model.register_forward_pre_hook(self._start, prepend=True),
            model.register_forward_hook(self._finish, always_call=True),
        ]
        for module in modules.values():
            self._handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def remove(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def _start(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if self._hooks is None and not _hooked():  # hooks of ours would hide those of others
            hooks = self._hooks = saved_tensors_hooks(self._pack, lambda x: x)
            hooks.__enter__()

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self.remove()
        total = sum(self._bytes.values())
        shares = ", ".join(
            f"{name} ({count} modules, {self._bytes[name] / max(1, total):.1%} of the bytes kept for backward)"
            for name, count in self._count.items()
            if self._bytes[name]
        )
        if shares:
            log.warning("activations of these types are kept as they are: %s", shares)
        self._alive.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(type(module).__name__)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._own | self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(storage)  # so that no other storage gets the same address
            self._bytes[self._inside[-1] if self._inside else ""] += storage.nbytes()
        return x.detach()  # an output would hold the graph that holds it


def _hooked() -> bool:
    """Whether somebody's saved_tensors_hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore
