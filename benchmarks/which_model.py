"""`python -m benchmarks.which_model`: which model fits on 1, 2 and 4 cards, and how long it takes, by the planner.

Nothing is loaded or trained: models are built without data. The rows are recorded in docs/start/data/which-model.json,
and the tables of docs/start/which-model.md are written from them.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.marks import replaced
from lowbit_run.plan.cluster import Cluster, ClusterLink, Machine
from lowbit_run.plan.predict import MemoryShort, Predictor, search
from lowbit_run.plan.sizes import ModelSizes, measure_sizes
from lowbit_run.report import Row
from lowbit_run.train.config import DataConfig, LoraConfig, ModelConfig, PipelineConfig, TrainConfig

START = Path(__file__).parents[1] / "docs/start"
PAGE, RECORDED = START / "which-model.md", START / "data/which-model.json"
SEQUENCE, BATCH, STEPS, LORA_RANK = 1024, 16, 600, 16  # 10 million tokens
TFLOPS, CODING_GB_S, OPTIMIZER_NS = 15.0, 10.0, 0.1
RESERVED_GB = 1.5  # of a GPU: CUDA's context, buffers of messages and short-lived tensors, which no plan counts
CARDS, MEMORIES = (1, 2, 4), (8, 12, 16, 24)
LINKS = {10: 20, 25: 20, 100: 20, 1000: 1}  # Mbit/s each way: milliseconds of a round trip
FORMATS = ("fp32", "bf16", "transform")


def _llama(layers: int, width: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    } | more  # fmt: skip


def _qwen(layers: int, width: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    own = {"model_type": "qwen2", "tie_word_embeddings": False}
    return _llama(layers, width, inner, heads, kv_heads, 152064, **(own | more))


MODELS: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2-135M": _llama(30, 576, 1536, 9, 3, 49152),
    "Qwen2.5-0.5B": _qwen(24, 896, 4864, 14, 2, vocab_size=151936, tie_word_embeddings=True),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128256),
    "Qwen3-4B": _llama(36, 2560, 9728, 32, 8, 151936, model_type="qwen3", head_dim=128),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256, tie_word_embeddings=False),
    "Qwen2.5-14B": _qwen(48, 5120, 13824, 40, 8),
    "Qwen2.5-32B": _qwen(64, 5120, 27648, 40, 8),
    "Llama-3.3-70B": _llama(80, 8192, 28672, 64, 8, 128256, tie_word_embeddings=False),
}
"""Shapes, as in each model's config.json."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": LoraConfig(rank=LORA_RANK)},
    "QLoRA": {"lora": LoraConfig(rank=LORA_RANK)},
}


def rows_of(name: str) -> Iterator[Row]:
    """Plan a model on one card, on two and on four equal ones.

    Yields:
        Rows: `model`, `method`, `parameters`, `trained` (of them, or of adapters), `fits` (by number of cards the least
        memory of each that is enough, in GB, or None), and if two of some memory are enough, planned for the least of
        them, for each link and format: `link_mbit`, `format`, `layers` (of each PC), `seconds_per_step`, `days`,
        `gigabytes` (of the fuller GPU, with the reserve).
    """
    for method, changes in METHODS.items():
        with tempfile.TemporaryDirectory() as folder:  # sizes read it as long as they are used
            Path(folder, "config.json").write_text(json.dumps(MODELS[name]), "utf-8")
            quantized = {"weights": "nf4", "double_quantization": True} if method == "QLoRA" else {}
            config = TrainConfig(
                model=ModelConfig(pretrained=folder, **quantized), data=DataConfig(sequence=SEQUENCE, batch=BATCH),
                pipeline=PipelineConfig(microbatches=BATCH), **changes,
            )  # fmt: skip
            sizes = measure_sizes(config, vocab=MODELS[name]["vocab_size"], autocast=torch.bfloat16)
            trained = sizes.parameters(sizes.layers, first=True, last=True)
            fits = {
                str(cards): next((m for m in MEMORIES if _planned(sizes, cards, m, 1000, ("fp32",))), None)
                for cards in CARDS
            }  # fmt: skip
            one = {
                "model": name,
                "method": method,
                "parameters": sizes.kept.stage(range(sizes.layers), first=True, last=True).elements,
                "trained": trained,
                "fits": fits,
            }
            if fits["2"] is None:
                yield one
                continue
            for mbit in LINKS:
                for row in _planned(sizes, 2, fits["2"], mbit):
                    yield one | {"link_mbit": mbit, **row, "days": row["seconds_per_step"] * STEPS / 86400}


def _planned(
    sizes: ModelSizes, cards: int, memory: int, mbit: int, formats: Sequence[str] = FORMATS
) -> list[dict[str, Any]]:
    """The fastest choice of each format; none if the model does not fit."""
    coding = tuple(f"{name}={CODING_GB_S}/{CODING_GB_S}" for name in (*FORMATS, "transform-backward"))
    pcs = tuple(
        Machine(
            name=name, gpus=1, memory=f"{memory - RESERVED_GB}gb", tflops=TFLOPS, coding=coding,
            optimizer_ns=OPTIMIZER_NS,
        )
        for name in "ABCD"[:cards]
    )  # fmt: skip
    config = TrainConfig(data=DataConfig(sequence=SEQUENCE, batch=BATCH))
    predictor = Predictor(Cluster(pcs, (ClusterLink(mbit=mbit, rtt_ms=LINKS[mbit]),)), sizes, config)
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
    counts = {1: "one card", **{cards: f"{cards} cards" for cards in CARDS[1:]}}
    fits = [f"| model | trained | {' | '.join(counts[cards] for cards in CARDS)} |", "|---|---|" + "---|" * len(CARDS)]
    for (model, method), row in each.items():
        cells = [f"{least} GB" if (least := row["fits"][str(cards)]) else "–" for cards in CARDS]
        fits.append(f"| {model} | {method} | {' | '.join(cells)} |")
    heads = " | ".join(f"{mbit:,} Mbit/s" for mbit in LINKS)
    times = [f"| model | trained | {heads} |", "|---|---|" + "---|" * len(LINKS)]
    for model, method in (key for key, row in each.items() if "format" in row):
        hours = {
            (row["link_mbit"], row["format"]): f"{24 * row['days']:.1f}"
            for row in rows
            if (row["model"], row["method"]) == (model, method)
        }
        cells = " | ".join(f"**{hours[mbit, 'transform']}** / {hours[mbit, 'bf16']}" for mbit in LINKS)
        times.append(f"| {model} | {method} | {cells} |")
    return {"fits": "\n".join(fits), "times": "\n".join(times)}


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the tables of these rows between its marks."""
    for name, table in tables(rows).items():
        page = replaced(page, name, table)
    return page


def recorded() -> list[Row]:
    """Return the recorded rows."""
    return json.loads(RECORDED.read_text("utf-8"))


if __name__ == "__main__":
    planned = [row for name in MODELS for row in rows_of(name)]
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(row) for row in planned) + "\n]\n", "utf-8")
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), planned), "utf-8")
