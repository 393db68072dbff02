"""`python -m benchmarks.which_model`: which model fits on two PCs, and how long a fine-tuning takes, by the planner.

Nothing is trained: two layers of each model, with random weights, are measured for sizes. The rows are recorded in
docs/start/data/which-model.json, and the tables of docs/start/which-model.md are written from them.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit.plan.cluster import Cluster, ClusterLink, Machine
from lowbit.plan.predict import MemoryShort, Predictor, search
from lowbit.plan.sizes import STATE_BYTES, ModelSizes, measure_sizes, two_layers
from lowbit.report import Row
from lowbit.train.config import ModelConfig

START = Path(__file__).parents[1] / "docs/start"
PAGE, RECORDED = START / "which-model.md", START / "data/which-model.json"
BEGIN, END = "<!-- {} -->", "<!-- end -->"
SEQUENCE, BATCH, STEPS, LORA_RANK = 1024, 16, 600, 16  # 10 million tokens
TFLOPS, CODING_GB_S, OPTIMIZER_NS = 15.0, 10.0, 0.1
RESERVED_GB = 1.5  # of a GPU: CUDA's context, buffers of messages and short-lived tensors, which no plan counts
MEMORIES = (8, 12, 24)
LINKS = {10: 20, 25: 20, 100: 20, 1000: 1}  # Mbit/s each way: milliseconds of a round trip
FORMATS = ("fp32", "bf16", "transform")


def _llama(layers: int, width: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    } | more  # fmt: skip


MODELS: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2-135M": _llama(30, 576, 1536, 9, 3, 49152),
    "Qwen3-0.6B": _llama(28, 1024, 3072, 16, 8, 151936, model_type="qwen3", head_dim=128),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128256),
    "Qwen3-1.7B": _llama(28, 2048, 6144, 16, 8, 151936, model_type="qwen3", head_dim=128),
    "Qwen3-4B": _llama(36, 2560, 9728, 32, 8, 151936, model_type="qwen3", head_dim=128),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256, tie_word_embeddings=False),
}
"""Shapes, as in each model's config.json."""


