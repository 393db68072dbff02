"""`GradientStorage`: gradients accumulate in a codec's payloads instead of in `.grad`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.codecs import BlockFloat8
from lowbit.codecs.base import Codec
from lowbit.codecs.sums import Summable
from lowbit.gradients.stored import Stored, check_parameter, named, parts, portions

BUCKET_BYTES = 16 << 20


class GradientStorage:
    """Keep gradients in 8 bits between micro-batches, as AGoQ's QuanGrad (arXiv 2605.00539) does.

    As soon as a backward pass has finished a parameter's gradient, it is added to the stored one (decoded, added in
    float32, coded again) and `parameter.grad` becomes None. So gradients exist at full precision for one layer at a
    time, and a whole model's take 1.008 bytes a parameter (BlockFloat8, blocks of 128). In a step:

        for micro_batch in batch:
            loss(micro_batch).backward()
        storage.all_reduce(...)                 # data parallel only
        norm = storage.clip_(1.0)
        storage.step(optimizer)                 # instead of optimizer.step()
        storage.zero_()                         # instead of optimizer.zero_grad()

    `step` decodes gradients in portions no larger than the largest parameter, and the update equals a whole step with
    these gradients, bit for bit. NaN and infinity in a gradient make its block NaN, which `norm` shows. Embeddings with
    `sparse=True` are stored dense. A parameter without a gradient stays without, so that optimizers skip it. Parameters
    that require no gradient now are left alone; those frozen later keep theirs until `zero_`.

    Not with `DistributedDataParallel` (its buckets are full-precision copies; use `all_reduce` on the plain module)
    nor with sharded parameters (DTensor).

    Args:
        parameters: a module, or parameters (each counts once, however often it is shared).
        codec: the format, without state; `BlockFloat8(rounding="stochastic")` where more than some 30 micro-batches are
            summed. Results of `put` and `all_reduce` are rounded to nearest in any case, so that all ranks hold the
            same.

    Raises:
        TypeError: a parameter of a dtype other than float32, bfloat16 and float16, or sharded; a codec with state; a
            module wrapped in `DistributedDataParallel`.
    """

    def __init__(self, parameters: nn.Module | Iterable[nn.Parameter], *, codec: Codec | None = None) -> None:
        codec = BlockFloat8() if codec is None else codec
        if not isinstance(codec, Summable):
            raise TypeError(f"codec is {codec!r}; allowed: a codec without state that sums, such as BlockFloat8()")
        self.codec = codec
        self._nearest = codec.nearest()
        pairs = named(parameters)
        self._stored = {p: Stored(name) for name, p in pairs if p.requires_grad}
        self._frozen = [(name, p) for name, p in pairs if not p.requires_grad]
        for parameter, stored in self._stored.items():
            check_parameter(stored.name, parameter)
        self._hooks = [p.register_post_accumulate_grad_hook(self._absorb) for p in self._stored]

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads that exist."""
        return sum(s.payload.nbytes for s in self._stored.values() if s.payload is not None)

    def absorb(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add `.grad` of parameters (None: all; those not stored here are left alone) to the storage, and free it.

        Backward passes do that by themselves, except those that write `.grad` without autograd, such as the weight
        passes of `torch.distributed.pipelining`'s zero-bubble schedules.

        Raises:
            RuntimeError: a parameter that was frozen when this storage was made requires a gradient now.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} requires a gradient, which it did not when this storage was made; "
                    "allowed: a new GradientStorage (close() this one first)"
                )
        for parameter in self._stored if parameters is None else parameters:
            if parameter in self._stored:
                self._absorb(parameter)

    def gradient(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return a parameter's gradient, decoded into a new tensor of `dtype` (None: the parameter's), or None."""
        stored = self._stored.get(parameter)
        return None if stored is None else stored.value(self.codec, parameter, dtype or parameter.dtype)

    def gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters (None: all) with their gradients in float32, one at a time; those without are left out."""
        for parameter in self._stored if parameters is None else parameters:
            gradient = self.gradient(parameter, torch.float32)
            if gradient is not None:
                yield parameter, gradient

    def put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Replace the stored gradient of a parameter by this one, rounded to nearest.

        Raises:
            ValueError: a parameter that is not stored here, or a gradient of another shape.
        """
        stored = self._stored.get(parameter)
        if stored is None or gradient.shape != parameter.shape:
            expected = "not stored here" if stored is None else f"of shape {tuple(parameter.shape)}"
            raise ValueError(f"gradient has shape {tuple(gradient.shape)}; its parameter is {expected}")
        stored.replace(self._nearest, gradient, parameter.device)

    def norm(self) -> float:
        """Return the Euclidean norm of all stored gradients together; NaN if any of them is."""
        norms = [torch.linalg.vector_norm(gradient).cpu() for _, gradient in self.gradients()]
        return math.sqrt(float(torch.stack(norms).double().square().sum())) if norms else 0.0

    def scale_(self, factor: float) -> None:
        """Multiply all gradients; those added later are not affected. Costs nothing until they are decoded."""
        for stored in self._stored.values():
            stored.factor = stored.factor * factor if stored.held else 1.0

    def clip_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

        Returns:
            The norm before. If it is NaN or infinite, nothing is scaled: check it before `step`.

        Raises:
            ValueError: a negative or NaN `max_norm`.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm}; allowed: at least 0")
        norm = self.norm()
        if math.isfinite(norm) and norm + 1e-6 > max_norm:
            self.scale_(max_norm / (norm + 1e-6))
        return norm

    def all_reduce(self, reduce: Callable[[Tensor], Any], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Replace the gradients by sums or means over ranks, a bucket of parameters at a time.

        Every rank makes the same calls, whatever its gradients are: one with a flag for each parameter, then one for
        each bucket. A parameter that has no gradient on one rank counts as zeros there; one that has none on any rank
        stays without.

        Args:
            reduce: called with a 1-D float32 tensor, which it replaces by the sum or mean over all ranks, at once or
                by the end of `wait()` of what it returns. Two buckets are under way at most.
            bucket_bytes: size of a bucket in float32; a larger parameter is a bucket of its own.

        Raises:
            ValueError: `bucket_bytes` below 4.
        """
        if bucket_bytes < 4:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; allowed: at least 4")
        self.absorb()
        parameters = list(self._stored)
        if not parameters:
            return
        flags = torch.tensor([float(self._stored[p].held) for p in parameters], device=parameters[0].device)
        _wait(reduce(flags))
        on_some_rank = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag > 0]
        under_way: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        for portion in portions(on_some_rank, bucket_bytes // 4):
            flat = portion[0].new_zeros(sum(p.numel() for p in portion), dtype=torch.float32)
            for parameter, part in parts(flat, portion):
                self._stored[parameter].write(self.codec, part)
            under_way.append((portion, flat, reduce(flat)))
            if len(under_way) > 1:
                self._take(*under_way.pop(0))
        for started in under_way:
            self._take(*started)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()` with the stored gradients, of which few exist at full precision at any time.

        Parameters take part in portions; the others have no gradient meanwhile, so the optimizer skips them. All see
        the same hyperparameters: changes of `param_groups` in a step count once. Gradients of parameters that are not
        stored here are used as well and stay as they are. Hooks on the optimizer's step run once for each portion.

        Args:
            optimizer: any that treats parameters apart from each other: all of `torch.optim` but LBFGS and SparseAdam,
                with or without `foreach` and `fused`; 8-bit ones of torchao and bitsandbytes.

        Raises:
            TypeError: LBFGS, whose step is one of all parameters together; SparseAdam, whose gradients are sparse.
            RuntimeError: as `absorb`.
        """
        if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}; "
                "allowed: those that treat each parameter apart, with dense gradients"
            )
        self.absorb()
        groups = optimizer.param_groups
        every: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        others = {p: p.grad for p in every if p not in self._stored and p.grad is not None}
        with_gradient = [p for p in every if p in others or (p in self._stored and self._stored[p].held)]
        before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        largest = max((p.numel() for p in with_gradient), default=0)
        try:
            for parameter in others:
                parameter.grad = None
            for portion in portions(with_gradient, largest) or [[]]:
                for group, values in zip(groups, before, strict=True):
                    for added in group.keys() - values.keys() - {"params"}:
                        del group[added]
                    group.update(values)
                for parameter in portion:
                    parameter.grad = others[parameter] if parameter in others else self.gradient(parameter)
                optimizer.step()
                for parameter in portion:
                    parameter.grad = None
        finally:
            for parameter in with_gradient:
                parameter.grad = others.get(parameter)

    def zero_(self) -> None:
        """Forget all gradients, those in `.grad` too; the payloads' memory is kept for the next ones."""
        for parameter, stored in self._stored.items():
            parameter.grad = None
            stored.held, stored.factor = False, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint between micro-batches: `codec`, and `payloads` and `factors` by name.

        Names are those of the module's parameters, or their positions. Payloads are not copied.
        """
        self.absorb()
        held = {s.name: s for s in self._stored.values() if s.held}
        return {
            "codec": repr(self._nearest),
            "payloads": {name: s.payload for name, s in held.items()},
            "factors": {name: s.factor for name, s in held.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all gradients by those of `state_dict`.

        Raises:
            ValueError: the state is of another codec, or of other parameters.
        """
        if state["codec"] != repr(self._nearest):
            raise ValueError(f"state is of {state['codec']}; this storage has {self._nearest!r}")
        names = {stored.name: parameter for parameter, stored in self._stored.items()}
        for name, payload in state["payloads"].items():
            if name not in names:
                raise ValueError(f"state has a gradient of {name!r}, which is not stored here")
            expected = self.codec.nbytes(names[name].shape)
            if payload.numel() != expected:
                raise ValueError(f"state has {payload.numel()} bytes of {name!r}, not {expected}")
        self.zero_()
        for name, payload in state["payloads"].items():
            parameter = names[name]
            stored = self._stored[parameter]
            stored.payload = payload.to(parameter.device, copy=True)
            stored.factor, stored.held = float(state["factors"][name]), True

    def close(self) -> None:
        """Let the next backward passes leave gradients in `.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _absorb(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        stored = self._stored[parameter]  # pyright: ignore[reportArgumentType]
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {stored.name!r} has a graph (create_graph=True): it cannot be stored in few bits; "
                "use torch.autograd.grad for gradients of gradients"
            )
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        stored.add(self.codec, gradient, parameter.device)
        parameter.grad = None

    def _take(self, portion: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        _wait(work)
        for parameter, part in parts(flat, portion):
            self.put(parameter, part)


def _wait(work: Any) -> None:
    if hasattr(work, "wait"):
        work.wait()
