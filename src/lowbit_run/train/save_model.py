"""Save the trained model where Transformers finds it: all ranks send it, and rank 0 writes it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lowbit_run.train.checkpoints.save import TransientError, together
from lowbit_run.train.export import Export, export_dtype
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.members import Members
from lowbit_run.train.merge import Merged
from lowbit_run.train.model import save_adapter_config, save_companions, save_config
from lowbit_run.train.trainer import LocalModel


class SavedModel:
    """Writes the trained model of a run into its folder; every rank makes one and calls `write`."""

    def __init__(self, members: Members, model: LocalModel, folder: RunFolder) -> None:
        self._members, self._model, self._folder = members, model, folder

    def write(self) -> None:
        """Write the trained model, or its adapters, and on request the model with these merged in.

        Raises:
            TransientError: the disk is too small. The checkpoints are as they were.
        """
        config, model, adapters = self._members.config, self._model, bool(self._members.config.lora.rank)
        dtype = export_dtype(config)

        def make_export() -> tuple[Export, Callable[[Path], None]]:
            messages = self._members.messages("saving") if self._members.layout.ranks > 1 else None
            export = Export(model.modules.values(), messages, dtype, adapters=adapters)
            if adapters:
                return export, partial(save_adapter_config, config=config)
            return export, partial(save_config, config=model.config, dtype=dtype or torch.float32)

        def make_merged() -> tuple[Export, Callable[[Path], None]]:
            whole = Merged(config, self._folder.path / "model" / "adapter_model.safetensors")
            export = Export(whole, None, whole.dtype, adapters=False, finish=whole.merge_)
            return export, partial(save_config, config=whole.config, dtype=whole.dtype)

        self._export("model", make_export)
        if config.run.save_merged:
            self._export("merged", make_merged, alone=True)

    def _export(
        self, name: str, make: Callable[[], tuple[Export, Callable[[Path], None]]], *, alone: bool = False
    ) -> None:
        """Write a model into the folder `name` on rank 0, while the ranks of the first pipeline send it.

        Args:
            make: returns what writes the weights, and what writes their configuration into a folder. alone: rank 0
                has all that it needs.
        """
        members, part = self._members, self._folder.path / f".{name}.lowbit-part"
        made = [make()] if members.replicas.index == 0 and not alone else []

        def on_rank_0(work: Callable[[], None]) -> None:
            """Do what may take longer than the time limit, and raise its problem on all ranks."""

            def attempt() -> str:
                try:
                    work()
                    return ""
                except Exception as error:
                    if not isinstance(error, OSError) and "(os error " not in str(error):  # the package tokenizers'
                        raise
                    why = getattr(error, "strerror", None) or error
                    return f"rank 0 cannot write the model, {part}: {why}; checkpoints stay"

            if problem := together(attempt if members.rank == 0 else str, members.side)[0]:
                raise TransientError(problem)

        def reserve() -> None:
            shutil.rmtree(part, ignore_errors=True)  # of an attempt that was ended
            part.mkdir()
            if alone:
                made.append(make())
            made[0][0].reserve(part)
            if alone:
                made[0][0].write()

        try:
            on_rank_0(reserve)
            if made and not alone:
                made[0][0].write()
            on_rank_0(lambda: self._place(part, name, made[0][1]))
        finally:
            for export, _ in made:
                export.close()
            if members.rank == 0:
                shutil.rmtree(part, ignore_errors=True)

    def _place(self, part: Path, name: str, describe: Callable[[Path], None]) -> None:
        """Write what belongs to the weights in `part`, and move all of it to where the model is found."""
        describe(part)
        self._members.prepared.data.tokenizer.hugging_face().save_pretrained(part)
        save_companions(part, self._members.config, self._model.generation_config)
        files = [path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()]
        self._folder.note(*(f"{name}/{file}" for file in files))
        for file in files:
            target = self._folder.path / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            (part / file).replace(target)
        # Of an earlier save in other shards, which whoever loads the model might take instead.
        for earlier in self._folder.made() - {f"{name}/{file}" for file in files}:
            if earlier.startswith(f"{name}/") and ".safetensors" in earlier:
                (self._folder.path / earlier).unlink(missing_ok=True)
