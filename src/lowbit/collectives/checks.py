"""What tensors a collective takes: found out by the caller, for an error on the line's thread ends the group."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.codecs.base import FLOATS, Codec


def described(x: Tensor) -> str:
    """Dtype and shape."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def check_fit(name: str, x: Tensor, codec: Codec, ranks: int, node_size: int = 1) -> None:
    """Raise unless the codec, which may be made for so many ranks and for whole rows, can code `x`."""
    if codec.ranks not in (None, ranks):
        raise ValueError(f"codec is {codec}; allowed in a group of {ranks}: one for {ranks} ranks")
    if codec.ranks is not None and node_size > 1:
        raise ValueError(f"node_size is {node_size}; allowed with {codec}, made for ranks: 1")
    if x.numel() % codec.grain or (x.dim() > 1 and codec.grain > 1 and x.shape[-1] != codec.grain):
        raise ValueError(
            f"{name} is {described(x)}; allowed with {codec}: (..., {codec.grain}), or flat rows of as many"
        )
    if codec.device not in (None, x.device):
        raise ValueError(f"{name} is on {x.device}; allowed with a codec that counts there: {codec.device}")


def check_written(name: str, x: Tensor) -> None:
    """Raise unless the caller's mode may write to `x`: found out later, it would end the group."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, which is off; allowed: other tensors, or a call inside that mode"
        )


def check_errors(errors: Tensor | None, tensor: Tensor, node_size: int) -> None:
    """Raise unless what quantization takes from `tensor` can be written to `errors`."""
    if errors is None:
        return
    if node_size > 1:
        raise ValueError(f"errors is given and node_size is {node_size}; allowed: one of the two")
    if errors.dtype != torch.float32 or errors.shape != tensor.shape or not errors.is_contiguous():
        raise ValueError(f"errors is {described(errors)}; allowed: contiguous float32 {tuple(tensor.shape)}")
    check_written("errors", errors)


def check_pair(part_name: str, part: Tensor, whole_name: str, whole: Tensor, ranks: int) -> None:
    """Raise unless these are a rank's share and the whole of it."""
    for name, x in ((part_name, part), (whole_name, whole)):
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            raise TypeError(f"{name} is {x!r}; allowed: a tensor of {', '.join(map(str, FLOATS))}")
    if part.numel() * ranks != whole.numel() or part.device != whole.device:
        raise ValueError(
            f"{part_name} has {part.numel()} elements on {part.device}, "
            f"{whole_name} {whole.numel()} on {whole.device}; "
            f"allowed: {ranks} times as many in {whole_name}, one share for each of the {ranks} ranks"
        )
