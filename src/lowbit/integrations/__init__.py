"""Low-bit communication in other engines, one module for each: torchft, TorchTitan, Megatron, Transformers, vLLM.

The modules import their engines, so none is imported here. Each names the extra that installs its engine.
"""

import importlib
import importlib.metadata
import operator
from typing import Any

__all__ = ["EngineError"]


class EngineError(ImportError):
    """An engine is not installed, or its version is not supported."""


def engine(module: str, *names: str, package: str, extra: str, tested: str) -> Any:
    """Import a module of an engine, which must have the attributes `names`, such as "Manager.start".

    Args:
        module: name, such as "torchft.manager". package: name of the package that contains it.
        extra: extra of lowbit that installs it. tested: version with which the tests pass.

    Raises:
        EngineError: the package or a dependency is missing, or this version has no such module or attribute.
    """
    needed = f"lowbit works with {package} {tested}: pip install 'lowbit[{extra}]'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(f"{package} is not installed; {needed}") from None
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise EngineError(f"{package} {version} cannot be used: {error}; {needed}") from error
    for name in names:
        try:
            operator.attrgetter(name)(imported)
        except AttributeError:
            raise EngineError(f"{package} {version} has no {module}.{name}; {needed}") from None
    return imported
