"""Declare operators, check their arguments, and choose the backend that computes them.

Operators fill or read tensors that the caller allocated, so they allocate no output and work on posted buffers. All are
registered with `torch.library`, with their checks as fake implementation, so that `torch.compile` can trace them.
"""

import contextlib
import contextvars
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.layout import ALIGNMENT

log = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "gpu")
NEEDS = {"cpu": "numba", "gpu": "Triton"}
HOMES = {"cpu": "cpu", "cuda": "gpu"}  # the backend of each type of device

_chosen: contextvars.ContextVar[str] = contextvars.ContextVar("lowbit_backend", default="auto")
_modules: dict[str, ModuleType | ImportError] = {}  # modules of kernels, or their import errors
_warned: set[tuple[str, str]] = set()
_library = torch.library.Library("lowbit", "DEF")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute operators with one backend inside a `with` block (this thread or task only).

    Args:
        name: "auto" (the fastest that is installed; a missing one is logged once), "reference" (plain PyTorch), "cpu"
            (numba) or "gpu" (Triton). The last two raise if the backend is missing or the tensor is on another kind of
            device; Triton's interpreter (TRITON_INTERPRET=1 in the environment) accepts CPU tensors as well.

    Raises:
        ValueError: the name is not one of these.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Compute without autograd and without autocast, which would round inside the codec."""
    with torch.no_grad():
        if not torch.is_autocast_enabled(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


class Operator:
    """A function on payloads, registered as `torch.ops.lowbit.<package>_<function>`; calls go through PyTorch.

    A call checks its arguments, copies payloads that do not begin at a multiple of 16 bytes (kernels read words and
    vectors), and runs the backend's `implementation` inside `apart`. Autograd learns which tensors have changed.

    Attributes:
        name: package and function, such as "group_int_encode".
        definition: the function itself, in plain PyTorch.
    """

    def __init__(self, definition: Callable[..., None], writes: Sequence[str], check: Callable[..., None]) -> None:
        self.name = f"{definition.__module__.split('.')[-2]}_{definition.__name__}"
        self.definition = definition
        self.__doc__ = definition.__doc__
        self._check = check
        names = inspect.signature(definition).parameters
        self._payloads = [(i, name in writes) for i, name in enumerate(names) if "payload" in name]
        self._written = [i for i, name in enumerate(names) if name in writes]
        # Sizes are concrete integers here, never symbolic.
        schema = torch.library.infer_schema(definition, mutates_args=writes).replace("SymInt", "int")
        _library.define(self.name + schema)
        for key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
            _library.impl(self.name, self._run, key)
        torch.library.register_fake(f"lowbit::{self.name}", check, lib=_library)
        self._overload = getattr(torch.ops.lowbit, self.name).default

    def __call__(self, *arguments: Any) -> None:
        self._overload(*arguments)

    def _run(self, *arguments: Any) -> None:
        # The fake implementation checks only what is traced.
        self._check(*arguments)
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        function = implementation(self, first.device)
        given = {i: arguments[i] for i, _ in self._payloads if not _is_aligned(arguments[i])}
        aligned = {i: [p.clone() for p in x] if isinstance(x, list | tuple) else x.clone() for i, x in given.items()}
        with apart(first.device):
            function(*(aligned.get(i, argument) for i, argument in enumerate(arguments)))
        for i, written in self._payloads:
            if written and i in aligned:
                arguments[i].copy_(aligned[i])
        # Kernels write by address, which a backward pass that has saved the tensor would not notice.
        torch.autograd.graph.increment_version([x for i in self._written if (x := arguments[i]) is not None])


def operator(*, writes: str | Sequence[str], check: Callable[..., None]) -> Callable[[Callable[..., None]], Operator]:
    """Declare an operator at its definition in plain PyTorch, in its package's `reference.py`.

    Parameters must be annotated; those named `payload...` hold bytes (uint8).

    Args:
        writes: names of the parameters that it changes.
        check: called with the same arguments before any backend computes; raises if they are wrong.
    """
    names = (writes,) if isinstance(writes, str) else writes
    return lambda definition: Operator(definition, names, check)


def implementation(definition: Operator | Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the function that computes an operator on a device, for callers that create all of its tensors themselves.

    The function checks nothing, must run inside `apart` on payloads that begin at a multiple of 16 bytes, and must be
    hidden from `torch.compile` (`torch.compiler.disable`), which would free tensors whose addresses are in use. The
    dispatcher and the checks would take tens of microseconds, as long as the work on a small message.

    Args:
        definition: an operator, or a function of a `reference.py` that only such callers use.

    Raises:
        RuntimeError: the selected `backend` is missing, or does not support `device`.
    """
    if isinstance(definition, Operator):
        definition = definition.definition
    chosen, home = _chosen.get(), HOMES.get(device.type)
    if chosen == "reference":
        return definition
    if chosen not in ("auto", home):
        kernel = _kernel(definition, "gpu") if (chosen, home) == ("gpu", "cpu") else ""
        if not isinstance(kernel, str) and _launching().INTERPRETED:
            return kernel
        kind = {"cpu": "the CPU", "gpu": "a GPU"}[chosen]
        raise RuntimeError(f"backend {chosen!r} needs tensors on {kind}; found {device}")
    why = "there are no kernels for them"
    if home:
        kernel = _kernel(definition, home)
        why = kernel if isinstance(kernel, str) else _launching().unsupported(device) if home == "gpu" else ""
        if not why and not isinstance(kernel, str):
            return kernel
        if chosen == home:
            raise RuntimeError(why)
    if (device.type, why) not in _warned:
        _warned.add((device.type, why))
        log.warning("%s tensors take the slow reference path: %s", device.type, why)
    return definition


