"""One parameter's gradient as a payload, and as its `.grad`; shards of DTensors (FSDP2, tensor parallel); portions."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.codecs.base import Summable
from lowbit.codecs.checks import FLOATS


@dataclass(slots=True)
class Stored:
    """The gradient of a parameter, or of its local shard: the decoded `payload` times `factor`; none unless `held`."""

    name: str
    payload: Tensor | None = None
    factor: float = 1.0
    held: bool = False
    view: Tensor | None = None
    """The `StoredGradient` that shows it."""
    adding: set[int] = field(default_factory=set)
    """Threads whose backward passes are about to add to `.grad`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `adding` changes, and while a hook stores `.grad`."""

    def value(self, codec: Summable, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if not self.held or self.payload is None:
            return None
        if self.factor == 1:
            return codec.decode(self.payload, shape=shape, dtype=dtype)
        # A sum may overflow float16 while its mean does not.
        return codec.decode(self.payload, shape=shape).mul_(self.factor).to(dtype)

    def drop(self) -> None:
        """Drop the gradient; the payload's memory is kept for the next one."""
        self.held, self.factor, self.view = False, 1.0, None

    def write(self, codec: Summable, part: Tensor) -> None:
        if self.held and self.payload is not None:
            codec.decode(self.payload, shape=part.shape, out=part)
            if self.factor != 1:
                part.mul_(self.factor)

    def replace(self, codec: Summable, gradient: Tensor, device: torch.device) -> None:
        self.payload = codec.encode(gradient, out=self._room(device))
        self.factor, self.held = 1.0, True

    def add(self, codec: Summable, gradient: Tensor, device: torch.device) -> None:
        room = self._room(device)
        if not self.held or room is None:
            self.payload = codec.encode(gradient, out=room)
        elif self.factor == 1:
            codec.add(room, gradient)
        else:
            total = codec.decode(room, shape=gradient.shape).mul_(self.factor)
            codec.encode(total.add_(gradient), out=room)
        self.factor, self.held = 1.0, True

    def prepare(self, codec: Summable, shape: torch.Size, device: torch.device, factors: Sequence[float]) -> float:
        """Prepare the payload for a mean over ranks with these factors; return the mean's factor.

        That is the common one or, if they differ, 1, after this rank's payload was encoded anew.
        """
        if self._room(device) is None:
            self.payload = torch.zeros(codec.nbytes(shape), dtype=torch.uint8, device=device)
        if factors.count(factors[0]) == len(factors):
            return factors[0]
        value = self.value(codec, shape, torch.float32)
        if value is not None:
            self.replace(codec, value, device)
        return 1.0

    def _room(self, device: torch.device) -> Tensor | None:
        if self.payload is not None and self.payload.device != device:
            self.payload = self.payload.to(device)
        return self.payload


def named(parameters: nn.Module | Iterable[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with their names, or positions; each once. TypeError for a `DistributedDataParallel`."""
    if isinstance(parameters, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "parameters is a DistributedDataParallel, which keeps full-precision gradients of its own; "
            "allowed: the module inside, and average of the storage"
        )
    if isinstance(parameters, nn.Module):
        pairs = list(parameters.named_parameters())
    else:
        pairs = [(str(i), p) for i, p in enumerate(parameters)]
    return list({p: (name, p) for name, p in reversed(pairs)}.values())[::-1]


def portions(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Split parameters into successive ones on one device, with at most `limit` elements or a single parameter."""
    grouped: list[list[nn.Parameter]] = []
    filled = limit
    for parameter in parameters:
        if not grouped or grouped[-1][0].device != parameter.device or filled + local(parameter).numel() > limit:
            grouped.append([])
            filled = 0
        grouped[-1].append(parameter)
        filled += local(parameter).numel()
    return grouped


def parts(flat: Tensor, portion: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter's part of a flat tensor, in the shape of its local shard."""
    for parameter, part in zip(portion, flat.split([local(p).numel() for p in portion]), strict=True):
        yield parameter, part.view(local(parameter).shape)


def local(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without a copy; other tensors as they are."""
    return getattr(x, "_local_tensor", x)


def as_shard(x: Tensor, parameter: Tensor) -> Tensor:
    """Wrap a tensor of the local shard's shape as a DTensor like the parameter; unchanged for plain parameters."""
    if not hasattr(parameter, "_local_tensor"):
        return x
    from torch.distributed.tensor import DTensor

    # Not `from_local`, which makes a view: `x` must keep its tensor subclass.
    spec: Any = parameter._spec  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor(x, spec, requires_grad=False)  # pyright: ignore


def placed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Redistribute the gradient to the parameter's placements; partial sums over ranks are added up."""
    if not hasattr(parameter, "_local_tensor"):
        return gradient
    placements: Any = parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    if not hasattr(gradient, "_local_tensor"):
        from torch.distributed.tensor import DTensor, Replicate

        gradient = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if gradient.placements == placements:  # pyright: ignore[reportAttributeAccessIssue]
        return gradient
    with torch.no_grad():
        return gradient.redistribute(mesh, placements)  # pyright: ignore[reportAttributeAccessIssue]


def sums_of(parameter: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return a sharded parameter's mesh and the dimensions over which it is sharded; None and () for others."""
    if not hasattr(parameter, "_local_tensor"):
        return None, ()
    placements: Any = parameter.placements  # pyright: ignore[reportAttributeAccessIssue]
    mesh: Any = parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return mesh, tuple(d for d, placement in enumerate(placements) if not placement.is_replicate())


def total(parts: list[Tensor], mesh: Any, dimensions: tuple[int, ...]) -> float:
    """Sum these numbers, then over the ranks along these dimensions of the mesh."""
    number = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
    if dimensions:
        number = number.to(mesh.device_type)
        for dimension in dimensions:
            dist.all_reduce(number, group=mesh.get_group(dimension))
    return float(number)


_aten = torch.ops.aten
_BY_NUMBER = {_aten.mul_.Tensor: False, _aten.mul_.Scalar: False, _aten.div_.Tensor: True, _aten.div_.Scalar: True}
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
    def __new__(cls, like: Tensor, stored: Stored, codec: Summable, nearest: Summable) -> "StoredGradient":
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

    def _scale(self, factor: float, *, divide: bool) -> "StoredGradient":
        self._check_current()
        if divide:
            factor = 1 / factor if factor else math.inf
        self.stored.factor *= factor
        return self

    def _add(self, other: Any, alpha: Any) -> "StoredGradient":
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
    out = func(*tree_map(lambda x: values.get(id(x), x), args), **tree_map(lambda x: values.get(id(x), x), kwargs))
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
