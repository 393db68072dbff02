"""Errors stay short, whatever is passed by mistake."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from tests.test_import import PUBLIC

LIBRARY = [
    name
    for name in PUBLIC
    if "lab" not in name and name not in ("lowbit", "lowbit_run.cli", "lowbit_run.config", "lowbit_run.train")
]
WRONG = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(99))), "long" * 200, {f"layer {i}": i for i in range(999)}]


def wrong_calls(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Arguments by name: the required ones, alone and together with each other one, all wrong in the same way."""
    parameters = [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    required = [p.name for p in parameters if p.default is p.empty]
    for wrong in WRONG:
        for name in (None, *(p.name for p in parameters if p.name not in required)):
            yield dict.fromkeys([*required, *([name] if name else [])], wrong)


@pytest.mark.parametrize("module", LIBRARY)
def test_a_wrong_argument_is_not_shown_as_a_whole(module: str) -> None:
    long: list[str] = []
    for name in PUBLIC[module].split():
        function = getattr(importlib.import_module(module), name)
        if not callable(function) or (isinstance(function, type) and issubclass(function, BaseException)):
            continue
        with contextlib.suppress(ValueError, TypeError):  # no signature
            for arguments in wrong_calls(function):
                try:
                    function(**arguments)
                except Exception as error:
                    if len(str(error)) > 1000:
                        long.append(f"{name}({', '.join(arguments)}): {error!s:.80}")
    assert not long
