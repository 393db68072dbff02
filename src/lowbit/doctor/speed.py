"""Measures how fast a machine computes the recipe's model and codes its messages."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from lowbit.codecs import parse_pair
from lowbit.codecs.speed import coding_speed
from lowbit.doctor.messages import Speed
from lowbit.doctor.settings import DoctorSettings
from lowbit.plan.sizes import layer_seconds, measure_sizes, optimizer_ns
from lowbit.train import TrainConfig, load
from lowbit.train.boundaries import AUTO_FORMATS, usable
from lowbit.train.config import AUTO
from lowbit.train.device import choose_autocast, choose_device, threads_per_rank
from lowbit.train.model import hidden_size, vocabulary
from lowbit.train.pretrained import load_tokenizer


def speed(settings: DoctorSettings) -> Speed:
    """Measure a decoder layer, the optimizer and the formats. What cannot be measured is left out, with the reason."""
    problem, values = "", dict[str, Any]()
    begin, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    try:
        config = load(settings.recipe) if settings.recipe else TrainConfig()
        device = choose_device(config.run.device, 1)
        torch.set_num_threads(config.run.threads or threads_per_rank(max(1, torch.cuda.device_count())))
        vocab = vocabulary(config.model, load_tokenizer(config.data.tokenizer).size)
        sequence, autocast = config.data.sequence, choose_autocast(config.run.precision, device)
        seconds, tokens, overhead = layer_seconds(
            config.model, vocab=vocab, sequence=sequence, rows=max(1, config.rows), autocast=autocast, device=device
        )
        values["optimizer_ns"] = optimizer_ns(device)
        if settings.recipe:
            values |= {"layer_seconds": seconds, "layer_tokens": tokens, "layer_overhead": overhead}
        else:  # without a recipe the plan's model is unknown, so a layer's seconds would be of the wrong one
            sizes = measure_sizes(config.model, vocab=vocab, sequence=sequence, precision="fp32")
            values["tflops"] = 3 * sizes.layer_flops * tokens / seconds / 1e12
        if width := hidden_size(config.model):
            values["coding"] = _coding(settings, config, (1, sequence, width), device)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        problem = " ".join(str(error).split())[:500]
    took = time.perf_counter() - begin
    values["busy"], values["own"] = (busy_seconds() - busy) / took, (time.process_time() - own) / took
    return Speed(**values, problem=problem)


def busy_seconds() -> float:
    """Seconds that the cores that this process may use have computed since the machine started, for all programs."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    with contextlib.suppress(OSError, ValueError):
        for name, *values in map(str.split, Path("/proc/stat").read_text().splitlines()):
            if name in cores:  # user, nice, system, idle, waiting for disks, two kinds of interrupts, stolen
                ticks += sum(map(int, values[:8])) - sum(map(int, values[3:5]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _coding(
    settings: DoctorSettings, config: TrainConfig, shape: tuple[int, int, int], device: torch.device
) -> tuple[str, ...]:
    """Speed of formats, as `cluster.toml` has it."""
    texts = [*settings.formats, *config.pipeline.forward, *config.pipeline.backward]
    named = [each for text in texts for each in (usable(AUTO_FORMATS, shape) if text == AUTO else (text,))]
    codecs = dict.fromkeys(codec for text in named for codec in parse_pair(text) if codec.settled)
    found = []
    for codec in codecs:
        encode, decode = coding_speed(codec, shape, device)
        found.append(f"{codec!r}={encode / 1e9:.3g}/{decode / 1e9:.3g}")
    return tuple(found)
