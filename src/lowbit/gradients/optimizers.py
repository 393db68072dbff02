"""Take optimizer steps with stored gradients for a portion of the parameters at a time, whoever calls `step`."""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowbit.gradients.stored import decoded, local, portions


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for an optimizer whose step cannot be taken in portions."""
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}; "
            "allowed: those that treat each parameter apart, with dense gradients"
        )


storages: weakref.WeakSet[Any] = weakref.WeakSet()
"""The open `GradientStorage`s, whose `check_step` is called before each step of an optimizer."""
under_way: "dict[int, Portions]" = {}
"""Steps by the id of their optimizer. During a step, `.grad` is not what the backward pass left."""


@functools.cache
def watch_optimizers() -> None:
    """Take the steps of all optimizers with stored gradients in portions from now on."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Hook before an optimizer's step: step for all portions but the last, and prepare the last one."""
    # ZeRO-1 wraps another optimizer. Only the inner one is handled, with this rank's parameters: the outer step sends
    # parameters to other ranks, which must happen once, and identically on all ranks.
    if not storages or any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        return None
    if id(optimizer) in under_way:
        under_way[id(optimizer)].depth += 1
        return None
    every: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    if True not in [storage.check_step(every) for storage in list(storages)]:
        return None
    check_optimizer(optimizer)
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False):  # pyright: ignore
        raise RuntimeError(
            "optimizer.step runs inside torch.compile, which would take the first stored gradients in every step; "
            "allowed: compile forward and backward alone"
        )
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the optimizer is the first argument
    closure = None if closure is None else Closure(closure)
    step = under_way[id(optimizer)] = Portions(optimizer, every, closure)
    try:
        return step.all_but_last(args, kwargs)
    except BaseException:
        finish(step)
        raise


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (step := under_way.get(id(optimizer))) is not None:
        step.depth -= 1
        if step.depth == 0:
            finish(step)


def finish(*steps: "Portions") -> None:
    """Put the stored gradients back into `.grad` after a step, or without arguments after all failed ones."""
    for step in steps or list(under_way.values()):
        if under_way.pop(id(step.optimizer), None) is not None:
            for parameter, shown in step.shown.items():
                parameter.grad = shown


class Closure:
    """Wraps the closure of `optimizer.step(closure)`: called once, before the gradients that it makes are decoded."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        with torch.enable_grad():
            self._loss = closure()
        self.versions: dict[nn.Parameter, int] = {}  # of the parameters before the step

    def __call__(self) -> Any:
        """Return its result; RuntimeError if the optimizer changed parameters before, and so needs new gradients."""
        if any(p._version != version for p, version in self.versions.items()):
            raise RuntimeError(
                "this optimizer changes parameters before it calls the closure: its step cannot be taken in portions; "
                "allowed: optimizers that call it first, once"
            )
        return self._loss


class Portions:
    """One step of an optimizer, in which a portion of its `parameters` at a time gets its gradients."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], closure: Closure | None
    ) -> None:
        self.optimizer, self._closure = optimizer, closure
        self.shown = {p: p.grad for p in parameters if p.grad is not None}
        groups = optimizer.param_groups
        self._settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        largest = max((local(p).numel() for p in self.shown), default=0)
        self._portions = portions(list(self.shown), largest) or [[]]
        self.depth = math.inf  # of the optimizer's `step`, from the last portion on: earlier ones end nothing

    def all_but_last(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Step with all portions but the last, prepare the step with the last one, and return arguments for it."""
        if self._closure is not None:
            args, kwargs = (args[0], self._closure, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}
        for parameter in self.shown:
            parameter.grad = None
        for portion in self._portions[:-1]:
            self._prepare(portion)
            self.optimizer.step(*args[1:], **kwargs)
            for parameter in portion:
                parameter.grad = None
        self._prepare(self._portions[-1])
        self.depth = 1
        return args, kwargs

    def _prepare(self, portion: list[nn.Parameter]) -> None:
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=True):
            for added in group.keys() - settings.keys() - {"params"}:
                del group[added]
            group.update(settings)
        if self._closure is not None:
            self._closure.versions = {p: p._version for p in portion}
        with torch.no_grad():
            for parameter in portion:
                parameter.grad = decoded(self.shown[parameter], parameter)
