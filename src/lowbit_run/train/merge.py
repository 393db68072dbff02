"""A pretrained model with saved adapters merged in, layer by layer: it is nowhere whole, and nothing is sent for it."""

import copy
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lowbit_run.train.config import TrainConfig
from lowbit_run.train.cut import Share, class_for, layer_count
from lowbit_run.train.export import dtype_named, export_dtype
from lowbit_run.train.model import StageModule, architecture, hugging_face_config
from lowbit_run.train.pretrained import check_files
from lowbit_run.train.weights import share_loader

_CPU = torch.device("cpu")


class Merged:
    """The modules of a run's pretrained model, one for each layer, for `Export`, whose `finish` is `merge_`.

    Weights are those of the folder, in full precision even if the run had them in few bits. If the folder itself has
    few bits, they are decoded.

    Args:
        adapters: file of the trained adapters, as PEFT names them.

    Attributes:
        dtype: of the merged weights: `run.save_dtype`, or the folder's; bfloat16 if that has few bits.
        config: of the merged model, Transformers'.
    """

    def __init__(self, config: TrainConfig, adapters: Path) -> None:
        folder, self._lora, self._adapters = config.model.pretrained, config.lora, adapters
        self._transposed = architecture(config.model, vocab=0)["family"] == "gpt2"
        exact: Any = hugging_face_config(config.model, vocab=0, sequence=0)
        self._few_bits = bool(getattr(exact, "quantization_config", None))
        stored = {dtype_named(name) for _, name in check_files(folder, "model.pretrained").values()}
        dtype = torch.bfloat16 if self._few_bits else reduce(torch.promote_types, stored)
        self._read = share_loader(folder, exact, dtype=dtype, quantized=None, device=_CPU)
        decoded = self._few_bits and config.run.save_dtype is None
        self.dtype = torch.bfloat16 if decoded else export_dtype(config) or torch.float32
        self.config: Any = copy.copy(exact)
        if self._few_bits:
            del self.config.quantization_config

    def __iter__(self) -> Iterator[StageModule]:
        parts = [range(0), *(range(layer, layer + 1) for layer in range(layer_count(self.config)))]
        for layers in parts:
            ends = not layers
            share = Share(layers=frozenset(layers), first=ends, last=ends)
            model = self._decoded(share) if self._few_bits else self._read(share)
            yield StageModule(model, layers=layers, first=ends, last=ends)

    def merge_(self, module: StageModule) -> None:
        """Add to a module's weights what the adapters add, in float32, and round the sum once."""
        with safe_open(self._adapters, "pt") as file:
            names = set(file.keys())
            for path, part in module.model.named_modules():
                first, second = (f"base_model.model.{path}.lora_{factor}.weight" for factor in "AB")
                if first in names:
                    added = file.get_tensor(second) @ file.get_tensor(first)
                    added = (added.T if self._transposed else added) * (self._lora.alpha / self._lora.rank)
                    part.weight.data = (part.weight.detach().float() + added).to(self.dtype)

    def _decoded(self, share: Share) -> Any:
        from peft.utils.integrations import dequantize_module_weight

        with torch.device("meta"):
            model = class_for(self.config, share)(self.config)
        stored = dict(self._read(share).named_modules())
        for path, part in model.named_modules():
            for name, _ in list(part.named_parameters(recurse=False)):
                source = stored[path]
                value = dequantize_module_weight(source) if name == "weight" else getattr(source, name)
                setattr(part, name, nn.Parameter(value.detach(), requires_grad=False))
            for name, _ in list(part.named_buffers(recurse=False)):
                setattr(part, name, getattr(stored[path], name))
        if self.config.tie_word_embeddings and share.last:
            model.tie_weights()
        return model
