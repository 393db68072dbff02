"""Predict the bytes that a run will send, by part, from its configuration; `Work.parts` and `Summary` count them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.codecs import Cast, Codec
from lowbit.collectives import all_reduce_bytes
from lowbit.gradients.average import average_bytes
from lowbit.train.data import Order
from lowbit.train.elastic import seed_of
from lowbit.train.evaluate import SUMS_BYTES, evaluated
from lowbit.train.gradients import Gradients, travels_as_stored
from lowbit.train.layout import PipelineLayout
from lowbit.train.lora import add_adapters
from lowbit.train.metrics import BOUNDARIES, GRADIENTS, TIED
from lowbit.train.model import StageModule, hugging_face_config
from lowbit.train.prepare import Prepared
from lowbit.train.tied import row_bytes
from lowbit.wire.checksum import sealed_bytes

_EXACT: Codec = Cast(dtype=torch.float32)


class ExpectedTraffic:
    """Predicted bytes of all ranks together, without coordination (a few hundred bytes per step and rank)."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._config, self._layout = prepared, prepared.config, prepared.layout
        self._modules = _stages(prepared)
        self._width = self._modules[0].width

    def step(self, *, warmup: bool = False) -> dict[str, float]:
        """Bytes of a step, in the warm-up or after it; if the run chooses its formats, the first ones count."""
        config, layout, pipelines = self._config, self._layout, self._config.pipeline.data_parallel
        data = self._prepared.data
        codecs, shape = self._prepared.codecs, (config.rows, config.data.sequence, self._width)
        if warmup or not all(codec.settled for codec in (*codecs.forward, *codecs.backward)):
            pairs: list[tuple[Codec, ...]] = [(_EXACT, _EXACT)] * (layout.stages - 1)
        else:
            pairs = list(zip(codecs.forward, codecs.backward, strict=True))
        sealed = config.run.checksums and config.pipeline.boundary == "lowbit"
        once = sum(
            sealed_bytes(codec.nbytes(shape), sealed)
            for boundary, pair in enumerate(pairs) if layout.crosses(boundary) for codec in pair
        )  # fmt: skip
        parts = {BOUNDARIES: float(pipelines * config.pipeline.microbatches * once)}
        if self._followed:
            first = 0 if warmup else config.codec_warmup_steps
            order = Order(samples=len(data.train), batch=config.data.batch, seed=seed_of(config))
            rows = _EXACT if warmup else self._prepared.tied_rows
            parts[TIED] = sum(
                2 * self._row_bytes(data.train.batch(ids)[0], rows) for ids in order.ids(first).chunk(pipelines)
            )
        parts[GRADIENTS] = float(
            sum(self._averaging(rank, place) for rank in range(layout.ranks) for place in range(pipelines))
        )
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    def evaluation(self, *, with_codecs: bool = True) -> float:
        """Bytes of an evaluation; 0 without held-out text."""
        config, held_out = self._config, self._prepared.data.held_out
        batch, most = config.data.batch, config.run.eval_batches
        windows = min(len(held_out), batch * most) if most else len(held_out)
        rows = [min(batch, windows - start) for start in range(0, windows, batch)]
        shapes = [(count, config.data.sequence, self._width) for count in rows]
        formats = [(_EXACT,) * (self._layout.stages - 1)]
        if with_codecs and self._layout.stages > 1:
            formats.append(self._prepared.codecs.forward)
        one = sum(evaluation_bytes(self._layout, codecs, shapes, config.run.checksums) for codecs in formats)
        if self._followed and windows:
            one += self._row_bytes(held_out.batch(evaluated(held_out, batch=batch, batches=most))[0], _EXACT)
        return float(config.pipeline.data_parallel * one)

    def saving(self) -> float:
        """Bytes sent to gather the trained weights on the first rank."""
        away = [module for stage, module in enumerate(self._modules) if self._layout.rank_of(stage)]
        named = [(parameter, name in module.aliases) for module in away for parameter, name in module.names.items()]
        return 4.0 * sum(p.numel() for p, copy in named if p.requires_grad and (self._followed or not copy))

    @property
    def _followed(self) -> bool:
        """Whether the first rank's copy of a tied embedding follows the last's."""
        layout, lora = self._layout, self._config.lora.rank
        apart = layout.rank_of(0) != layout.rank_of(layout.stages - 1)
        return apart and bool(self._modules[-1].aliases) and not lora

    def _row_bytes(self, tokens: Tensor, codec: Codec) -> int:
        """Bytes of the rows of these tokens, in one direction."""
        return row_bytes(len(tokens.unique()), self._width, codec, checksums=self._config.run.checksums)

    def _averaging(self, rank: int, place: int) -> float:
        """Bytes that the rank at `place` in a pipeline sends to other pipelines."""
        config = self._config
        if config.pipeline.data_parallel == 1:
            return 0.0
        embedding = self._modules[0].decoder.get_input_embeddings().weight  # the last stage has its gradient
        modules = [self._modules[stage] for stage in self._layout.stages_of(rank)]
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        parameters = [p for p in trained if not (self._followed and p is embedding)]
        storage, codec = self._prepared.storage, self._prepared.all_reduce
        ranks, checksums = config.pipeline.data_parallel, config.run.checksums
        if travels_as_stored(storage, codec):
            shapes = [parameter.shape for parameter in parameters]
            return average_bytes(shapes, storage, count=len(trained), rank=place, ranks=ranks, checksums=checksums)
        buckets = Gradients(parameters, None, microbatches=config.pipeline.microbatches).buckets()
        return sum(
            all_reduce_bytes(sum(p.numel() for p in bucket), codec, rank=place, ranks=ranks, checksums=checksums)
            for bucket in buckets
        )


def evaluation_bytes(
    layout: PipelineLayout, codecs: Sequence[Codec], shapes: Sequence[tuple[int, int, int]], checksums: bool = True
) -> float:
    """Bytes that a pipeline sends to evaluate batches of these shapes through these codecs."""
    crossing = [codec for boundary, codec in enumerate(codecs) if layout.crosses(boundary)]
    sums = (layout.ranks - 1) * sealed_bytes(SUMS_BYTES, checksums)
    coded = [codec.nbytes(shape) if codec.settled else 4 * math.prod(shape) for codec in crossing for shape in shapes]
    return float(len(shapes) * sums + sum(sealed_bytes(nbytes, checksums) for nbytes in coded))


def _stages(prepared: Prepared) -> list[Any]:
    """The stages of one pipeline, without memory for their weights."""
    from transformers import AutoModelForCausalLM

    config, layout = prepared.config, prepared.layout
    with torch.device("meta"):
        whole: Any = hugging_face_config(config.model, vocab=prepared.vocab, sequence=config.data.sequence)
        model: Any = AutoModelForCausalLM.from_config(whole, attn_implementation="sdpa", trust_remote_code=False)
        model.tie_weights()
        if config.lora.rank:
            add_adapters(model, config)
        last = layout.stages - 1
        return [
            StageModule(model, layers=layout.layers_of(stage), first=stage == 0, last=stage == last)
            for stage in range(layout.stages)
        ]  # fmt: skip
