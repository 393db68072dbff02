"""Names the functions that save whole tensors for backward, from autograd's graph of a forward pass.

Reading the graph, unlike hooks on saved tensors, changes nothing, and runs no checkpointed layer again.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.activations.counting import key_of, parts_of

_EXPECTED = ("ScaledDotProduct", "LogSoftmax", "NllLoss", "CrossEntropy", "CheckpointFunction")
_WORTH_NAMING = 0.1  # share of what is kept


def uncompressed(module: nn.Module, inputs: Any, output: Any) -> list[str] | None:
    """Functions whose whole tensors are more than a tenth of what a graph keeps, largest first; None: it keeps nothing.

    Parameters, buffers and inputs do not count, nor what hooks on saved tensors keep elsewhere.
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
