"""Counts what each module of a compressed model keeps for backward, and what it would keep without compression."""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lowbit.activations.counting import copies_a_weight, key_of, parts_of

log = logging.getLogger(__name__)

_EXPECTED = ("scaled_dot_product_attention", "loss", "cross_entropy", "embedding", "log_softmax")
_WORTH_LOGGING = 0.1  # share of what is kept


@dataclass
class Row:
    """Bytes that autograd keeps for modules whose names differ only in numbers, for which `module` has a *.

    `whole`: bytes of `kept` that are not compressed, by the function that saves them. `reasons`: why functions that
    could save less did not.
    """

    module: str
    names: set[str] = field(default_factory=set)
    plain: int = 0
    kept: int = 0
    whole: Counter[str] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)

    @property
    def label(self) -> str:
        name = self.module or "(the model itself)"
        return f"{name} ({len(self.names)})" if len(self.names) > 1 else name

    @property
    def why(self) -> str:
        """The tensors that are not compressed, and the reasons."""
        parts = [f"{name} keeps {_bytes(size)}" for name, size in self.whole.most_common(3)]
        return "; ".join([*parts, *sorted(self.reasons)])


class Survey:
    """Counts the bytes that the first training pass keeps, and those that it would keep without compression.

    Functions that save payloads run twice in that pass: the second time as PyTorch's own, only for counting.
    `running` returns the module that runs in this thread, with its name.
    """

    def __init__(self, running: Callable[[], tuple[str, nn.Module] | None]) -> None:
        self.rows: dict[str, Row] = {}
        self._running = running
        self._counting = self._is_handled = False
        self._function: Any = None
        self._compressed = 0
        self._saves_result = False  # the function that was handled last

    @property
    def plain(self) -> int:
        return sum(row.plain for row in self.rows.values())

    @property
    def kept(self) -> int:
        return sum(row.kept for row in self.rows.values())

    def can_count(self) -> bool:
        """Whether counting is possible: no backward runs, and no other hooks on saved tensors, which it would hide."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
        return not self._counting and hooks is None and torch._C._current_graph_task_id() == -1

    @contextmanager
    def counting(self, module: nn.Module, inputs: Any) -> Iterator[None]:
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        own = [*module.parameters(), *module.buffers(), *tensors]
        self._own = {key_of(part) for t in own for part in parts_of(t)}
        self._seen: dict[str, dict[int, StorageWeakRef]] = defaultdict(dict)
        self._counting = True
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._counting = False
            del self._own, self._seen

    @contextmanager
    def function(self, function: Any) -> Iterator[None]:
        before, self._function = self._function, function
        try:
            yield
        finally:
            self._function = before

    @contextmanager
    def handled(self, function: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Context in which a handler saves its tensors instead of those that the function would save."""
        if not self._counting or self._is_handled:
            yield
            return
        self._is_handled = True
        try:
            self._compressed += 1
            self._count_plain(function, args, kwargs)
            with self.function(function):
                yield
        finally:
            self._is_handled = False

    def returned(self, out: Any) -> None:
        """Note a handler's result: if the function saves it anyway, another function that saves it adds nothing."""
        if self._counting and self._saves_result and isinstance(out, Tensor):
            self._seen["plain"][key_of(out)] = StorageWeakRef(out.untyped_storage())

    def reason(self, reason: str) -> None:
        """Note why a function of the module that runs saves what it saves."""
        if self._counting:
            self._row().reasons.add(reason)

    def log(self) -> bool:
        """Log the counts if something was compressed; return False if not yet."""
        if not self._compressed:
            return False
        log.info("saved for backward:\n%s", self)
        kept = max(self.kept, 1)
        whole: Counter[str] = Counter()
        for row in self.rows.values():
            whole.update({n: s for n, s in row.whole.items() if not any(word in n for word in _EXPECTED)})
        largest = [f"{name} ({size / kept:.0%})" for name, size in whole.most_common(5) if size > _WORTH_LOGGING * kept]
        if largest:
            log.warning(
                "of %s kept for backward (%.0f%% of plain), these functions save their tensors uncompressed: %s; "
                "print what compress_saved_ returned for the modules", _bytes(kept), 100 * kept / max(self.plain, 1),
                ", ".join(largest),
            )  # fmt: skip
        return True

    def __str__(self) -> str:
        rows = sorted(self.rows.values(), key=lambda row: -row.plain)
        lines = [("module", "plain", "kept", "", "saved as it is")]
        lines += [
            (row.label, _bytes(row.plain), _bytes(row.kept), _share(row.kept, row.plain), row.why) for row in rows
        ]
        lines.append(("all", _bytes(self.plain), _bytes(self.kept), _share(self.kept, self.plain), ""))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join(
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip()
            for a, b, c, d, e in lines
        )

    def _row(self) -> Row:
        name, _ = self._running() or ("", None)
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        row = self.rows.setdefault(pattern, Row(pattern))
        row.names.add(name)
        return row

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        row = self._row()
        size = self._new("kept", tensor)
        row.kept += size
        if not self._is_handled:
            row.plain += self._new("plain", tensor)
        # Payloads have a dtype of one byte and no gradient; so do masks, which are too small to be reported.
        if size and tensor.is_floating_point():
            name = getattr(self._function, "__name__", "")
            row.whole["an autograd function" if self._function is None else name] += size
        return (tensor.detach() if tensor.requires_grad else tensor), tensor._version

    def _new(self, ledger: str, tensor: Tensor) -> int:
        """Bytes of a tensor's storages that are new in a ledger, without weights and their copies."""
        size, seen = 0, self._seen[ledger]
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):  # FSDP creates its own late
            return 0
        _, module = self._running() or ("", None)
        for part in parts_of(tensor):
            key, storage = key_of(part), part.untyped_storage()
            before = seen.get(key)
            if key in self._own or not part.numel() or (before is not None and not before.expired()):
                continue
            if module is not None and copies_a_weight(part, module):
                continue
            seen[key] = StorageWeakRef(storage)
            size += storage.nbytes()
        return size

    def _count_plain(self, function: Any, args: Any, kwargs: Any) -> None:
        row = self._row()
        saved: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            saved.update(map(key_of, parts_of(tensor)))
            row.plain += self._new("plain", tensor)
            return tensor.detach()

        devices = [t.device for t in tree_leaves(args) if isinstance(t, Tensor) and t.is_cuda][:1]
        device = (devices or [torch.device("cpu")])[0].type
        with ExitStack() as stack:
            out = None
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(torch.random.fork_rng(devices=devices))
            if torch.is_autocast_enabled(device):  # casts of weights would stay in its cache
                dtype = torch.get_autocast_dtype(device)
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            with suppress(Exception):  # PyTorch may not support the dtypes
                out = function(*args, **kwargs)
        self._saves_result = isinstance(out, Tensor) and any(key_of(part) in saved for part in parts_of(out))


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:  # with hooks PyTorch does not check this itself
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {[*tensor.shape]}"
        )
    return tensor


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 10000:
            return f"{size:.0f} {unit}"
        size /= 1000  # pyright: ignore
    return f"{size:.1f} GB"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""
