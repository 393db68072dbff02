"""Arguments that a pipeline and its emulation share: formats, warm-up, sample ids; and the kinds of steps."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_int, check_timeout
from lowbit.codecs.defaults import backward_codec
from lowbit.escape import shown
from lowbit.pipeline.anchors import TokenAnchor

Codecs = Codec | Mapping[int, Codec]
"""One codec for all boundaries, or a mapping from boundary index (i: between stages i and i + 1)."""


@dataclass(frozen=True)
class StepKind:
    """Properties of a step that decide the format of its messages. They are known in advance, the same on all ranks.

    Attributes:
        training: False in an evaluation pass.
        full_precision: True during the warm-up, when everything travels in its own dtype.
        samples: sample ids of each micro-batch, for codecs that need them.
        tokens: token ids of each micro-batch, int64 (batch, sequence) on the CPU, if there is a token anchor.
        renewing: True if activations of the first micro-batch travel in their own dtype, to renew the token anchors.
    """

    training: bool = True
    full_precision: bool = False
    samples: Sequence[Sequence[int]] = ()
    tokens: Sequence[Tensor] = ()
    renewing: bool = False

    @property
    def phase(self) -> int:
        """Number of what decides the sizes of messages: 0 at full precision, 2 if renewing, 1 otherwise."""
        return 0 if self.full_precision else 1 + self.renewing


def default_backward(forward: Codecs) -> Codecs:
    """Return the default formats of gradients for formats of activations; invalid ones pass and are refused later."""
    if isinstance(forward, Mapping):
        return {i: backward_codec(codec) if isinstance(codec, Codec) else codec for i, codec in forward.items()}
    return backward_codec(forward) if isinstance(forward, Codec) else forward


def codec_at(argument: str, codecs: Codecs, boundary: int, boundaries: int) -> Codec:
    """Return the codec of a boundary, of `boundaries`; TypeError, ValueError: not a codec, or a wrong mapping."""
    if isinstance(codecs, Mapping):
        given = ", ".join(map(shown, codecs)) or "none"
        if boundary not in codecs:
            raise ValueError(f"{argument} has no codec for boundary {boundary}; given: {given}")
        if not set(codecs) <= set(range(boundaries)):
            raise ValueError(f"{argument} has codecs for boundaries {given}; there are 0 to {boundaries - 1}")
        codecs = codecs[boundary]
    if not isinstance(codecs, Codec):
        raise TypeError(
            f"{argument} is {shown(codecs)}; allowed: a codec such as lowbit.codecs.TAHQuant(), "
            "or a mapping from boundary index to codec"
        )
    return codecs


def check_numbers(warmup_steps: object, timeout: object) -> None:
    """Raise a TypeError or ValueError unless these are a valid number of steps and of seconds."""
    check_int("warmup_steps", warmup_steps, 0, sys.maxsize)
    check_timeout(timeout)


def check_anchor(anchor: object, warmup_steps: int) -> None:
    """Raise a TypeError or ValueError unless it is None or a token anchor that will see exact tensors."""
    if not isinstance(anchor, TokenAnchor | None):
        raise TypeError(f"anchor is {shown(anchor)}; allowed: None or a TokenAnchor")
    if anchor is not None and not warmup_steps and not anchor.renew:
        raise ValueError("anchor needs exact tensors; allowed: warmup_steps, or renew of the TokenAnchor, from 1")


def checked_samples(ids: Tensor | Sequence[int]) -> Tensor:
    """Return sample ids as an int64 tensor (batch,); TypeError, ValueError: as `LowBitStage.set_samples`."""
    try:
        samples = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's own, also for integers beyond 64 bits
        raise TypeError(f"ids are {shown(ids, 60)}; allowed: integers of 64 bits") from error
    if samples.is_floating_point() or samples.is_complex() or samples.dtype == torch.bool:
        raise TypeError(f"ids have dtype {samples.dtype}; allowed: integers")
    if samples.dim() != 1:
        raise ValueError(f"ids have shape {tuple(samples.shape)}; allowed: one dimension, (batch,)")
    # The size of a sample's second message depends on its first, which may be under way when the second is expected.
    if samples.unique().numel() != samples.numel():
        raise ValueError("ids contains a sample twice; the ids of a batch must differ")
    return samples.long()


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype in which a model computes, whatever that of its 4-bit weights and adapters.

    Transformers keeps some weights in float32, such as those of routers. A model with an attribute `compute_dtype`
    says so itself.
    """
    if (own := getattr(model, "compute_dtype", None)) is not None:
        return own
    own = {p.dtype for name, p in model.named_parameters() if p.is_floating_point() and ".lora_" not in name}
    return min(own, key=lambda dtype: dtype.itemsize)
