"""A trained model with its adapters merged in, layer by layer: no rank holds more of it than one layer."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from lowbit.train.config import TrainConfig
from lowbit.train.cut import Elsewhere, Share, class_for
from lowbit.train.export import dtype_named, export_dtype
from lowbit.train.layout import PipelineLayout
from lowbit.train.model import StageModule, hugging_face_config
from lowbit.train.pretrained import check_files
from lowbit.train.weights import share_loader


class Merged:
    """What a rank's stages are without adapters, one module for each layer, for `Export`.

    Their weights are read from the folder again, in full precision: stages may have them in few bits. Where the
    folder itself has few bits, they are those of the stages, decoded.

    Args:
        modules: the rank's stages with adapters, by their numbers. tied: whether embedding and output matrix are one.

    Attributes:
        dtype: of the merged weights: `run.save_dtype`, or the folder's; bfloat16 if that has few bits.
        config: of the merged model, Transformers'.
    """

    def __init__(
        self, config: TrainConfig, layout: PipelineLayout, modules: Mapping[int, StageModule], *, tied: bool
    ) -> None:
        self._layout, self._stages, self._folder = layout, modules, config.model.pretrained
        self.config: Any = hugging_face_config(config.model, vocab=0, sequence=0)
        self.config.tie_word_embeddings = tied
        self._few_bits = bool(getattr(self.config, "quantization_config", None))
        decoded = self._few_bits and config.run.save_dtype is None
        self.dtype = torch.bfloat16 if decoded else export_dtype(config) or torch.float32
        if self._few_bits:
            del self.config.quantization_config
        self._parts = {
            path: part for module in modules.values() for path, part in module.model.named_modules()
            if not isinstance(part, Elsewhere)
        }  # fmt: skip

    def __iter__(self) -> Iterator[StageModule]:
        read = self._decoded
        if not self._few_bits:
            stored = {dtype_named(dtype) for _, dtype in check_files(self._folder, "model.pretrained").values()}
            read = share_loader(
                self._folder, self.config, dtype=reduce(torch.promote_types, stored), quantized=None,
                device=torch.device("cpu"),
            )  # fmt: skip
        for stage, module in self._stages.items():
            if module.first or module.last:
                model = read(Share(layers=frozenset(), first=module.first, last=module.last))
                yield StageModule(model, layers=range(0), first=module.first, last=module.last)
            for layer in self._layout.layers_of(stage):
                model = read(Share(layers=frozenset([layer]), first=False, last=False))
                yield StageModule(model, layers=range(layer, layer + 1), first=False, last=False)

    def merge_(self, module: StageModule) -> None:
        """Add to a module's weights what the adapters add, in float32, and round the sum once."""
        for path, part in module.model.named_modules():
            own: Any = self._parts.get(path)
            if hasattr(own, "get_delta_weight"):
                added = own.get_delta_weight("default").detach().cpu().float()
                part.weight.data = (part.weight.detach().float() + added).to(self.dtype)

    def _decoded(self, share: Share) -> Any:
        from peft.utils.integrations import dequantize_module_weight

        with torch.device("meta"):
            model = class_for(self.config, share)(self.config)
        for path, part in model.named_modules():
            own: Any = self._parts.get(path)
            own = getattr(own, "base_layer", own)
            if own is None:  # the embedding that a tied output matrix is, elsewhere
                continue
            for name, _ in list(part.named_parameters(recurse=False)):
                value = dequantize_module_weight(own) if name == "weight" else getattr(own, name)
                setattr(part, name, nn.Parameter(value.detach().cpu(), requires_grad=False))
            for name, _ in list(part.named_buffers(recurse=False)):
                setattr(part, name, getattr(own, name).detach().cpu())
        if self.config.tie_word_embeddings and share.last:
            model.tie_weights()
        return model
