"""Low-bit communication in other engines, one module for each: torchft, TorchTitan, Megatron, Transformers, vLLM.

The modules import their engines, so none is imported here. Each names the extra that installs its engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

__all__ = ["EngineError"]


class EngineError(ImportError):
    """An engine is not installed, or its version is not supported."""


def engine(module: str, *, package: str, extra: str, tested: str) -> ModuleType:
    """Import a module of an engine.

    Args:
        module: name, such as "torchft.manager". package: name of the package that contains it.
        extra: extra of lowbit that installs it. tested: version with which the tests pass.

    Raises:
        EngineError: the package or a dependency is missing, or this version has no such module.
    """
    install = f"pip install 'lowbit[{extra}]'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(f"{package} is not installed; lowbit works with {package} {tested}: {install}") from None
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EngineError(
            f"{package} {version} cannot be used: {error}; lowbit works with {package} {tested}: {install}"
        ) from error


def part(module: ModuleType, name: str, *, package: str, tested: str) -> object:
    """An attribute of an engine's module.

    Raises:
        EngineError: this version has no attribute with this name.
    """
    try:
        return getattr(module, name)
    except AttributeError:
        version = importlib.metadata.version(package)
        raise EngineError(
            f"{package} {version} has no {module.__name__}.{name}; lowbit works with {package} {tested}"
        ) from None
