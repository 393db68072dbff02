"""`python -m benchmarks.gpu_report`: test and measure on this machine's GPU, and write docs/results/gpu.md.

It needs what the library needs (PyTorch with Triton, numba, NumPy, xxhash), pytest and hypothesis; for the memory of a
model also transformers. It needs no network, no pydantic, rich or plotly: it is for a machine that somebody lends for a
quarter of an hour. Wheels of packages that are missing are installed from the folder WHEELS, if it exists.

Most telling parts come first. Each is a process of its own with a time limit, so that none can end or delay the
others; rows are written as they come (runs/gpu-report), and the page after each part.
"""

import argparse
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.marks import replaced

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
PAGE, FOLDER, WHEELS = ROOT / "docs/results/gpu.md", ROOT / "runs/gpu-report", ROOT / "runs/gpu-report/wheels"
SECONDS = 120.0
"""Most seconds of a part; what it has measured by then counts."""
TESTS = (
    "tests/lowbit/codecs/test_gpu.py",
    "tests/lowbit/pipeline/test_staged.py",
    "tests/lowbit_run/train/test_device.py",
)
FORMATS = ("int4", "int8", "fp8", "tah-quant", "tah-quant-published", "transform", "bf16")
_ROUNDS, _BUFFERS = 20, 3
_SMALL = {"shape": (2, 64, 256), "sequence": 64, "width": 64, "layers": 2}  # to try the report without a GPU
_LARGE = {"shape": (8, 4096, 4096), "sequence": 2048, "width": 1024, "layers": 8}


