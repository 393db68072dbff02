"""Recipes by which backward rebuilds a tensor from others that were saved instead of it.

A `Form` defines the computation; the tensors it needs (payloads, and weights, which exist anyway) are saved through
autograd. While a tensor lives, a table holds its `Recipe`, so that the next layer that would save it saves the same
tensors instead: three projections of a norm's output all save the payload of the norm's input. Views, casts and dropout
of a tensor have recipes derived from its own.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from lowbit.activations.gated import reference as gated
from lowbit.activations.norm import reference as norm_operators
from lowbit.activations.policy import WHOLE, WithRows
from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.checks import FLOATS
from lowbit.kernels.layout import pack_flags, unpack_flags

SavedTensors = tuple[Tensor | None, ...]
_CHECKPOINTS = ("torch.utils.checkpoint", "lowbit.activations.checkpoint")
FEWEST = 12
"""Smaller tensors may take fewer bytes uncompressed than as `GroupInt`, and kernels read only the latter."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """out = normal(x) * (weight + offset) + bias over the last dimension, rows centred for LayerNorm.

    `promotes`: the output has the dtype of the weight if that is wider.
    """

    eps: float | None
    centred: bool = False
    offset: float = 0.0
    promotes: bool = False

    def eps_of(self, x: Tensor) -> float:
        """`eps`, or the default of `nn.RMSNorm` for this input."""
        return default_eps(x.dtype, x.device.type) if self.eps is None else self.eps

    def in_float32(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm by PyTorch's own functions, in float32."""
        eps, shape = self.eps_of(x), x.shape[-1:]
        scale = None if weight is None else weight.float() + self.offset
        if self.centred:
            shift = None if bias is None else bias.float()
            return functional.layer_norm(x.float(), shape, scale, shift, eps)
        out = functional.rms_norm(x.float(), shape, scale, eps)
        return out if bias is None else out + bias.float()


@functools.cache
def default_eps(dtype: torch.dtype, device: str) -> float:
    """The default epsilon of `rms_norm`: that of the dtype it computes in, which depends on PyTorch's version."""
    tiny = torch.full((8,), 1e-3, dtype=dtype, device=device)
    narrow = torch.finfo(dtype).eps
    with torch.no_grad(), torch.autocast(device, enabled=False):
        is_wide = bool(functional.rms_norm(tiny, (8,))[0] > 0.5)  # 0.94 with float32's, less than 0.04 with others
    return torch.finfo(torch.float32).eps if is_wide else narrow


Formula = str | Callable[[Tensor], Tensor]
"""An activation function: its name in `gated.TABLE`, or any other elementwise function, which is called."""


def plain_gated(gate: Tensor, up: Tensor | None, activation: Formula, *, wide: bool = True) -> Tensor:
    """act(gate) * up by PyTorch's own functions, in float32; if not `wide`, in their own dtypes."""
    x = gate.float() if wide else gate
    y = (gated.TABLE[activation].value if isinstance(activation, str) else activation)(x)
    if up is None:
        return y
    return y * (up.float() if wide else up)


@dataclass(frozen=True)
class Itself:
    """Rebuilds a tensor from its payload; without a codec the tensor itself is saved."""

    shape: torch.Size
    codec: Codec | None

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        x = saved[0]
        assert x is not None
        return decoded(self.codec, x, self.shape, dtype).to(dtype)


@dataclass(frozen=True)
class NormOutput:
    """Rebuilds a norm's output from its saved input, weight and bias."""

    shape: torch.Size
    codec: Codec | None
    norm: Norm
    eps: float

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        x, weight, bias = saved
        check_present(weight, bias)
        assert x is not None
        codec, payload = self.in_kernels(x)
        if codec is None:
            return self.norm.in_float32(decoded(self.codec, x, self.shape), weight, bias).to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=x.device)
        rows = out.view(-1, self.shape[-1])
        norm_operators.recompute(
            payload, weight, bias, rows, self.eps, self.norm.centred, self.norm.offset, codec.bits, codec.group
        )
        if isinstance(self.codec, WithRows):
            index, kept = self.codec.kept(x, self.shape)
            rows[index] = self.norm.in_float32(kept, weight, bias).to(dtype)
        return out

    def in_kernels(self, payload: Tensor) -> tuple[GroupInt | None, Tensor]:
        """The format that the norm's kernels read, and its payload; None if PyTorch's own functions compute the norm.

        Tokens that are kept exactly are zeros in this payload, for which the norm needs an epsilon.
        """
        codec = self.codec
        if isinstance(codec, WithRows) and self.eps > 0:
            codec, payload = codec.inner, codec.inner_of(payload, self.shape)
        return (codec if is_fused(codec) else None), payload


