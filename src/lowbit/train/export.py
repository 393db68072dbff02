"""The trained model, gathered from all ranks and written as Hugging Face reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.train.model import StageModule
from lowbit.train.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODEL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(generation_)?config\.json|tokenizer.*|vocab\..*|merges\.txt"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template.*|spiece\.model|sentencepiece.*"
)
"""Names of the files that a saved model may have, with any of the tokenizers there are."""


def gather_weights(
    modules: dict[int, StageModule], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """All parameters of all stages on the CPU of a pipeline's first rank, by their names in the whole model.

    Empty on the other ranks of `group`, the pipeline's.

    A tensor at a time, so that no rank but 0 needs memory for more than it has.
    """
    mine = {n: p.detach().cpu() for m in modules.values() for p, n in m.names.items()}
    if dist.get_rank(group) != 0:
        told = [[(n, t.shape, t.dtype) for n, t in mine.items()]]
        dist.send_object_list(told, group=group, group_dst=0)
        for tensor in mine.values():
            dist.send(tensor.contiguous(), group=group, group_dst=0)
        return {}
    for rank in range(1, dist.get_world_size(group)):
        told: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]]
        dist.recv_object_list(told, group=group, group_src=rank)
        for name, shape, dtype in told[0]:
            mine[name] = torch.empty(shape, dtype=dtype)
            dist.recv(mine[name], group=group, group_src=rank)
    return mine


def save_model(
    folder: Path, weights: dict[str, Tensor], config: PretrainedConfig, tokenizer: Tokenizer
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads both."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if (
        config.tie_word_embeddings
    ):  # the last stage's copy; Hugging Face ties it again when it loads
        weights = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    logging.disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.hugging_face().save_pretrained(folder)
