"""The formulas of `lowbit.kernels.cpu.formulas` as functions for kernels, with the types of their annotations."""

import functools
from typing import Any, get_type_hints

from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.jit import operation


def __getattr__(name: str) -> Any:
    return _operation(getattr(formulas, name))


@functools.cache
def _operation(formula: Any) -> Any:
    hints = get_type_hints(formula, include_extras=True).values()
    *operands, result = (hint.__metadata__[0] for hint in hints if hasattr(hint, "__metadata__"))
    return operation(result, *operands)(formula)