@dataclass(frozen=True)
class GatedOutput:
    """Rebuilds act(gate) * up from saved gate and, if there is one, up."""

    shape: torch.Size
    codec: Codec | None
    activation: Formula

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        gate, up = saved
        assert gate is not None
        kernels = self.in_kernels()
        if kernels is None:
            gate = decoded(self.codec, gate, self.shape)
            up = None if up is None else decoded(self.codec, up, self.shape)
            return plain_gated(gate, up, self.activation).to(dtype)
        name, codec = kernels
        out = torch.empty(self.shape, dtype=dtype, device=gate.device)
        gated.recompute(gate, up, out, name, codec.bits, codec.group)
        return out

    def in_kernels(self) -> tuple[str, GroupInt] | None:
        """The name and the format that kernels know; None if PyTorch's own functions compute the gate."""
        return (self.activation, self.codec) if isinstance(self.activation, str) and is_fused(self.codec) else None


class Form(Protocol):
    """A frozen description of how a tensor is rebuilt."""

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Return the tensor in this dtype, with the same elements in the same order; its shape may differ."""
        ...


class Rebuilt:
    """A tensor that backward recomputes for all layers that read it.

    If several layers need the tensor in backward, they share the first one's copy. At most one such copy exists in a
    thread, and none after the last layer has read it or the pass has ended.
    """

    def __init__(self, form: Form) -> None:
        self.form, self.users = form, 0
        self._copy: Tensor | None = None
        self._turns = 0

    def add_user(self) -> None:
        """Count one more layer that will read the tensor in backward."""
        self.users += 1
        if self.users == 1:
            for part in self.form.parts if isinstance(self.form, Computed) else ():
                part.rebuilt.add_user()

    def get(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Return the tensor, rebuilt from what a layer saved; for use in backward."""
        if self.users < 2:
            return self.form.rebuild(saved, dtype)
        if self._copy is None or self._copy.dtype != dtype:
            copy = self.form.rebuild(saved, dtype)
            previous = getattr(_latest, "rebuilt", lambda: None)()
            if previous is not None:
                previous._copy = None
            self._copy = copy
            _latest.rebuilt = weakref.ref(self)
            # A pass for only some gradients may skip readers, so drop the copy at the end of the pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # pyright: ignore
        copy = self._copy
        self._turns += 1
        if self._turns % self.users == 0:
            self._copy = None
        return copy

    def _end(self) -> None:
        self._copy, self._turns = None, 0


