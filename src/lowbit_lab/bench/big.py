"""`lowbit demo --big`: a Llama of 8 billion random weights trains on two hosts, in memory that holds no such model.

The hosts are two network namespaces of this machine, joined by a link of 25 Mbit/s. On each, `lowbit train` reads its
half of the layers from a folder in bfloat16, keeps them in 4 bits (NF4), and trains adapters of rank 16 (QLoRA).
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from lowbit_lab.bench.timing import memory_of_process
from lowbit_lab.network import Link, LinkUnavailable, SlowLink, goodput
from lowbit_run import terminal
from lowbit_run.config import ConfigError, to_toml
from lowbit_run.cores import usable_cores
from lowbit_run.report import Column, Report, Row, Table, machine
from lowbit_run.train import TrainConfig
from lowbit_run.train.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, PipelineConfig, RunConfig
from lowbit_run.train.device import choose_autocast, memory_of
from lowbit_run.train.fits import PROCESS_BYTES
from lowbit_run.train.folder import RunFolder, check_output
from lowbit_run.train.footprint import model_bytes
from lowbit_run.train.layout import make_layout
from lowbit_run.train.metrics import read_metrics
from lowbit_run.train.saved import rank_peaks
from lowbit_run.train.weights import check_packages

LLAMA_8B: Mapping[str, Any] = MappingProxyType({
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
})  # fmt: skip
"""Llama-3.1-8B's sizes, as fields of Transformers' `LlamaConfig`."""
LINK = Link(25.0)
RANKS = 2
FILES = ("report.json", "rank-0.toml", "rank-1.toml")
_INDEX, _NOISE = "model.safetensors.index.json", 1 << 24
_CPU = torch.device("cpu")
_PERIOD = 0.05  # seconds between samples of the memory
_MEMORY = {"peak_bytes": "RssAnon", "resident_bytes": "VmRSS"}
_GB = 1e9

TABLE = Table(
    title=f"Two hosts, joined by {LINK.title}",
    columns=[
        Column("rank", "rank"),
        Column("layers", "layers"),
        Column("weights\nGB", "weights_bytes", lambda size: f"{size / _GB:.2f}"),
        Column("planned\nGB", "planned_bytes", lambda size: f"{size / _GB:.2f}"),
        Column("peak\nGB", "peak_bytes", lambda size: f"{size / _GB:.2f}"),
        Column("with pages\nof files", "resident_bytes", lambda size: f"{size / _GB:.2f}"),
        Column("sent,\nMB a step", "step_bytes", lambda size: f"{size / 1e6:.2f}"),
        Column("in BF16\n(calculated)", "step_bf16_bytes", lambda size: f"{size / 1e6:.2f}"),
        Column("sent in\nall, MB", "sent_bytes", lambda size: f"{size / 1e6:.1f}"),
    ],
)


def run(
    output: Path = Path("runs/demo"), *, sizes: Mapping[str, Any] = LLAMA_8B, steps: int = 3,
    console: Console | None = None,
) -> Report:  # fmt: skip
    """Make the model, unless it is there, train on two hosts, and write `report.json`; all of it below `output/big`.

    Args:
        sizes: of the model, as fields of Transformers' `LlamaConfig`.

    Returns:
        A report with a row for each rank: `rank`, `layers`; in bytes `weights_bytes`, `planned_bytes`, `peak_bytes`
        (anonymous memory), `resident_bytes` (with the pages of files that are mapped), `step_bytes` and
        `step_bf16_bytes` (messages of a step, as sent and in BF16), `sent_bytes` (over the link in the whole run, with
        headers, as the kernel counts); for all `seconds_per_step`, `goodput_mbit`, `alone_bytes` (planned for one
        machine) and `alone_bf16_bytes` (with frozen weights in BF16).

    Raises:
        ConfigError: memory or disk is missing, or files in the way are not lowbit's. LinkUnavailable: no namespaces.
        ChildProcessError: a rank failed.
    """
    console, output = console or terminal.console(), output / "big"
    model = output / "model"
    configs = [recipe(output, rank, steps) for rank in range(RANKS)]
    check_files(output, configs)
    there = complete(model, sizes)
    check_disk(model, sizes)
    if not there:
        RunFolder(output).note(*(f"model/{name}" for name in (*files_of(sizes), "config.json", _INDEX)))
        write_config(model, sizes)
    plans = plan(configs[0], sizes)
    check_memory(sum(each["planned_bytes"] for each in plans))
    if not there:
        console.print(f"Writing random weights to {model}; a second run finds them there.", highlight=False)
        write_random(model, sizes)
    RunFolder(output).note(*FILES)
    measured = train(output, configs)
    rows: list[Row] = [
        {"rank": rank, **plans[rank], **each, **traffic(configs[rank], sizes["hidden_size"], rank)}
        for rank, each in enumerate(measured)
    ]
    settings = {"link": str(LINK), "sizes": dict(sizes), "steps": steps}
    report = Report(command="demo --big", settings=settings, machine=machine(), rows=rows)
    report.write_json(output / "report.json")
    console.print(TABLE.render(rows))
    console.print(*findings(rows), sep="\n", highlight=False)
    console.print(f"\nRecipes: {output / 'rank-0.toml'} and rank-1.toml\nModel: {model}", highlight=False)
    return report


def plan(config: TrainConfig, sizes: Mapping[str, Any]) -> list[Row]:
    """Return what the planner knows of each rank, and of one machine for all."""
    layers = sizes["num_hidden_layers"]
    counts: dict[str, Any] = {"vocab": sizes["vocab_size"], "autocast": choose_autocast("auto", _CPU)}
    layout, whole = (make_layout(config.pipeline, ranks=ranks, layers=layers) for ranks in (RANKS, 1))
    kept, own = model_bytes(config, **counts), PROCESS_BYTES["cpu"]
    wide = replace(config, model=replace(config.model, weights="bf16", double_quantization=False))
    alone, alone_bf16 = (rank_peaks(each, whole, **counts)[0] + own for each in (config, wide))
    return [
        {
            "layers": len(layout.layers_of(rank)), "weights_bytes": kept.rank(layout, rank).weights,
            "planned_bytes": peak + own, "alone_bytes": alone, "alone_bf16_bytes": alone_bf16,
        }
        for rank, peak in enumerate(rank_peaks(config, layout, **counts))
    ]  # fmt: skip


def traffic(config: TrainConfig, width: int, rank: int) -> Row:
    """Return the seconds of the last step, and what this rank sent in it to the other one."""
    last = read_metrics(Path(config.run.output).with_name("rank-0") / "metrics.jsonl")[-1]
    elements, bits = config.data.batch * config.data.sequence * width, last["bits_backward" if rank else "bits_forward"]
    sizes = {"step_bytes": round(bits * elements / 8), "step_bf16_bytes": 2 * elements}
    return {**sizes, "seconds_per_step": last["seconds"], "loss": last["loss"]}


def recipe(output: Path, rank: int, steps: int) -> TrainConfig:
    """Return the run as one rank has it: two micro-batches of one window of 64 bytes of Python's standard library."""
    return TrainConfig(
        model=ModelConfig(pretrained=str(output / "model"), weights="nf4", double_quantization=True),
        lora=LoraConfig(rank=16, alpha=32.0),
        data=DataConfig(tokenizer="bytes", sequence=64, batch=2, max_bytes=1_000_000),
        pipeline=PipelineConfig(ranks=RANKS, microbatches=2, forward=("transform",)),
        optimizer=OptimizerConfig(lr=1e-4),
        run=RunConfig(
            output=str(output / f"rank-{rank}"), steps=steps, overwrite=True, eval_batches=1, tensorboard=False,
            threads=max(1, usable_cores() // RANKS), timeout_seconds=1800.0,
        ),
    )  # fmt: skip


def check_files(output: Path, configs: list[TrainConfig]) -> None:
    """Check before anything is made that packages are there, namespaces are permitted, and no foreign file is lost."""
    check_packages("demo --big keeps weights in 4 bits")
    if reason := SlowLink.available():
        raise LinkUnavailable(reason)
    for config in configs:
        check_output(config)
    names = [*FILES, *(f"model/{path.name}" for path in (output / "model").glob("*"))]
    if foreign := RunFolder(output).foreign(names):
        raise ConfigError(
            f"{output} contains {', '.join(foreign[:3])}, which lowbit has no record of making; nothing was changed; "
            "allowed: another folder, or moving these away"
        )


def check_disk(model: Path, sizes: Mapping[str, Any]) -> None:
    """Check that the model fits onto the disk, as far as it is not there."""
    need = 2 * sum(tensor.numel() for tensor in tensors_of(sizes).values())
    need -= sum(path.stat().st_size for path in model.glob("*")) if model.exists() else 0
    free = shutil.disk_usage(next(path for path in model.absolute().parents if path.exists())).free
    if need > free:
        raise ConfigError(
            f"the model needs {need / _GB:.1f} GB in {model}, and {free / _GB:.1f} GB of the disk is free"
        )


def check_memory(need: int) -> None:
    """Check that both ranks fit into this machine."""
    free, _ = memory_of(_CPU)
    if need > free:
        raise ConfigError(f"both ranks need {need / _GB:.1f} GB of memory, and {free / _GB:.1f} GB is free")


def tensors_of(sizes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's tensors without data, by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes)).state_dict()  # pyright: ignore[reportCallIssue]


def files_of(sizes: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the model's files, one for each layer, with their tensors without data."""
    files: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors_of(sizes).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        files[f"{layer}.safetensors"][name] = tensor
    return files


def complete(model: Path, sizes: Mapping[str, Any]) -> bool:
    """Whether a folder holds the whole model of these sizes: its index is written last."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((model / "config.json").read_text("utf-8"))
        return (model / _INDEX).exists() and config.items() >= sizes.items()
    return False


def write_config(model: Path, sizes: Mapping[str, Any]) -> None:
    """Write the configuration of a model whose weights are not there, or of other sizes."""
    from transformers import LlamaConfig

    model.mkdir(parents=True, exist_ok=True)
    (model / _INDEX).unlink(missing_ok=True)
    config = LlamaConfig(**sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])  # pyright: ignore[reportCallIssue]
    config.save_pretrained(model)


def write_random(model: Path, sizes: Mapping[str, Any]) -> None:
    """Write random bfloat16 weights, layer by layer. Matrices are pieces of the same noise, in any order."""
    generator = torch.Generator().manual_seed(0)
    noise = (0.02 * torch.randn(_NOISE, generator=generator)).to(torch.bfloat16)
    places, total = dict[str, str](), 0
    for file, tensors in files_of(sizes).items():
        made = {}
        for name, tensor in tensors.items():
            start = int(torch.randint(_NOISE, (1,), generator=generator))
            some = noise.roll(start).repeat(-(-tensor.numel() // _NOISE))[: tensor.numel()].view(tensor.shape)
            made[name] = some.clone() if tensor.dim() > 1 else torch.ones(tensor.shape, dtype=torch.bfloat16)
            places[name], total = file, total + made[name].nbytes
        save_file(made, model / file, metadata={"format": "pt"})
    (model / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))


def train(output: Path, configs: list[TrainConfig]) -> list[Row]:
    """Train on two hosts, while rank 0 writes to the terminal.

    Returns:
        For each rank `peak_bytes`, `resident_bytes`, `sent_bytes` and `goodput_mbit` of a report's rows.
    """
    secret, rows = secrets.token_hex(16), [defaultdict[str, int](int) for _ in configs]
    with SlowLink(RANKS, LINK.rate_mbit) as link, tempfile.TemporaryFile("w+") as log:
        mbit, ranks = goodput(link, [(0, 1)], 1.0)[0], list[Any]()
        before = [link.sent(rank)[0] for rank in range(RANKS)]
        for rank, config in enumerate(configs):
            file = output / f"rank-{rank}.toml"
            file.write_text(to_toml(config), "utf-8")
            environment = os.environ | link.environment(rank)
            environment |= {"LOWBIT_SECRET": secret, "OMP_NUM_THREADS": str(config.run.threads)}
            target: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT} if rank else {}
            words = [sys.executable, "-m", "lowbit", "train", str(file)]
            ranks.append(link.popen(rank, words, env=environment, **target))
        while _running(ranks):
            for process, row in zip(ranks, rows, strict=True):
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    memory = memory_of_process(process.pid)
                    for name, kind in _MEMORY.items():
                        row[name] = max(row[name], memory[kind])
            time.sleep(_PERIOD)
        _check_ends(ranks, log)
        sent = [link.sent(rank)[0] - earlier for rank, earlier in enumerate(before)]
    return [{**row, "sent_bytes": each, "goodput_mbit": mbit} for row, each in zip(rows, sent, strict=True)]


def _running(ranks: list[subprocess.Popen[str]]) -> bool:
    """Whether some rank still runs, and none has failed."""
    codes = [process.poll() for process in ranks]
    return None in codes and not any(codes)


def _check_ends(ranks: list[subprocess.Popen[str]], log: IO[str]) -> None:
    for rank, process in enumerate(ranks):
        if process.poll():  # the other one is told, or ends with the link
            log.seek(0)
            last = log.read().strip().splitlines()[-1:] if rank else []
            raise ChildProcessError(f"rank {rank} failed: {', '.join([f'exit status {process.poll()}', *last])}")


def findings(rows: list[Row]) -> list[str]:
    """Say what one machine would need, and how long messages take."""
    row, most = rows[0], max(each["peak_bytes"] for each in rows)
    mbit = row["goodput_mbit"]
    few, many = (sum(each[key] for each in rows) * 8e-6 / mbit for key in ("step_bytes", "step_bf16_bytes"))
    return [
        f"No rank took more than {most / _GB:.1f} GB (measured). One machine would need "
        f"{row['alone_bytes'] / _GB:.1f} GB for the same run, and {row['alone_bf16_bytes'] / _GB:.1f} GB for LoRA on "
        "BF16 weights (both planned).",
        f"The last step took {row['seconds_per_step']:.1f} s, on {usable_cores()} cores for both ranks. Its messages "
        f"take {few:.2f} s at the link's {mbit:.0f} Mbit/s; in BF16 they would take {many:.2f} s (both calculated from "
        "their bytes).",
    ]
