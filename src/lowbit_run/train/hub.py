"""The Hugging Face Hub: what a name in place of a folder stands for is downloaded once somebody has agreed."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit import escape
from lowbit_run.config import ConfigError
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.pretrained import reason

log = escape.logger(__name__)

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # of an organization and its model
_DATASET = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")  # the oldest have no organization
_UNUSED = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot", "original/*")


def with_model(config: TrainConfig, *, agreed: bool) -> TrainConfig:
    """Return the configuration with a local folder in `model.pretrained` if it names a model on the Hub.

    A model in the cache of Hugging Face is taken from there. Otherwise it is downloaded, with a token and a server of
    the environment (HF_TOKEN, HF_ENDPOINT): if `agreed`, or after a yes at the terminal. Every machine has its own.

    Raises:
        ConfigError: nobody agreed, or the Hub cannot be reached or has no such model.
    """
    name = config.model.pretrained
    if Path(name).exists() or not _NAME.fullmatch(name):
        return config
    folder = _snapshot(name, local_files_only=True)
    if folder is None:
        _ask(f"model.pretrained is {name!r}", agreed)
        folder = _snapshot(name)
    assert folder is not None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning("model.pretrained: %s is in %s", name, folder)
    return replace(config, model=replace(config.model, pretrained=folder))


def check_dataset(config: TrainConfig, *, agreed: bool) -> None:
    """Refuse a name in `data.dataset` that nobody has agreed to download, unless the cache has the data set.

    The package `datasets` downloads it when the text is read, with the same token and server.

    Raises:
        ConfigError: nobody agreed.
    """
    name = config.data.dataset
    if agreed or Path(name).exists() or not _DATASET.fullmatch(name):
        return
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, repo_type="dataset", local_files_only=True)
    except Exception:  # the package has several errors for what is not there
        _ask(f"data.dataset is {name!r}", agreed)


def _ask(given: str, agreed: bool) -> None:
    problem = f"{given}, which is not a folder here"
    if not (agreed or _asked(problem)):
        raise ConfigError(f"{problem}; allowed: a folder, or --yes, which downloads it from the Hugging Face Hub")


def _asked(problem: str) -> bool:
    if "RANK" in os.environ or sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"{problem}. Download it from the Hugging Face Hub? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _snapshot(name: str, **options: Any) -> str | None:
    """Return the folder of a model, with interrupted downloads resumed; None if the cache alone lacks a part of it."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, ignore_patterns=list(_UNUSED), **options)
        if not [*Path(folder).glob("*.safetensors")]:  # older models
            folder = snapshot_download(name, ignore_patterns=list(_UNUSED[1:]), **options)
    except Exception as error:  # of the package, of its HTTP client, and of the disk
        if options:
            return None
        raise ConfigError(
            f"model.pretrained is {name!r}, which cannot be downloaded: {reason(error)}; allowed: a local folder, or "
            "the name of a model that you may read (HF_TOKEN)"
        ) from error
    complete = (Path(folder) / "config.json").is_file() and _has_all_weights(Path(folder))
    return folder if complete or not options else None


def _has_all_weights(folder: Path) -> bool:
    """Whether the files are all there that an index names, if there is one, in the format that would be read."""
    kind = "safetensors" if any(folder.glob("*.safetensors*")) else "bin"
    texts = [index.read_text() for index in folder.glob(f"*.{kind}.index.json")]
    names = {name for text in texts for name in re.findall(rf'"([\w.-]+\.{kind})"', text)}
    return all((folder / name).exists() for name in names) and any(folder.glob(f"*.{kind}"))