@dataclass(frozen=True)
class Operand:
    """An input of a `Computed` tensor: how it is rebuilt, its shape, and the number of its saved tensors.

    `dtype`: that of the forward pass; None: the dtype that is asked for.
    """

    rebuilt: Rebuilt
    shape: torch.Size
    count: int
    dtype: torch.dtype | None = None

    def get(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        """Return the tensor, in backward."""
        form = self.rebuilt.form
        if self.dtype is not None and isinstance(form, Itself):  # a shared copy would displace another's
            return form.rebuild(saved, self.dtype).reshape(self.shape)
        return self.rebuilt.get(saved, self.dtype or dtype).reshape(self.shape)


@dataclass(frozen=True)
class Computed:
    """Rebuilds a function of several tensors and of the saved tensors that follow theirs."""

    parts: tuple[Operand, ...]
    function: Callable[..., Tensor]

    def rebuild(self, saved: SavedTensors, dtype: torch.dtype) -> Tensor:
        values = []
        rest = saved
        for part in self.parts:
            values.append(part.get(rest[: part.count], dtype))
            rest = rest[part.count :]
        with torch.autocast(values[0].device.type, enabled=False):
            return self.function(*values, *rest).to(dtype)


class Recipe:
    """A form with the tensors that it needs. It lives as long as the tensor that it rebuilds.

    Args:
        form: how to rebuild it. saved: the tensors.
        weak: only the graph keeps these alive. Used for tensors that outlive their graph, or that checkpointing saves
            in full: these should not hold a payload in addition.
        parent: recipe whose tensors come first.
    """

    def __init__(
        self, form: Form, saved: SavedTensors, *, weak: bool = False, parent: "Recipe | None" = None
    ) -> None:  # fmt: skip
        self.form, self.rebuilt, self._parent, self._weak = form, Rebuilt(form), parent, weak
        self._references = [weakref.ref(t) if weak and t is not None else lambda t=t: t for t in saved]
        self._count = sum(t is not None for t in saved)
        self._versions = [_version(t) for t in saved]
        hook = checkpoint_hook()
        self._checkpoint = None if hook is None else weakref.ref(hook)

    def saved(self) -> SavedTensors | None:
        """The tensors; None after they are freed."""
        first = () if self._parent is None else self._parent.saved()
        tensors = tuple(get() for get in self._references)
        if first is None or sum(t is not None for t in tensors) != self._count:
            return None
        return (*first, *tensors)

    def release(self) -> None:
        self._references, self._count, self._parent = [], -1, None

    def holds(self) -> bool:
        """Whether layers may use it now.

        A checkpoint drops what is saved in forward, but not in its second run: if recipes depended on live tensors, the
        two runs would save different ones. For the same reason no recipe is used across a checkpoint's boundary.
        """
        if self._parent is not None and not self._parent.holds():
            return False
        # Tensors that have changed since, such as a reused mask, would rebuild another tensor.
        if any(_version(get()) != before for get, before in zip(self._references, self._versions, strict=False)):
            return False
        hook = checkpoint_hook()
        if hook is not (None if self._checkpoint is None else self._checkpoint() or self):
            return False
        return not (self._weak and hook is not None) and self.saved() is not None

    def derived(
        self, shape: torch.Size, function: Callable[..., Tensor], *tensors: Tensor, dtype: torch.dtype | None = None
    ) -> "Recipe":
        """The recipe of a function of this tensor, in this shape and dtype, and of tensors without a gradient."""
        part = Operand(self.rebuilt, shape, len(self.saved() or ()), dtype)
        return Recipe(Computed((part,), function), tensors, parent=self)


def _version(x: Tensor | None) -> int:
    return 0 if x is None or x.is_inference() else x._version


_recipes = WeakTensorKeyDictionary()  # of living tensors: their versions and recipes
_latest = threading.local()


def attach(x: Tensor, recipe: Recipe) -> None:
    """Record the recipe of `x`, for layers that would save `x`."""
    _recipes[x] = (x._version, recipe)


def attach_until_backward(out: Tensor, recipe: Recipe) -> None:
    """Attach a recipe whose tensors are released in the backward of the node that made `out`, which it may outlive."""
    attach(out, recipe)
    node: Any = out.grad_fn
    if node is not None:
        node.recipe = weakref.ref(recipe)


def recipe_of(x: Tensor) -> Recipe | None:
    """The recipe of `x`, if it has one. A view of the same elements counts as the tensor."""
    version, recipe = _recipes.get(x) or _recipes.get(base_of(x)) or (None, None)
    # A tensor that was changed in place, or whose graph is freed, must be saved again.
    return recipe if recipe and version == x._version and recipe.holds() else None


def checkpoint_hook() -> Any:
    """The hook of the checkpoint that runs, in forward or again in backward; None outside."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore
    pack = hooks[0] if hooks else None
    return pack if getattr(pack, "__module__", "") in _CHECKPOINTS else None


def base_of(x: Tensor) -> Tensor:
    """The base of the view `x`, if both have the same elements in the same order; otherwise `x`."""
    base = x._base if x._is_view() else None
    if base is None or base.numel() != x.numel():
        return x
    # Otherwise the same elements may be in another order.
    return base if base.is_contiguous() and x.is_contiguous() else x


def itself(x: Tensor, codec: Codec | None) -> tuple[SavedTensors, Codec | None] | None:
    """The payload of `x` that is saved already, and its format: `codec`, or one with more bits."""
    recipe = recipe_of(x)
    if recipe is None or not isinstance(recipe.form, Itself):
        return None
    own, saved = recipe.form.codec, recipe.saved()
    if own != codec and (own is None or codec is None or bits_of(own) < bits_of(codec)):
        return None
    return None if saved is None else (saved, own)


def packed_bits(x: Tensor) -> Tensor:
    """One bit for each element, set if the element is not 0."""
    return pack_flags((x != 0).reshape(1, -1))[0]


@dataclass(frozen=True)
class Masked:
    """Applies a mask from `packed_bits` to a tensor: `scale` times the elements in the mask, and zeros elsewhere."""

    scale: float = 1.0

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * (unpack_flags(mask[None], x.numel()).view(x.shape).to(x.dtype) * self.scale)


def takes(*tensors: Tensor | None) -> bool:
    """Whether all of these can be coded: non-empty plain tensors of a supported dtype."""
    return all(t is None or (t.dtype in FLOATS and t.numel() > 0 and not hasattr(t, "to_local")) for t in tensors)


def bits_of(codec: Codec | None) -> int:
    """Whole bits per element in a format, without scales."""
    if codec is None:
        return WHOLE
    if isinstance(codec, WithRows):
        return bits_of(codec.inner)
    return codec.bits if isinstance(codec, GroupInt) else int(codec.bits_per_element((1 << 16,)))


def is_fused(codec: Codec | None) -> TypeGuard[GroupInt]:
    """Whether operators of norms and gates read and write this format; on GPUs each is one kernel."""
    return isinstance(codec, GroupInt) and not codec.symmetric


def decoded(codec: Codec | None, saved: Tensor, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a payload; without a codec, return the saved tensor."""
    return saved if codec is None else codec.decode(saved, shape=shape, dtype=dtype)


def room(codec: Codec | None, x: Tensor) -> Tensor:
    """An empty payload for `x`; without a codec, `x` itself."""
    if codec is None:
        return x
    return torch.empty(codec.nbytes(x.shape), dtype=torch.uint8, device=x.device)


def check_present(*weights: Tensor | None) -> None:
    """Raise RuntimeError if FSDP has freed a weight that backward needs."""
    for weight in weights:
        if weight is not None and weight.numel() and not weight.untyped_storage().nbytes():
            raise RuntimeError(
                "backward of a linear layer needs the weight of the norm before it, which FSDP has sharded again; "
                "allowed: one fully_shard for both, such as for the whole decoder layer"
            )
