"""Gather the trained model from all ranks, and save it in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.train.model import StageModule
from lowbit.train.tokenizer import Tokenizer
from lowbit.wire.messages import Messages

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PIECE_BYTES = 8 << 20
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_OVER = object()


def gather_weights(modules: dict[int, StageModule], messages: Messages | None = None) -> dict[str, Tensor]:
    """Gather all trained parameters on the CPU of a pipeline's first rank, by their names in the whole model.

    The last stage's copy of a tied embedding, equal to the first's, is left out. The other ranks get nothing. Each rank
    in turn sends a piece of 8 MiB, so that no wait is longer than one piece of every rank takes, and only rank 0 needs
    memory for more than its own weights.

    Args:
        modules: of this rank. messages: between the ranks of the pipeline; None: this rank is the only one.

    Raises:
        DamagedError: a piece did not arrive as it was sent.
        PeerError: a rank ended or does not answer.
        ValueError: a rank describes weights that it cannot have.
    """
    named = [(p, n) for m in modules.values() for p, n in m.names.items() if n not in m.aliases]
    weights = {name: parameter.detach().cpu() for parameter, name in named if parameter.requires_grad}
    if messages is None:
        return weights
    if messages.rank != 0:
        described = [(n, list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
        messages.send_json(described, 0)
        for tensor in weights.values():
            for piece in tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES):
                messages.send(piece, 0).wait()
        return {}
    arriving = [_receive_all(weights, messages, rank) for rank in range(1, messages.ranks)]
    while arriving:
        arriving = [pieces for pieces in arriving if next(pieces, _OVER) is not _OVER]
    return weights


def _receive_all(weights: dict[str, Tensor], messages: Messages, rank: int) -> Iterator[None]:
    """Receive a rank's weights into `weights`; yield after each piece."""
    for name, shape, dtype in messages.receive_json(rank, "names of weights"):
        if dtype not in _DTYPES or name in weights:
            raise ValueError(f"rank {rank} of the pipeline has {name} in {dtype}; allowed: new names in {_DTYPES}")
        weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        for piece in weights[name].view(-1).view(torch.uint8).split(_PIECE_BYTES):
            piece.copy_(messages.receive(piece.numel(), rank, name))
            yield


def save_model(folder: Path, weights: dict[str, Tensor], config: PretrainedConfig, tokenizer: Tokenizer) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads both."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    logging.disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.hugging_face().save_pretrained(folder)
