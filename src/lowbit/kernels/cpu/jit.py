"""Compile, cache and run kernels, and make functions for them from LLVM instructions that Python cannot express.

Kernels run without the interpreter's lock and without fast-math: if steps were fused or reordered, their bytes would
differ from the reference's (`summing` is for results that the other end does not recompute). Numba counts references to
arrays in inner loops, so kernels take addresses instead of arrays. What Python cannot express, such as access to memory
at an address, is built as LLVM instructions (`operation`). `over_rows` runs ranges of rows on a pool of Python threads,
because kernels hold no lock, and a busy host slows them no further.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that is inlined into the kernels that use it."""
    return numba.njit(forceinline=True, no_cpython_wrapper=True, **OPTIONS)(function)


def summing(function: Callable[..., Any]) -> Any:
    """`helper` whose sums may be computed in any order, and so be vectorised: nobody has to reproduce the result."""
    return numba.njit(forceinline=True, no_cpython_wrapper=True, fastmath={"reassoc", "contract"}, **OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function for Python at its first call, or load it from the disk cache if there can be one."""
    package = function.__module__.partition(".")[0]
    # Numba reads the folder from its global configuration when a function is declared.
    before, config.CACHE_DIR = config.CACHE_DIR, _cache_folder(package)
    try:
        dispatcher: Any = numba.njit(cache=True, **OPTIONS)(function)
        lock = os.path.join(_cache_folder(package), f"{function.__module__}.{function.__name__}.{platform.node()}.lock")
        dispatcher.compile = _in_turn(dispatcher.compile, lock)  # (machines may share a home)
        return dispatcher
    except (RuntimeError, OSError) as error:
        log.info("kernels are compiled anew in every process: %s", error)
        return numba.njit(**OPTIONS)(function)
    finally:
        config.CACHE_DIR = before


def _in_turn(compile: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Let one process of a machine compile a kernel while the others wait for its entry in the cache.

    Otherwise ranks that start together would all compile the same on the same cores. Take Numba's own lock first, as
    when a kernel calls another one, so that threads cannot deadlock.
    """

    def compile_in_turn(signature: Any) -> Any:
        with global_compiler_lock, contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(open(path, "w"))
                if fcntl and _wait_for(lock.fileno()):
                    # Unlock explicitly: a process forked meanwhile has the file open, too.
                    stack.callback(fcntl.flock, lock.fileno(), fcntl.LOCK_UN)
            except OSError as error:  # such as a file system without locks
                log.debug("%s cannot be locked, so another process may compile the same: %s", path, error)
            return compile(signature)

    return compile_in_turn


def _wait_for(file: int) -> bool:
    """Lock a file, or continue without the lock after `PATIENCE`: the process that holds it may be stopped."""
    assert fcntl
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                log.info("another process compiles this kernel, too long to be waited for")
                return False
            time.sleep(0.02)
        else:
            return True


@functools.cache
def _cache_folder(package: str) -> str:
    """Cache folder named after a digest of these sources and of a package's `cpu*.py`.

    Numba itself would not notice a change of a helper in another file.
    """
    here, root = Path(__file__).parent, Path(sys.modules[package].__file__ or "").parent
    folders = {here, here.parent, *(file.parent for file in root.rglob("cpu*.py"))}
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(file.read_bytes())
    cache = config.CACHE_DIR or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lowbit"
    )
    return os.path.join(cache, f"kernels-{digest.hexdigest()[:16]}")


def operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for kernels from one that emits LLVM instructions with a builder and operands.

    Args:
        result: numba type of the return value.
        parameters: numba types to which the operands are converted.
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


SMALL = 1 << 16  # bytes; for less, starting threads costs more than it saves


def over_rows(work: Callable[[int, int], object], rows: int, nbytes: int) -> None:
    """Call `work(start, stop)` on disjoint ranges that cover `rows`, on `torch.get_num_threads()` threads.

    Args:
        work: must not access memory that another range accesses.
        rows: number of rows.
        nbytes: size of the tensor; a small one stays on the calling thread.
    """
    threads = min(torch.get_num_threads(), rows) if nbytes >= SMALL else 1
    if threads == 1:
        work(0, rows)
        return
    bounds = [rows * i // threads for i in range(threads + 1)]
    others = [_workers().submit(work, *b) for b in itertools.pairwise(bounds[1:])]
    try:
        work(bounds[0], bounds[1])
    finally:
        # Also after an error: the other ranges still use the caller's memory.
        for other in others:
            other.result()


@functools.cache
def _workers() -> ThreadPoolExecutor:
    # One for each processor: `torch.set_num_threads` may raise the number later.
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lowbit")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a forked child does not inherit threads
