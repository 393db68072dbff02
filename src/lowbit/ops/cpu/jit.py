"""How kernels are compiled and cached, and how machine operations that Python cannot spell become functions for them.

Kernels run without the interpreter's lock and without fast-math: no step may be contracted with its neighbour or
reordered, or their bytes would differ from the reference's. Numba's front end takes most of the compile time and widens
arithmetic on small integers to 64 bits, so elementwise formulas are built as LLVM instructions (`operation`), while
loops and indices stay in Python.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

log = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that is always inlined: arrays passed to one that is not cost four fifths of the speed."""
    return numba.njit(forceinline=True, no_cpython_wrapper=True, **OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function called from Python, at its first call or from the cache on disk if one can be written."""
    before, config.CACHE_DIR = config.CACHE_DIR, _cache_folder()
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except (RuntimeError, OSError) as error:
        log.info("kernels are compiled anew in every process: %s", error)
        return numba.njit(**OPTIONS)(function)
    finally:
        config.CACHE_DIR = before


@functools.cache
def _cache_folder() -> str:
    """A folder named after these sources: numba itself would not notice a change in a helper of another file."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    root = config.CACHE_DIR or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lowbit"
    )
    return os.path.join(root, f"kernels-{digest.hexdigest()[:16]}")


def operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels out of one that builds LLVM instructions from a builder and its operands.

    Args:
        result: numba type of what it returns.
        parameters: numba types of the operands, to which kernels' values are converted; `types.Array` stands for any
            array and hands over the address of its first element.
    """

    def decorate(build: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *operands: Any) -> Any:
            kinds = [o if p is types.Array else p for o, p in zip(operands, parameters, strict=True)]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                given = [
                    cgutils.create_struct_proxy(kind)(context, builder, value).data
                    if parameter is types.Array
                    else value
                    for kind, parameter, value in zip(kinds, parameters, values, strict=True)
                ]
                return build(builder, *given) or context.get_dummy_value()

            return result(*kinds), generate

        functools.update_wrapper(define, build)
        define.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate


@intrinsic
def get(typingctx, array, index):  # noqa: ANN201
    """`array[index]` without the branch for negative indices, which keeps loops from vectorising."""

    def generate(context, builder, signature, values):  # noqa: ANN202
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, values[0]).data
        return builder.load(builder.gep(data, [values[1]], inbounds=True))

    return array.dtype(array, types.intp), generate


@intrinsic
def put(typingctx, array, index, value):  # noqa: ANN201
    """`array[index] = value` likewise; the value is converted to the array's type."""

    def generate(context, builder, signature, values):  # noqa: ANN202
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, values[0]).data
        builder.store(values[2], builder.gep(data, [values[1]], inbounds=True))
        return context.get_dummy_value()

    return types.none(array, types.intp, array.dtype), generate