def rows_of(name: str) -> Iterator[Row]:
    """Plan a model on two equal PCs.

    Yields:
        Rows: `model`, `method`, `fits` (memories that are enough, in GB), and if there is one, planned for the least of
        them, for each link and format: `link_mbit`, `format`, `layers` (of each PC), `seconds_per_step`, `days`,
        `gigabytes` (of the fuller GPU, with the reserve).
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[name]), "utf-8")
        model, vocab = ModelConfig(pretrained=folder), MODELS[name]["vocab_size"]
        full = measure_sizes(model, vocab=vocab, sequence=SEQUENCE, precision="bf16")
        adapters = _adapters(model, vocab)
    for method, sizes, trained in (("full", full, 1.0), ("LoRA", *_lora(full, adapters))):
        fits = [memory for memory in MEMORIES if _planned(sizes, trained, memory, 1000, ("fp32",))]
        one = {"model": name, "method": method, "fits": fits}
        if not fits:
            yield one
        for mbit in LINKS if fits else ():
            for row in _planned(sizes, trained, fits[0], mbit):
                yield one | {"link_mbit": mbit, **row, "days": row["seconds_per_step"] * STEPS / 86400}


def _adapters(model: ModelConfig, vocab: int) -> int:
    """Parameters of LoRA on all linear layers of a decoder layer."""
    from torch import nn

    whole, _ = two_layers(model, vocab, SEQUENCE)
    linear = (module for module in whole.model.layers[0].modules() if isinstance(module, nn.Linear))
    return sum(LORA_RANK * (module.in_features + module.out_features) for module in linear)


def _lora(full: ModelSizes, adapters: int) -> tuple[ModelSizes, float]:
    """Sizes with frozen weights, and the share of these "parameters" that the optimizer updates.

    The planner counts `STATE_BYTES` for a parameter; a frozen one takes 4. Backward computes no gradients of weights:
    two thirds of the operations remain. Nothing of a tied embedding is exchanged; its copy stays on the last rank.
    """
    frozen = 4 / STATE_BYTES
    layer = round(frozen * full.layer_parameters + adapters)
    sizes = replace(
        full, tied=0, layer_parameters=layer, first_parameters=round(frozen * full.first_parameters),
        last_parameters=round(frozen * full.last_parameters), layer_flops=full.layer_flops * 2 / 3,
        last_flops=full.last_flops * 2 / 3,
    )  # fmt: skip
    return sizes, adapters * full.layers / sizes.parameters(full.layers, first=True, last=True)


def _planned(
    sizes: ModelSizes, trained: float, memory: int, mbit: int, formats: Sequence[str] = FORMATS
) -> list[dict[str, Any]]:
    """The fastest choice of each format; none if the model does not fit."""
    coding = tuple(f"{name}={CODING_GB_S}/{CODING_GB_S}" for name in (*FORMATS, "transform-backward"))
    pcs = tuple(
        Machine(
            name=name, gpus=1, memory=f"{memory - RESERVED_GB}gb", tflops=TFLOPS,
            coding=coding, optimizer_ns=OPTIMIZER_NS * trained,
        )
        for name in ("A", "B")
    )  # fmt: skip
    cluster = Cluster(pcs, (ClusterLink(mbit=mbit, rtt_ms=LINKS[mbit]),))
    predictor = Predictor(cluster, sizes, sequence=SEQUENCE, batch=BATCH)
    try:
        return [
            {
                "format": name, "layers": list(predictor.layout(found.choice).layer_counts),
                "seconds_per_step": found.seconds,
                "gigabytes": max(found.memory) / 1e9 + RESERVED_GB,
            }
            for name in formats
            for found in search(
                predictor, formats=(name,), schedules=("1F1B",), stages_per_rank=(1,), microbatches=(BATCH,),
            )
        ]  # fmt: skip
    except MemoryShort:
        return []


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of the page, by name."""
    each = {(row["model"], row["method"]): row for row in rows}
    fits = [f"| model | {' | '.join(_TRAINED.values())} |", "|---|" + "---|" * len(_TRAINED)]
    for model in MODELS:
        cells = [each[model, method]["fits"] for method in _TRAINED]
        fits.append(f"| {model} | {' | '.join(f'{min(cell)} GB' if cell else '–' for cell in cells)} |")
    heads = " | ".join(f"{mbit:,} Mbit/s" for mbit in LINKS)
    times = [f"| model | trained | {heads} |", "|---|---|" + "---|" * len(LINKS)]
    for model, method in (key for key, row in each.items() if row["fits"]):
        hours = {
            (row["link_mbit"], row["format"]): f"{24 * row['days']:.1f}"
            for row in rows
            if (row["model"], row["method"]) == (model, method)
        }
        cells = " | ".join(f"**{hours[mbit, 'transform']}** / {hours[mbit, 'bf16']}" for mbit in LINKS)
        times.append(f"| {model} | {_TRAINED[method]} | {cells} |")
    return {"fits": "\n".join(fits), "times": "\n".join(times)}


_TRAINED = {"full": "all weights", "LoRA": "LoRA"}


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the tables of these rows between its marks."""
    for name, table in tables(rows).items():
        page = replaced(page, name, table)
    return page


def replaced(page: str, name: str, text: str) -> str:
    """Return a page with this text between the mark of this name and the next end."""
    before, mark, rest = page.partition(BEGIN.format(name))
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no {BEGIN.format(name)} with its {END}; allowed: one for each table")
    return f"{before}{mark}\n\n{text}\n\n{end}{after}"


def recorded() -> list[Row]:
    """Return the recorded rows."""
    return json.loads(RECORDED.read_text("utf-8"))


if __name__ == "__main__":
    planned = [row for name in MODELS for row in rows_of(name)]
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(row) for row in planned) + "\n]\n", "utf-8")
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), planned), "utf-8")
