"""`lowbit train --dry-run`: check a configuration as far as that needs no peers, and print the run."""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from lowbit.wire.pytorch import check_torch
from lowbit_run.config import to_toml
from lowbit_run.terminal import print_pairs
from lowbit_run.train.boundaries import AUTO_FORMATS, codecs_of, usable
from lowbit_run.train.footprint import model_bytes
from lowbit_run.train.model import hidden_size, targets_of
from lowbit_run.train.prepare import Prepared, prepare
from lowbit_run.train.rates import AFTER, wanted_nats
from lowbit_run.train.saved import rank_peaks

if TYPE_CHECKING:
    from lowbit.codecs import Codec
    from lowbit_run.train import TrainConfig


_WIDE = 4096  # stands for a width that is unknown before the run; all formats can code it


def dry_run(config: "TrainConfig") -> None:
    """Check a run and print it without starting it; under torchrun, the first rank prints.

    The tokens of the text are written to `run.output`, where the run finds them.

    Raises:
        ConfigError: something would keep the run from starting.
    """
    check_torch()
    ranks = int(os.environ.get("WORLD_SIZE") or config.ranks)  # WORLD_SIZE alone: plan for that many ranks
    prepared = prepare(config, ranks=ranks)
    if os.environ.get("RANK", "0") != "0":
        return
    print_pairs(_lines(prepared, ranks))
    print("\n# Settings that differ from the defaults; `lowbit config` prints all")
    print(to_toml(config, meanings=False, changed=True), end="")


def _lines(prepared: Prepared, ranks: int) -> Iterator[tuple[str, str]]:
    config, layout = prepared.config, prepared.layout
    pipelines = config.pipeline.data_parallel
    each = f" ({pipelines} pipelines of {layout.ranks})" if pipelines > 1 else ""
    sums = ", gradients summed over NCCL" if prepared.backend == "nccl" else ""
    yield "ranks", f"{ranks}{each} on {prepared.device.type}, messages over Gloo{sums}"
    yield "computes in", "float32" if prepared.autocast is None else str(prepared.autocast).removeprefix("torch.")
    yield (
        "schedule",
        f"{config.pipeline.schedule}, {config.pipeline.microbatches} micro-batches of {config.rows} windows",
    )
    for stage in range(layout.stages):
        layers = layout.layers_of(stage)
        yield f"stage {stage}", f"rank {layout.rank_of(stage)}, layers {layers[0]} to {layers[-1]}"
    width = hidden_size(config.model)
    shape = (config.rows, config.data.sequence, width)
    if config.pipeline.is_auto and layout.stages > 1:
        yield "each boundary", "the most exact of these that does not make its link the bottleneck"
        codecs, name = codecs_of(list(usable(AUTO_FORMATS, (*shape[:2], width or _WIDE)))), "format"
    else:
        codecs, name = prepared.codecs, "boundary"
    each = [
        [str(codecs.goals.get((way, i)) or _described(codec, shape)) for i, codec in enumerate(getattr(codecs, way))]
        for way in ("forward", "backward")
    ]
    lines = (f"forward {first}\nbackward {second}" for first, second in zip(*each, strict=True))
    yield from _grouped(name, lines)
    if layout.stages > 1:
        first = min(config.codec_warmup_steps, config.run.steps)
        fitted = f", for token anchors: {config.warmup_tokens:,} tokens" if prepared.anchor else ""
        yield "warm-up", f"{first} of {config.run.steps} steps at full precision{fitted}"
        if (nats := wanted_nats(prepared.codecs)) is not None:
            checks = ", ".join(str(config.codec_warmup_steps + after) for after in AFTER)
            yield "rates", f"chosen in the warm-up to cost {nats:g} nats; checked after steps {checks}"
    saved = "the inputs of decoder layers" if config.checkpoints else "as PyTorch does"
    yield from _grouped("saved by stage", (str(policy or saved) for policy in prepared.activations))
    yield from _memory(prepared)
    if prepared.storage is not None:
        yield "gradients kept in", str(prepared.storage)
    if pipelines > 1:
        yield "gradients averaged in", str(prepared.all_reduce)
    own = bool(config.model.pretrained) and not config.data.tokenizer
    yield "tokenizer", "the model's own" if own else config.tokenizer
    kind = "samples" if config.data.format == "jsonl" else "tokens"
    yield kind, f"{prepared.data.described()}, vocabulary of {prepared.vocab:,}"
    for note in prepared.data.notes:
        yield "note", note
    if config.lora.rank:
        yield "lora", f"rank {config.lora.rank} on {', '.join(targets_of(config))}"


def _memory(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Yield the predicted memory of each rank of a pipeline."""
    layout = prepared.layout
    counts = {"vocab": prepared.vocab, "autocast": prepared.autocast}
    kept, peaks = model_bytes(prepared.config, **counts), rank_peaks(prepared.config, layout, **counts)
    for rank, peak in enumerate(peaks):
        held = kept.rank(layout, rank)
        parts = {
            "weights": held.weights, "adapters": held.adapters, "gradients": held.gradients,
            "optimizer": held.optimizer, "token anchors": held.anchors, "activations": peak - held.total,
        }  # fmt: skip
        text = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
        yield f"memory of rank {rank}", f"{peak / 1e9:.2f} GB: {text}"


def _grouped(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a line for each group of consecutive equal texts, with their numbers."""
    for text, same in groupby(enumerate(texts), key=itemgetter(1)):
        numbers = [number for number, _ in same]
        yield f"{name} {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else ""), text


def _described(codec: "Codec", shape: tuple[int, int, int | None]) -> str:
    """Describe a codec with its bits per element, if they are known before the run."""
    rows, sequence, width = shape
    if width is None:
        return str(codec)
    return f"{codec}, {codec.bits_per_element((rows, sequence, width)):.2f} bits per element"
