"""Write the trained model while it is gathered, so that no rank needs memory for more than its own weights and a piece.

Rank 0 knows all names, shapes and types before any weight is sent: it reserves the files' room on the disk, and writes
each piece to its place in them.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.wire.messages import Messages
from lowbit_run.train.checkpoints.save import DTYPES, header_of
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.model import StageModule
from lowbit_run.train.pretrained import check_files

PIECE_BYTES = 8 << 20
SHARD_BYTES = 4 << 30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype of saved weights: `run.save_dtype`, or that of the pretrained files; None: as trained."""
    if config.run.save_dtype is not None:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.run.save_dtype]
    if not config.model.pretrained:
        return None
    stored = check_files(config.model.pretrained, "model.pretrained").values()
    bytes_by_dtype = Counter[str]()
    for shape, dtype in stored:
        bytes_by_dtype[dtype] += prod(shape)
    return dtype_named(bytes_by_dtype.most_common(1)[0][0])


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a weight as `check_files` names it."""
    return DTYPES.get(name) or getattr(torch, name.removeprefix("torch."))


class Weight(NamedTuple):
    """A tensor of the file: its name there, its shape, and its dtype by safetensors' name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class Export:
    """The trained weights of a pipeline, from all its ranks into files on rank 0; every rank makes one.

    The last stage's copy of a tied embedding, equal to the first's, is left out.

    Args:
        modules: of this rank; they are gone through twice. messages: between the ranks of the pipeline; None: this
            rank is the only one.
        dtype: of the weights in the files; None: as they are trained. adapters: the weights are adapters.
        finish: called with each module before its weights are written, and not before their names are.

    Raises:
        PeerError: a rank ended or does not answer. ValueError: a rank describes weights that it cannot have.
    """

    def __init__(
        self, modules: Iterable[StageModule], messages: Messages | None, dtype: torch.dtype | None, *, adapters: bool,
        finish: Callable[[StageModule], None] = lambda module: None,
    ) -> None:  # fmt: skip
        self._modules, self._messages, self._dtype, self._adapters = modules, messages, dtype, adapters
        self._finish = finish
        held = [Weight(name, tuple(x.shape), _NAMES[x.dtype]) for name, x in self._stored(meta=True)]
        self._weights: list[list[Weight]] = [held]
        self._files: dict[str, tuple[int, int]] = {}  # file descriptor and first byte, by the weight's name
        if messages is None:
            return
        if messages.rank:
            messages.send_json([list(weight) for weight in held], 0)
            return
        for rank in range(1, messages.ranks):
            self._weights.append(_checked(messages.receive_json(rank, "names of weights"), rank))
        names = [weight.name for weights in self._weights for weight in weights]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two ranks of the pipeline have {twice}; allowed: each weight on one rank")

    def reserve(self, folder: Path) -> None:
        """Make the files on rank 0, as large as they will be. Raises OSError: for example, the disk is too small."""
        stem = "adapter_model" if self._adapters else "model"
        shards = _shards(sorted(weight for weights in self._weights for weight in weights))
        paths = [f"{stem}.safetensors"]
        if len(shards) > 1:
            paths = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
            places = {weight.name: path for path, shard in zip(paths, shards, strict=True) for weight in shard}
            total = sum(weight.nbytes for shard in shards for weight in shard)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for path, shard in zip(paths, shards, strict=True):
            header, offsets, size = header_of({w.name: (w.dtype, w.shape) for w in shard}, {"format": "pt"})
            file = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._files |= {name: (file, start) for name, start in offsets.items()}
            os.posix_fallocate(file, 0, size)
            os.pwrite(file, header, 0)

    def write(self) -> None:
        """Send this rank's weights to rank 0, which writes them; every rank calls it after rank 0 has called `reserve`.

        A piece of each rank crosses in turn, so that no wait is longer than one piece of every rank takes.

        Raises:
            DamagedError: a piece did not arrive as it was sent. PeerError: as the constructor. OSError: on rank 0.
        """
        if self._messages is not None and self._messages.rank:
            for _, piece in self._pieces():
                self._messages.send(piece, 0).wait()
            return
        for _ in zip_longest(self._write_own(), *(self._take(rank) for rank in range(1, len(self._weights)))):
            pass
        self.close()

    def close(self) -> None:
        """Flush and close the files, as far as any are open."""
        for file in {file for file, _ in self._files.values()}:
            os.fsync(file)
            os.close(file)
        self._files = {}

    def _write_own(self) -> Iterator[None]:
        written: dict[str, int] = {}
        for name, piece in self._pieces():
            self._put(name, written.get(name, 0), piece)
            written[name] = written.get(name, 0) + piece.numel()
            yield

    def _take(self, rank: int) -> Iterator[None]:
        assert self._messages is not None
        for weight in self._weights[rank]:
            for start in range(0, weight.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, weight.nbytes - start)
                self._put(weight.name, start, self._messages.receive(nbytes, rank, weight.name))
                yield

    def _put(self, name: str, start: int, piece: Tensor) -> None:
        file, first = self._files[name]
        os.pwrite(file, piece.numpy().data, first + start)

    def _pieces(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stored():
            for piece in tensor.cpu().contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES):
                if piece.numel():
                    yield name, piece

    def _stored(self, *, meta: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield trained weights as files have them, in which experts may be apart; `meta`: without their data."""
        for module in self._modules:
            if not meta:
                self._finish(module)
            named = [(name, p.detach()) for p, name in module.names.items() if p.requires_grad or not self._adapters]
            named = [(name, p.to("meta") if meta else p) for name, p in named if name not in module.aliases]
            if self._adapters:  # as PEFT names them
                yield from ((f"base_model.model.{name.replace('.default.', '.')}", p) for name, p in named)
                continue
            named += [(name, x.to("meta") if meta else x) for name, x in module.saved_buffers.items()]
            for _, group in groupby(sorted(named), key=lambda pair: pair[0].rpartition(".layers.")[2].split(".")[0]):
                for name, tensor in module.as_stored(dict(group)).items():
                    yield name, tensor if self._dtype is None else tensor.to(self._dtype)


def _checked(described: Any, rank: int) -> list[Weight]:
    """Return what a rank says of its weights."""
    try:
        weights = [Weight(str(name), tuple(map(int, shape)), dtype) for name, shape, dtype in described]
        if all(weight.dtype in DTYPES and all(0 <= size < 1 << 40 for size in weight.shape) for weight in weights):
            return weights
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"rank {rank} of the pipeline describes {str(described)[:200]!r}; allowed: names, shapes and types"
    )


def _shards(weights: list[Weight]) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.nbytes
    return shards
