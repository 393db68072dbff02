"""`ranks.json`: the machines of a run with their versions and links, and the memory of each rank."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lowbit.train.links import link_name
from lowbit.train.optim import parts_of

if TYPE_CHECKING:
    from lowbit.train.trainer import Trainer

FILE = "ranks.json"


def describe_machines(
    trainer: Trainer, machines: list[dict[str, Any]], rates: Mapping[str, float], round_trip: float | None
) -> dict[str, Any]:
    """Describe the machines of a run: `lowbit.report.machine` of each rank, Mbit/s by link, and seconds."""
    machine_of = trainer.links.machine_of
    return {
        "machines": [
            {"machine": first, "ranks": [r for r, own in enumerate(machine_of) if own == first], **machines[first]}
            for first in trainer.links.machines
        ],
        "links": [{"link": link_name(*pair), "mbit": rates.get(link_name(*pair))} for pair in trainer.links.pairs],
        "round_trip_seconds": round_trip,
        "backend": trainer.prepared.backend,
        "device": trainer.prepared.device.type,
        "precision": "fp32"
        if trainer.prepared.autocast is None
        else str(trainer.prepared.autocast).removeprefix("torch."),
    }


def memory_of(trainer: Trainer) -> dict[str, Any]:
    """Measure the bytes that this rank's stages take after the last step."""
    pipeline = trainer.pipeline
    stages = [
        {
            "stage": index,
            "layers": len(trainer.layout.layers_of(index)),
            "weights": sum(p.nbytes for p in module.parameters()),
            "codec_states": pipeline.lowbit_stages[index].state_bytes() if index in pipeline.lowbit_stages else 0,
            "messages": pipeline.lowbit_stages[index].traffic.peak_bytes if index in pipeline.lowbit_stages else 0,
        }
        for index, module in trainer.modules.items()
    ]
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    memory: dict[str, Any] = {
        "rank": trainer.rank,
        "stages": stages,
        "optimizer": sum(x.nbytes for value in states for x in parts_of(value).values()),
        "saved_activations": trainer.saved_bytes,
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if trainer.prepared.device.type == "cuda":
        memory["gpu"] = torch.cuda.max_memory_allocated(trainer.prepared.device)
    return memory
