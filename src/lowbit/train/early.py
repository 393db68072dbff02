"""Check names and files of a run without slow imports, so that a slip on the command line is refused within seconds."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from lowbit.config import ConfigError
from lowbit.train.checkpoints.manifest import FOLDER, NO_CHECKPOINT, shares_in, steps_in
from lowbit.train.config import TrainConfig
from lowbit.train.folder import MARK, RunFolder

FILES = (
    "metrics.jsonl", "evaluations.jsonl", "summary.json", "config.json", "ranks.json", "report.html",
)  # fmt: skip
IN_USE = "run.output {!r} is in use by {}; allowed: another folder, or to wait until it has ended"
_FOLDERS = (FOLDER, "tensorboard", "trace", "model")


def check_early(config: TrainConfig) -> None:
    """Check what `prepare` checks without the modules that take seconds to import; ranks of a launcher check the rest.

    Raises:
        ConfigError: something would keep the run from starting. ModuleNotFoundError: an optional package is missing.
    """
    from lowbit.train.boundaries import make_codecs  # these import PyTorch, and little else
    from lowbit.train.data import files_named
    from lowbit.train.device import choose_device
    from lowbit.train.layout import make_layout
    from lowbit.train.model import count_layers

    for name in ("transformers", "safetensors"):
        if find_spec(name) is None:  # or else each rank would end with a traceback
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    run, data, layers = config.run, config.data, count_layers(config.model)
    if "RANK" not in os.environ:
        make_layout(config.pipeline, ranks=config.pipeline.ranks, layers=layers)
        choose_device(run.device, config.ranks)
    make_codecs(config.pipeline, len(config.pipeline.forward))
    if not run.supervise:  # which resumes by itself
        check_output(config)
    if run.resume is True and not shares_newest_first(Path(run.output) / FOLDER) and "RANK" not in os.environ:
        raise ConfigError(NO_CHECKPOINT.format(Path(run.output) / FOLDER))
    files_named(data.text, "data.text")
    files_named(data.held_out, "data.held_out")


def check_output(config: TrainConfig) -> None:
    """Check that `run.output` is writable and holds no files of others in the way.

    Raises:
        ConfigError: the folder cannot be used.
    """
    run, output = config.run, Path(config.run.output)
    name = f"run.output {str(output)!r}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name} cannot be written to: {reason}") from error
    folder = RunFolder(output)
    if foreign := _in_the_way(config, folder):
        unknown = "" if folder.marked else f" (there is no {MARK}: lowbit has not run here)"
        raise ConfigError(
            f"{name} holds {', '.join(foreign)}, which lowbit has no record of making{unknown}; "
            "nothing was touched; allowed: another folder, or to move these away"
        )
    earlier = [each for each in (*FILES, *_FOLDERS) if (output / each).exists()]
    if folder.marked and earlier and not (run.resume or run.overwrite):
        raise ConfigError(
            f"{name} holds a run already ({', '.join(earlier)}); allowed: another folder, run.resume=true (--resume) "
            "to continue from its newest checkpoint, or run.overwrite=true (--overwrite) to delete it"
        )


def _in_the_way(config: TrainConfig, folder: RunFolder) -> list[str]:
    """Return files that lowbit did not make, at paths that this run would write or read."""
    files = [*FILES]
    if config.run.save_model:
        # Others, such as a tokenizer's files, would keep the model in its staging folder.
        files += ["model/config.json", "model/model.safetensors", "model/adapter_model.safetensors"]
    files += [name for name in _FOLDERS if (folder.path / name).is_file()]
    if not config.run.resume:  # a resume may begin with shares that the user copied here
        shares = shares_newest_first(folder.path / FOLDER)
        files += [str(file.relative_to(folder.path)) for share in shares for file in sorted(share.iterdir())]
    return folder.foreign(files)


def shares_newest_first(folder: Path) -> list[Path]:
    """List shares of checkpoints, those of the newest step first."""
    return [share for step in reversed(steps_in(folder).values()) for share in shares_in(step).values()]
