"""AdamW for bfloat16 weights, which rounds them at random so that small steps are not lost."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 1 << 20  # elements that exist in float32 at a time; a multiple of the blocks of 8-bit states


class RoundingAdamW(torch.optim.Optimizer):
    """AdamW that computes in float32, a piece of a weight at a time, and rounds it up or down at random.

    Rounded to nearest, a bfloat16 weight ignores every step below 1/512 of its size, which is most of them. At random,
    each step is taken with the probability that makes the weight right on average. The random numbers follow from the
    parameter's name, its number of steps, and the position in it: all copies of a weight round alike, on any rank or
    device, and so does a run that resumes.

    Weights of other dtypes are not rounded, but updated likewise.

    Args:
        groups: as other optimizers have them, with names: `{"params": [(name, parameter), ...], ...}`.
        zeros: makes a state of zeros like a parameter, float32 or in 8 bits (None: float32), from whether it is signed.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        zeros: Callable[[Tensor, bool], Tensor] | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._zeros = zeros or (lambda p, signed: torch.zeros_like(p, dtype=torch.float32))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self._update(name, parameter, parameter.grad, group)
        return loss

    def _update(self, name: str, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = self._zeros(parameter, True), self._zeros(parameter, False)
        state["step"] += 1
        step = int(state["step"])
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        decay, rate = 1 - lr * group["weight_decay"], -lr / (1 - beta1**step)
        for start in range(0, parameter.numel(), _PIECE):
            w, g, m, v = (_piece(x, start) for x in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"]))
            g = g.float()
            mean, square = m.float().lerp(g, 1 - beta1), v.float().lerp(g.square(), 1 - beta2)
            m.copy_(mean)
            v.copy_(square)
            root = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
            new = (w.float() * decay).addcdiv_(mean, root, value=rate)
            if w.dtype == torch.bfloat16:
                round_(new, zlib.crc32(f"{name} {step} {start}".encode()))
            w.copy_(new)


def _piece(x: Tensor, start: int) -> Tensor:
    """Return a view of up to `_PIECE` elements of a contiguous tensor, or of an 8-bit state, from `start` on."""
    stop = start + _PIECE
    if not hasattr(x, "__tensor_flatten__"):
        return x.detach().view(-1)[start:stop]
    scale, block = x.scale, x.block_size  # pyright: ignore[reportAttributeAccessIssue]
    return type(x)(x.codes.view(-1)[start:stop], scale[start // block : stop // block], x.qmap, x.signed)  # pyright: ignore


def round_(x: Tensor, seed: int) -> None:
    """Round float32 numbers in place to those of bfloat16, up with the probability of the distance from below."""
    h = torch.arange(x.numel(), dtype=torch.int32, device=x.device)  # a hash of position and seed: see kernels.exact
    h.bitwise_xor_(seed - (seed >> 31 << 32))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        h.bitwise_xor_((h >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    h.bitwise_xor_(h >> 16)
    x.view(torch.int32).add_(h.bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