def bytes_of_kernels(device: str) -> Iterator[Row]:
    """Run the tests that compare every kernel's bytes with the reference's; yield a row for each test."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # Without the project's own options: they are strict, and one of them needs pytest-timeout.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "--continue-on-collection-errors", *TESTS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as tests:
        for line in tests.stdout or ():
            name, _, rest = line.partition(" ")
            if "::" in name and rest.split()[:1] and rest.split()[0] in ("PASSED", "FAILED", "SKIPPED", "ERROR"):
                yield {"test": name, "outcome": rest.split()[0].lower()}
            elif line.startswith("ERROR "):  # a file that cannot be imported, such as without pydantic
                yield {"test": line.split()[1], "outcome": "not run", "why": line.strip()[:200]}


def speeds(device: str) -> Iterator[Row]:
    """Yield the milliseconds in which each format codes a bfloat16 tensor, and its share of a copy's rate."""
    from lowbit import kernels
    from lowbit.codecs import parse
    from lowbit_lab.bench.timing import in_turn

    shape = _sizes(device)["shape"]
    xs = [torch.randn(shape, device=device).bfloat16() for _ in range(_BUFFERS)]
    outs = [torch.empty_like(x) for x in xs]
    for name in FORMATS:
        sender, receiver = (parse(name).open(shape=shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        payloads = [torch.empty(sender.nbytes(), dtype=torch.uint8, device=device) for _ in xs]
        sender.encode(xs[0], out=payloads[0], training=False)
        operations: dict[str, Callable[[int], object]] = {
            "copy": lambda i: outs[i].copy_(xs[i]),
            "encode": lambda i, s=sender, p=payloads: s.encode(xs[i], out=p[i], training=False),
            "decode": lambda i, r=receiver, p=payloads: r.decode(p[0], out=outs[i], training=False),
        }
        if name in ("int4", "tah-quant"):
            eagerly = kernels.backend("reference")
            operations["reference_encode"] = eagerly(operations["encode"])
        took = in_turn(operations, rounds=_ROUNDS, buffers=_BUFFERS, fewer={"reference_encode": 2}, device=device)
        median = {key: statistics.median(seconds) for key, seconds in took.items()}
        rate = 2 * xs[0].nbytes / median["copy"]
        moved = xs[0].nbytes + payloads[0].nbytes
        yield {
            "format": name, "bits": 8 * payloads[0].nbytes / xs[0].numel(), "copy_gb_s": rate / 1e9,
            **{f"{key}_ms": 1e3 * seconds for key, seconds in median.items()},
            "encode_of_copy": moved / median["encode"] / rate, "decode_of_copy": moved / median["decode"] / rate,
        }  # fmt: skip


def memory(device: str) -> Iterator[Row]:
    """Yield the peak memory and the seconds of a training step of a Llama in bfloat16, plain and with few bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowbit.activations import compress_saved_

    sizes = _sizes(device)
    width, sequence = sizes["width"], sizes["sequence"]
    for kind in ("plain", "checkpoints", "compress_saved_"):
        torch.manual_seed(0)
        shape: Mapping[str, Any] = {
            "hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": sizes["layers"],
            "num_attention_heads": width // 64 or 1, "vocab_size": 32000, "max_position_embeddings": sequence,
        }  # fmt: skip
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))  # pyright: ignore[reportCallIssue]
        model.to(device).train()
        if kind == "checkpoints":
            model.gradient_checkpointing_enable()
        elif kind == "compress_saved_":
            compress_saved_(model)
        ids = torch.randint(32000, (4, sequence), device=device)
        seconds, before, peak = [], 0, 0
        for _ in range(4):
            model.zero_grad()
            _finish(device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            _finish(device)
            seconds.append(time.perf_counter() - begin)
            peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        yield {"kind": kind, "peak_mb": (peak - before) / 1e6, "seconds": statistics.median(seconds[1:])}


def training(device: str) -> Iterator[Row]:
    """Yield the seconds of a training step of two ranks, both on this GPU, and the bits between them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "benchmarks.gpu_report", "--device", device, "--rank"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as ranks:
        for line in ranks.stdout or ():
            if line.startswith("{"):
                yield json.loads(line)
    if ranks.returncode:
        raise ChildProcessError(f"a rank ended with exit status {ranks.returncode}")


def rank(device: str) -> None:
    """Train as one of two ranks; the last one prints a row for each format."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from lowbit.codecs import parse
    from lowbit.pipeline import LowBitStage

    dist.init_process_group("gloo")
    place, sizes = dist.get_rank(), _sizes(device)
    width, layers = sizes["width"], sizes["layers"]
    for kind in ("PyTorch's stage", "fp32", "bf16", "transform"):
        if kind == "PyTorch's stage" and device == "cuda":
            continue  # it sends a GPU's tensors by NCCL, which refuses two ranks on one GPU
        torch.manual_seed(place)
        half = nn.Sequential(*(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(layers)))
        half = half.to(device)
        where = torch.device(device)
        stage: Any = (
            PipelineStage(half, place, 2, where)
            if kind == "PyTorch's stage"
            else LowBitStage(half, place, 2, where, forward=parse(kind))
        )
        schedule: Any = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        x, seconds = torch.randn(8, sizes["sequence"], width, device=device), []
        for _ in range(8):
            dist.barrier()
            begin = time.perf_counter()
            schedule.step(*([x] if place == 0 else []), **({"target": x} if place else {}))
            half.zero_grad()
            _finish(device)
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
        bits = None if kind == "PyTorch's stage" else stage.traffic.forward_bits
        shared: list[Any] = [torch.tensor([0.0 if bits is None else bits]) for _ in range(2)]
        dist.all_gather(shared, shared[place].clone())
        if place == 1:
            row = {"boundary": kind, "seconds": statistics.median(seconds[2:]), "bits": float(shared[0])}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


PARTS: dict[str, tuple[str, Callable[[str], Iterator[Row]]]] = {
    "bytes": ("Bytes of every kernel against the reference", bytes_of_kernels),
    "speed": ("Speed of the formats, bfloat16, over a copy", speeds),
    "memory": ("Memory of a training step", memory),
    "training": ("A training step of two ranks on this GPU, over Gloo", training),
}


def run_part(name: str, device: str) -> tuple[list[Row], str]:
    """Run a part in a process of its own. Returns its rows, and why it ended early; empty if it did not."""
    rows, lines = list[Row](), queue.Queue[str | None]()
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--device", device, "--part", name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    log = FOLDER / f"{name}.log"
    with log.open("w") as errors, (FOLDER / f"{name}.jsonl").open("w") as kept:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )

        def read() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        end, why = time.monotonic() + SECONDS, ""
        try:
            while (line := lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
                rows.append(json.loads(line))
                kept.write(line)
                kept.flush()
        except queue.Empty:
            why = f"it was ended after {SECONDS:.0f} s"
        finally:
            if process.poll() is None and why:
                os.killpg(process.pid, signal.SIGKILL)
    if process.wait() and not why:
        last = log.read_text().strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        why = f"it failed: {last[0]}"
    return rows, why


def section(name: str, rows: Sequence[Row], why: str) -> str:
    """Return a part's section of the page."""
    title, text = PARTS[name][0], ""
    if name == "bytes":
        outcomes = [row["outcome"] for row in rows]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
        failed = [
            f"- {row['test']}: {row['outcome']}" for row in rows if row["outcome"] in ("failed", "error", "not run")
        ]
        text = "\n".join([f"{len(rows)} tests: {counts or 'none ran'}.", "", *failed]).strip()
    elif rows:
        keys = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[_cell(row.get(key)) for key in keys] for row in rows]
        lines = [[key.replace("_", " ") for key in keys], ["---"] * len(keys), *cells]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [f"### {title}", text, f"**Not whole**: {why}." if why else ""]
    return "\n\n".join(part for part in parts if part)


def main(device: str, names: Sequence[str], page: Path = PAGE) -> None:
    """Run parts one after the other, and write the page after each."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _install()
    about = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "a CPU, to try the report"
    done = [f"{date.today()}, {about}, torch {torch.__version__}, by `make gpu-report`."]
    for name in names:
        sys.stdout.write(f"{PARTS[name][0]} ...\n")
        sys.stdout.flush()
        done.append(section(name, *run_part(name, device)))
        sys.stdout.write(f"{done[-1]}\n\n")
        page.write_text(replaced(page.read_text("utf-8"), "measured", "\n\n".join(done)), "utf-8")
    sys.stdout.write(f"Wrote {page}; rows are in {FOLDER}\n")


def _install() -> None:
    """Install wheels that somebody has put into WHEELS, apart from the machine's own packages."""
    packages = FOLDER / "packages"
    if WHEELS.is_dir() and not packages.exists():
        wheels = sorted(map(str, WHEELS.glob("*.whl")))
        line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(packages)]
        if subprocess.run([*line, *wheels], check=False).returncode:
            sys.stderr.write(f"wheels in {WHEELS} cannot be installed; going on without them\n")
    if packages.exists():
        sys.path.append(str(packages))


def _sizes(device: str) -> dict[str, Any]:
    return _LARGE if device == "cuda" else _SMALL


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the report, small")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank(given.device)
    elif given.part:
        for row in PARTS[given.part][1](given.device):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    elif given.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "error: PyTorch can use no GPU on this machine; allowed: one with CUDA and its PyTorch, or --device cpu"
        )
    else:
        main(given.device, given.parts, given.page)
