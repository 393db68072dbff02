"""`StoredGradient`: the `.grad` of a parameter whose gradient is stored in few bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.codecs.base import Summable
from lowbit.codecs.checks import FLOATS
from lowbit.gradients.stored import Stored, as_shard, local

_aten = torch.ops.aten
_BY_NUMBER = {
    _aten.mul_.Tensor: False, _aten.mul_.Scalar: False, _aten.div_.Tensor: True, _aten.div_.Scalar: True,
}  # fmt: skip
_ALIAS = (_aten.detach.default, _aten.alias.default)


class StoredGradient(Tensor):
    """A stored gradient, as the `.grad` of its parameter.

    Operators read the decoded gradient, a new tensor each time, so `clip_grad_norm_`, `GradScaler.unscale_` and
    optimizers work as with any gradient. In-place operators change the stored gradient: additions are made in the
    payload, multiplications by a number change only a factor, and results of all others are encoded again, rounded to
    nearest. Views are copies.
    """

    stored: Stored
    codec: Summable
    nearest: Summable

    @staticmethod
    def __new__(cls, like: Tensor, stored: Stored, codec: Summable, nearest: Summable) -> StoredGradient:
        view = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        view.stored, view.codec, view.nearest = stored, codec, nearest
        return view

    def decode(self, dtype: torch.dtype | None = None) -> Tensor:
        """Decode the gradient into a new tensor of `dtype` (None: the parameter's)."""
        self._check_current()
        value = self.stored.value(self.codec, self.shape, dtype or self.dtype)
        assert value is not None
        return value

    def _check_current(self) -> None:
        if self.stored.view is not self or not self.stored.held:
            raise RuntimeError(
                f"this gradient of {self.stored.name!r} is gone: the storage holds a later one or none; allowed: "
                "parameter.grad anew, or a copy made in time (parameter.grad.clone())"
            )

    def __repr__(self, **_: Any) -> str:
        return f"StoredGradient({self.decode()!r})"

    def share_memory_(self) -> Tensor:
        """Always raises: a compressed gradient has no memory to share."""
        raise TypeError(f"the gradient of {self.stored.name!r} is stored in few bits; allowed: a copy (grad.clone())")

    def __setitem__(self, key: Any, value: Any) -> None:
        changed = self.decode()
        changed[key] = _read(value)
        self.stored.replace(self.nearest, changed, self.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALIAS:
            return args[0]
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale_(func, *args, **kwargs)
        if isinstance(args[0], cls):
            view: StoredGradient = args[0]
            if func is _aten.add_.Tensor:
                return view._add(args[1], kwargs.get("alpha", 1))
            if func in _BY_NUMBER and _is_number(args[1]):
                return view._scale(_number(args[1]), divide=_BY_NUMBER[func])
        if func.namespace == "c10d":
            raise TypeError(
                f"{func} would change a gradient that is stored in few bits; allowed: GradientStorage.average"
            )
        return _on_decoded(func, args, kwargs)

    def _scale(self, factor: float, *, divide: bool) -> StoredGradient:
        self._check_current()
        if divide:
            factor = 1 / factor if factor else math.inf
        self.stored.factor *= factor
        return self

    def _add(self, other: Any, alpha: Any) -> StoredGradient:
        self._check_current()
        if not isinstance(other, Tensor):
            other = torch.tensor(other, device=self.device)
        other = _read(other)
        if other.layout != torch.strided:
            other = other.to_dense()
        if alpha != 1 or other.dtype not in FLOATS:
            other = other.float() * alpha
        self.stored.add(self.codec, other.expand(self.shape), self.device)
        return self


def _of_decoded(name: str) -> Any:
    return lambda view, *args, **kwargs: getattr(view.decode(), name)(*args, **kwargs)


for _name in ("numpy", "tolist", "__reduce_ex__", "__deepcopy__", "__dlpack__"):
    setattr(StoredGradient, _name, _of_decoded(_name))


def is_stored(gradient: Tensor | None) -> bool:
    """Whether a `.grad` shows a stored gradient, or a shard's stored gradient."""
    return gradient is not None and isinstance(local(gradient), StoredGradient)


def decoded(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a `.grad` as a plain tensor, or as a DTensor of one."""
    view = local(gradient)
    return as_shard(view.decode(), parameter) if isinstance(view, StoredGradient) else gradient


def _read(x: Any) -> Any:
    return x.decode() if isinstance(x, StoredGradient) else x


def _is_number(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.dim() == 0 and not isinstance(x, StoredGradient))


_last: list[Any] = [None, 0, 0.0]  # a scalar, its version, its value: `clip_grad_norm_` multiplies all gradients by one


def _number(x: Any) -> float:
    if not isinstance(x, Tensor) or x.device.type == "cpu":
        return float(x)
    if _last[0] is not x or _last[1] != x._version:
        _last[:] = x, x._version, float(x)
    return _last[2]


def _unscale_(func: Any, gradients: list[Tensor], overflow: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by `inverse`; set `overflow` to 1 if one of them has a NaN or infinity."""
    one = torch.ones_like(inverse)
    for gradient in gradients:
        if isinstance(gradient, StoredGradient):
            func([gradient.decode(torch.float32)], overflow, one)
            gradient._scale(_number(inverse), divide=False)
        else:
            func([gradient], overflow, inverse)


def _on_decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on decoded gradients; encode those that it changes again."""
    views = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, StoredGradient)}
    values = {key: view.decode() for key, view in views.items()}
    out = func(
        *tree_map(lambda x: values.get(id(x), x), args), **tree_map(lambda x: values.get(id(x), x), kwargs)
    )  # fmt: skip
    named = zip(func._schema.arguments, args, strict=False)
    given = {argument.name: (argument, value) for argument, value in named}
    given |= {a.name: (a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs}
    for argument, value in given.values():
        if argument.alias_info is not None and argument.alias_info.is_write:
            for view in tree_leaves(value):
                if isinstance(view, StoredGradient):
                    view.stored.replace(view.nearest, values[id(view)], view.device)
    changed = {id(value): views[key] for key, value in values.items()}
    return tree_map(lambda x: changed.get(id(x), x), out)
