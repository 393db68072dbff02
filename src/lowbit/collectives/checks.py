"""Checks of a call's arguments, made in the caller: an error on the calls' thread would end the group."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.codecs.base import Codec, Summable
from lowbit.codecs.checks import FLOATS, check_choice, check_int, check_timeout
from lowbit.collectives.algorithms import CHUNK, SMALL
from lowbit.collectives.calls import TIMEOUT
from lowbit.wire.checksum import check_checksums


def described(x: Tensor) -> str:
    """Format dtype and shape."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def check_summable(codec: object) -> Summable:
    """Return the codec if it can encode flat pieces of any tensor in any order; otherwise raise a TypeError."""
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {codec!r}; allowed: a codec such as lowbit.codecs.GroupInt(bits=8)")
    if not isinstance(codec, Summable) or codec.shaped:
        reason = "keeps state between messages" if codec.stateful else "is made for the tokens of activations"
        raise TypeError(
            f"codec is {codec}, which {reason}: it cannot be summed; allowed: a codec without state whose format "
            "does not depend on the tensor's shape, such as GroupInt or Cast"
        )
    return codec


def check_flat(codec: object) -> None:
    """Raise unless the codec can be summed and accepts flat pieces of any length, such as gradients."""
    grain = check_summable(codec).grain
    if grain > 1:
        raise ValueError(
            f"codec is {codec}, for rows of {grain} elements; allowed for gradients: formats for any length, "
            "such as GroupInt"
        )


def check_call(
    codec: object,
    *,
    op: object = "sum",
    algorithm: object = "two_shot",
    transport: object = "auto",
    small: object = SMALL,
    chunk: object = CHUNK,
    timeout: object = TIMEOUT,
    checksums: object = True,
) -> Summable:
    """Check the arguments of a collective, except its tensors; returns the codec."""
    summable = check_summable(codec)
    check_checksums(checksums)
    check_choice("op", op, ("sum", "avg"))
    check_choice("algorithm", algorithm, ("two_shot", "one_shot", "auto"))
    check_choice("transport", transport, ("auto", "messages", "collectives"))
    check_int("small", small, 0, 1 << 60)
    check_int("chunk", chunk, 16, 1 << 30, multiple=16)
    check_timeout(timeout)
    return summable


def check_tensor(name: str, x: object, codec: Summable, ranks: int, *, written: bool) -> None:
    """Raise unless the codec, which may be made for a number of ranks and for whole rows, can encode `x`.

    written: whether the call writes to `x`, which the caller's inference mode may forbid.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {kind}; allowed: a tensor of {', '.join(map(str, FLOATS))}")
    if codec.ranks not in (None, ranks):
        raise ValueError(f"codec is {codec}; allowed in a group of {ranks}: one for {ranks} ranks")
    if x.numel() % codec.grain or (x.dim() > 1 and codec.grain > 1 and x.shape[-1] != codec.grain):
        raise ValueError(
            f"{name} is {described(x)}; allowed with {codec}: (..., {codec.grain}), or flat in multiples of it"
        )
    if written:
        _check_written(name, x)


def _check_written(name: str, x: Tensor) -> None:
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, which is off now; "
            "allowed: a tensor made outside it, or a call inside it"
        )


def check_errors(errors: Tensor | None, tensor: Tensor) -> None:
    """Raise unless the quantization errors of `tensor` can be written to `errors`."""
    if errors is None:
        return
    if errors.dtype != torch.float32 or errors.shape != tensor.shape or not errors.is_contiguous():
        raise ValueError(f"errors is {described(errors)}; allowed: contiguous float32 {tuple(tensor.shape)}")
    _check_written("errors", errors)


def check_pair(part_name: str, part: Tensor, whole_name: str, whole: Tensor, ranks: int) -> None:
    """Raise unless the sizes of these tensors are those of a rank's share and of the whole."""
    if part.numel() * ranks != whole.numel() or part.device != whole.device:
        raise ValueError(
            f"{part_name} has {part.numel()} elements on {part.device}, "
            f"{whole_name} {whole.numel()} on {whole.device}; "
            f"allowed: {ranks} times as many in {whole_name}, one share for each of the {ranks} ranks"
        )
