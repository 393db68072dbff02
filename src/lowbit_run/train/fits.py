"""Say before a run loads its model whether the ranks of this machine fit into its memory, and what to change if not."""

import logging
import os
from collections.abc import Iterator

import torch

from lowbit_run.config import ConfigError
from lowbit_run.train.activations import Policies
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.device import local_rank, local_ranks, memory_of
from lowbit_run.train.footprint import ModelBytes, batch_meter, held_batches, model_bytes
from lowbit_run.train.layout import PipelineLayout
from lowbit_run.train.model import hidden_size
from lowbit_run.train.saved import peaks_of
from lowbit_run.train.weights import weights_of

log = logging.getLogger(__name__)

PROCESS_BYTES = {"cpu": 450_000_000, "cuda": 1_500_000_000}
"""What a rank takes besides its model: the interpreter; on a GPU also CUDA's context and buffers of messages."""
_BOUND = 48  # bytes held of a token, at most, for each byte of a layer's weights over the model's width


def check_memory(
    config: TrainConfig, layout: PipelineLayout, policies: Policies, *, ranks: int, vocab: int, device: torch.device,
    autocast: torch.dtype | None,
) -> None:  # fmt: skip
    """Check the ranks of this machine; its first one logs a warning if they likely need more memory than is free.

    A launcher leaves warnings to its ranks. `policies`: how each stage saves activations.

    Raises:
        ConfigError: their weights alone exceed the memory of this machine, or of one of its cards.
    """
    kept = model_bytes(config, vocab=vocab, autocast=autocast)
    check_weights_fit(kept, layout, ranks=ranks, device=device, advice=_advice(config, autocast))
    launches = "RANK" not in os.environ and ranks > 1
    for where, places in _sharing(layout, ranks, device):
        free, _ = memory_of(where)
        if launches or local_rank() or _surely_fits(config, layout, kept, vocab, places, free):
            continue
        peaks = peaks_of(config, layout, kept, batch_meter(config, vocab=vocab, autocast=autocast), policies)
        need = sum(peaks[place] + PROCESS_BYTES[where.type] for place in places)
        if need > free:
            log.warning(
                "%s will likely need %s GB, and %s has %s GB of memory free; to need less: %s",
                _named(places), _gb(need), _place(where), _gb(free), _advice(config, autocast, activations=True),
            )  # fmt: skip


def check_weights_fit(
    kept: ModelBytes, layout: PipelineLayout, *, ranks: int, device: torch.device, advice: str
) -> None:
    """Check that the weights of the ranks of this machine fit into its memory, or into its cards'.

    Raises:
        ConfigError: they do not; the text ends with `advice`.
    """
    for where, places in _sharing(layout, ranks, device):
        _, whole = memory_of(where)
        weights = sum((one := kept.rank(layout, place)).weights + one.adapters for place in places)
        if weights > whole:
            raise ConfigError(
                f"the weights of {_named(places)} take {_gb(weights)} GB, {_place(where)} has {_gb(whole)} GB of "
                f"memory; allowed: {advice}"
            )


def _named(places: list[int]) -> str:
    return f"rank {places[0]}" if len(places) == 1 else f"ranks {', '.join(map(str, places))}"


def _place(where: torch.device) -> str:
    return "this machine" if where.type == "cpu" else str(where)


def _sharing(layout: PipelineLayout, ranks: int, device: torch.device) -> Iterator[tuple[torch.device, list[int]]]:
    """Yield each memory of this machine with the places in the pipeline of the ranks that share it.

    A launcher leaves the cards of its ranks alone: asking for their memory would make a context on each.
    """
    if "RANK" not in os.environ and ranks > 1 and device.type == "cuda":
        return
    here = local_ranks(ranks)
    start = int(os.environ.get("RANK", "0")) - local_rank()
    cards = torch.cuda.device_count() if device.type == "cuda" else 1
    for card in range(min(cards, here)):
        places = [(start + local) % layout.ranks for local in range(card, here, cards)]
        yield (torch.device("cuda", card) if device.type == "cuda" else device), places


def _surely_fits(
    config: TrainConfig, layout: PipelineLayout, kept: ModelBytes, vocab: int, places: list[int], free: float
) -> bool:
    """Whether a generous bound of activations fits, so that they need not be counted."""
    width, tokens, most = hidden_size(config.model), config.rows * config.data.sequence, 0
    if width is None:
        return False
    held = held_batches(config, layout)
    for place in places:
        most += kept.rank(layout, place).total + PROCESS_BYTES["cuda"] + 2 * _BOUND * tokens * vocab
        for stage in layout.stages_of(place):
            weights = sum(kept.layers[layer].weights for layer in layout.layers_of(stage))
            most += held.peak(stage) * tokens * (_BOUND * weights // width + 16 * width)
    return most < free


def _advice(config: TrainConfig, autocast: torch.dtype | None, *, activations: bool = False) -> str:
    options = ["fewer layers here (pipeline.layers)", "more machines"]
    weights = weights_of(config, autocast)
    if config.lora.rank and weights != "nf4":
        options.insert(0, 'model.weights "nf4"')
    if not config.lora.rank:
        options.insert(0, "lora.rank 16" if config.model.pretrained else "a smaller model")
        options += [] if config.optimizer.states == "8bit" else ['optimizer.states "8bit"']
    if activations:
        if not config.activations.coded and not config.checkpoints:
            options.append("activations.checkpoint true")
        if config.rows > 1:
            options.append("more pipeline.microbatches")
        options.append(f"a data.sequence below {config.data.sequence}")
    return f"{', '.join(options[:-1])} or {options[-1]}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}"
