"""The share of the saved bytes that belongs to modules nobody compressed, measured once."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lowbit.activations.counting import Watch

log = logging.getLogger(__name__)


class Survey:
    """Watches the first training pass of a model and logs one line.

    Args:
        model: whose forward is watched. left: types of its modules that are not compressed, by name.
    """

    def __init__(self, model: nn.Module, left: dict[str, str]) -> None:
        self._left, self._watch, self._pass = left, None, ExitStack()
        self._handles = [
            model.register_forward_pre_hook(self._start, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._finish, always_call=True),
        ]

    def remove(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def _start(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        if self._watch is None and not _hooked():  # hooks of ours would hide those of others
            self._watch = Watch(model, (args, kwargs))
            self._pass.enter_context(self._watch.active())

    def _finish(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._watch is None:
            return
        self._pass.close()
        self.remove()
        sizes: Counter[str] = Counter()
        for (_, name), size in self._watch.saved.modules.items():
            if name in self._left:
                sizes[self._left[name]] += size
        total, counts = sum(self._watch.saved.modules.values()), Counter(self._left.values())
        shares = ", ".join(
            f"{kind} ({counts[kind]} modules, {size / total:.1%} of the bytes saved for backward)"
            for kind, size in sizes.items()
        )
        if shares:
            log.warning("activations of these types are saved as they are: %s", shares)


def _hooked() -> bool:
    """Whether somebody's saved_tensors_hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore
