"""The examples of every format, from `examples.py` in its folder of tests: a new format is covered by adding that.

An `examples.py` may hold, each for the tests that say so:

- `CODECS`: codecs for any tensor (`test_base.py`), with `expected_error(codec)`: the most, of Gaussian numbers;
- `GOLDEN`: what is frozen, by the name of its file (`test_golden.py`);
- `hostile()`: what is attacked with hostile bytes (`tests/fuzz/catalogue.py`); `layout(codec, shape)`: of a payload.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from lowbit.codecs import Codec, registry


def rooms() -> list[ModuleType]:
    """The examples of all formats."""
    return [importlib.import_module(f"tests.codecs.{folder}.examples") for folder in registry.formats()]


def room_of(codec: Codec) -> ModuleType:
    """The examples of a codec's format."""
    return importlib.import_module(f"tests.codecs.{type(codec).__module__.split('.')[-2]}.examples")


def every(name: str) -> list[Any]:
    """What all formats have under a name."""
    return [example for room in rooms() for example in getattr(room, name, [])]
