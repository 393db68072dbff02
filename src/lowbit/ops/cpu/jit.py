"""How kernels are compiled and cached, and how machine operations that Python cannot spell become functions for them.

Kernels run without the interpreter's lock and without fast-math: no step may be contracted with its neighbour or
reordered, or their bytes would differ from the reference's (`summing` is for what is not bytes). Numba's front end
takes most of the compile time, widens arithmetic on small integers to 64 bits, and counts references to arrays in
inner loops. So kernels take addresses instead of arrays, and elementwise formulas are built as LLVM instructions
(`operation`); loops stay in Python.
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
from numba.core import config
from numba.extending import intrinsic

log = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that is inlined into the kernels that use it."""
    return numba.njit(forceinline=True, no_cpython_wrapper=True, **OPTIONS)(function)


def summing(function: Callable[..., Any]) -> Any:
    """The same for one whose sums may be taken in any order, and thus by vectors: no byte may depend on them."""
    return numba.njit(
        forceinline=True, no_cpython_wrapper=True, fastmath={"reassoc", "contract"}, **OPTIONS
    )(function)


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
        parameters: numba types of the operands, to which kernels' values are converted.
    """

    def decorate(build: Callable[..., Any]) -> Any:
        def define(typingctx: Any, *operands: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                return build(builder, *values) or context.get_dummy_value()

            return result(*parameters), generate

        functools.update_wrapper(define, build)
        define.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate
