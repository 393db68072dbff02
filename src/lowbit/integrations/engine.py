"""Import an engine, or say in one line what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType


class EngineError(ImportError):
    """An engine is not installed, or in a version that lowbit does not know."""


def engine(module: str, *, package: str, extra: str, tested: str) -> ModuleType:
    """Import a module of an engine.

    Args:
        module: such as "torchft.manager". package: that has it, as installers call it.
        extra: of lowbit, that installs it. tested: the version that the tests pass with.

    Raises:
        EngineError: the package or one that it needs is missing, or this version has no such module.
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
        EngineError: this version has none of this name.
    """
    try:
        return getattr(module, name)
    except AttributeError:
        version = importlib.metadata.version(package)
        raise EngineError(
            f"{package} {version} has no {module.__name__}.{name}; lowbit works with {package} {tested}"
        ) from None