def _kernel(definition: Callable[..., Any], name: str) -> Callable[..., Any] | str:
    """Return a backend's kernel for a definition, from the module of that name next to it, or why there is none."""
    path = f"{definition.__module__.rpartition('.')[0]}.{name}"
    if path not in _modules:
        try:
            _modules[path] = importlib.import_module(path)
        except ImportError as error:
            _modules[path] = error
    module = _modules[path]
    # The module exists, but not a package that it imports.
    if isinstance(module, ImportError) and module.name != path:
        return f"backend {name!r} needs {NEEDS[name]}, which cannot be imported: {module}"
    return getattr(module, definition.__name__, f"backend {name!r} has no kernel for {definition.__name__} in {path}")


def _launching() -> Any:
    # Imported late, because it imports Triton.
    return importlib.import_module("lowbit.kernels.gpu.launch")


def _is_aligned(payload: Any) -> bool:
    """Whether a payload, or each of a list, is aligned for kernels; None counts as aligned."""
    if isinstance(payload, list | tuple):
        return all(map(_is_aligned, payload))
    return payload is None or payload.data_ptr() % ALIGNMENT == 0


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_numbers(x: Tensor, dims: int) -> None:
    """Raise unless this is a contiguous, non-empty floating-point tensor with `dims` dimensions."""
    if x.dtype not in FLOATS:
        raise TypeError(f"tensor has dtype {x.dtype}; allowed: float32, bfloat16, float16")
    if x.dim() != dims or not x.is_contiguous() or x.numel() == 0:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; allowed: {dims}-D, contiguous, not empty")


def check_bytes(name: str, payload: Tensor, nbytes: int, device: torch.device) -> None:
    """Raise unless this is a payload of `nbytes` bytes on the device."""
    if payload.dtype != torch.uint8 or payload.shape != (nbytes,) or not payload.is_contiguous():
        raise ValueError(f"{name} is {payload.dtype} {tuple(payload.shape)}; expected {nbytes} contiguous uint8")
    if payload.device != device:
        raise ValueError(f"{name} is on {payload.device}; the tensor is on {device}")


def check_shapes(shape: Sequence[int], device: torch.device, **tensors: Tensor | None) -> None:
    """Raise unless all tensors (by name) are floating-point, contiguous, non-empty and of this shape; skip None."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed: float32, bfloat16, float16")
        if x.shape != torch.Size(shape) or not x.is_contiguous() or x.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, contiguous: {x.is_contiguous()}; "
                f"expected {tuple(shape)}, contiguous, not empty"
            )
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}; expected {device}")


def check_table(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless this is a contiguous tensor of exactly this dtype and shape on the device."""
    if x.dtype != dtype or x.shape != shape or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, contiguous: {x.is_contiguous()}; "
            f"expected contiguous {dtype} {shape} on {device}"
        )


def check_pair(**tensors: Tensor | None) -> None:
    """Raise unless either all or none of the tensors are None."""
    missing = [name for name, x in tensors.items() if x is None]
    if 0 < len(missing) < len(tensors):
        raise ValueError(f"{missing[0]} is None; allowed: all of {', '.join(tensors)}, or none")
