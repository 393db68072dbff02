"""Check a run as far as that needs no peers, before the ranks meet.

`prepare` calls all checks in order: that a tokenizer fits is `model.vocabulary`, that a model can be cut
`model.check_pretrained` and `check_stages`, and that the machine has the memory `fits.check_memory`.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowbit.codecs import Codec
from lowbit.collectives.reduce import check_summable
from lowbit.pipeline.anchors import TokenAnchor
from lowbit.wire.pytorch import version
from lowbit_run.config import ConfigError
from lowbit_run.train.activations import Policies
from lowbit_run.train.boundaries import Codecs, codec_of, make_codecs
from lowbit_run.train.checkpoints.manifest import (
    FOLDER,
    NO_CHECKPOINT,
    DamagedShareError,
    read_manifest,
    shares_newest_first,
)
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.data import Data, load_data
from lowbit_run.train.dates import recorded
from lowbit_run.train.device import choose_autocast, choose_backend, choose_device
from lowbit_run.train.elastic import check_elastic
from lowbit_run.train.fits import check_memory
from lowbit_run.train.folder import check_output
from lowbit_run.train.footprint import batch_meter, model_bytes
from lowbit_run.train.gradients import storage_codec
from lowbit_run.train.identity import changes_between, check_allowed, refuse, run_identity
from lowbit_run.train.layout import PipelineLayout, make_layout
from lowbit_run.train.model import (
    check_lora,
    check_pretrained,
    check_stages,
    count_layers,
    hidden_size,
    hugging_face_config,
    vocabulary,
)
from lowbit_run.train.optim import check_torchao
from lowbit_run.train.pretrained import read_embedding
from lowbit_run.train.saved import stage_policies
from lowbit_run.train.schedules import SCHEDULES
from lowbit_run.train.tied import tied_codec
from lowbit_run.train.trackers import check_trackers
from lowbit_run.train.weights import check_quantization


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A configuration with everything derived from it on this machine.

    Attributes:
        layout: of each pipeline. codecs: for its boundaries; anchor: of these, if there is one.
        activations: policies of saved activations, by stage.
        storage: codec of stored gradients, if any; all_reduce: codec of gradients between pipelines;
            tied_rows: codec of a tied embedding's rows.
        vocab: entries of the embedding. identity: everything that losses depend on (`lowbit_run.train.identity`).
    """

    config: TrainConfig
    layout: PipelineLayout
    codecs: Codecs
    anchor: TokenAnchor | None
    activations: Policies
    storage: Codec | None
    all_reduce: Codec
    tied_rows: Codec
    data: Data
    vocab: int
    device: torch.device
    backend: str
    identity: dict[str, Any]

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of matrix products; None: that of the weights. Only valid in the process that computes."""
        return choose_autocast(self.config.run.precision, self.device)


def prepare(config: TrainConfig, *, ranks: int) -> Prepared:
    """Check a configuration for a run of `ranks` ranks, and read its text."""
    pipelines = config.pipeline.data_parallel
    if ranks % pipelines:
        raise ConfigError(
            f"pipeline.data_parallel is {pipelines}; allowed with {ranks} ranks: a divisor of their number"
        )
    layout = make_layout(config.pipeline, ranks=ranks // pipelines, layers=count_layers(config.model))
    codecs = make_codecs(config.pipeline, layout.stages - 1)
    width = hidden_size(config.model)
    shape = None if width is None else (config.rows, config.data.sequence, width)
    for direction in ("forward", "backward"):
        for codec in getattr(codecs, direction):
            _check_codec(f"pipeline.{direction}", codec, shape)
    _check_warmup(config, layout, codecs)
    check_elastic(config, codecs.goals.values())
    device = choose_device(config.run.device, ranks)
    backend = choose_backend(config, device, ranks)
    if config.optimizer.states == "8bit":
        check_torchao()
    storage = storage_codec(config.gradients)
    all_reduce = codec_of("gradients.all_reduce", config.gradients.all_reduce, check_summable)
    tied_rows = tied_codec(config.pipeline)
    check_output(config)
    if os.environ.get("RANK", "0") == "0":
        check_trackers(config.run.trackers)
    check_pretrained(config.model, config.data.sequence)
    check_stages(config, [layout.layers_of(stage)[0] for stage in range(1, layout.stages)])
    check_lora(config)
    check_quantization(config)
    data = _load(config, recorded(config.run)[0])
    vocab = vocabulary(config.model, data.tokenizer.size)
    autocast = choose_autocast(config.run.precision, device)
    counts: dict[str, Any] = {"vocab": vocab, "autocast": autocast}
    kept, batch = model_bytes(config, **counts), batch_meter(config, **counts)
    activations = stage_policies(config, layout, kept, batch, vocab=vocab)
    schedule = config.pipeline.schedule
    # Before 2.13, PyTorch frees the saved tensors of a `torch.autograd.Function` between the two parts of a split pass.
    if any(activations) and SCHEDULES[schedule].splits and version() < (2, 13):
        raise ConfigError(
            f"pipeline.schedule is {schedule!r}; with activations.bits below 16 it needs PyTorch 2.13 or newer, here is"
            f" {torch.__version__}; allowed: a schedule without weight passes, such as 1F1B"
        )
    check_memory(config, layout, activations, ranks=ranks, vocab=vocab, device=device, autocast=autocast)
    identity = run_identity(config, data=data, vocab=vocab)
    check_allowed(config.run.allow_change, identity)
    if config.run.resume and "RANK" not in os.environ and not dist.is_initialized():  # ranks check together
        _check_resume(config, identity)
    return Prepared(
        config=config, layout=layout, codecs=codecs, anchor=_anchor(config, layout, vocab),
        activations=activations, storage=storage, all_reduce=all_reduce, tied_rows=tied_rows, data=data, vocab=vocab,
        device=device, backend=backend, identity=identity,
    )  # fmt: skip


def _load(config: TrainConfig, date: str) -> Data:
    cache = Path(config.run.output) / "cache"
    return load_data(config.data, pretrained=config.model.pretrained, cache=cache, date=date)


def on_date(prepared: Prepared, date: str) -> Prepared:
    """Return a prepared run with the text that the chat template writes on another day."""
    data = _load(prepared.config, date)
    identity = run_identity(prepared.config, data=data, vocab=prepared.vocab)
    return replace(prepared, data=data, identity=identity)


def _has_anchor(config: TrainConfig, layout: PipelineLayout) -> bool:
    return config.pipeline.anchor and layout.ranks > 1  # a file may be used with one rank


def _check_warmup(config: TrainConfig, layout: PipelineLayout, codecs: Codecs) -> None:
    """Check what needs steps at full precision: rates that are chosen, and token anchors."""
    for (direction, _), goal in codecs.goals.items():
        if not config.codec_warmup_steps:
            raise ConfigError(
                f"pipeline.warmup_steps is 0, and pipeline.{direction} has {goal}, whose rate is chosen in the last of "
                "these steps; allowed: at least 1"
            )
    if not _has_anchor(config, layout):
        return
    if not config.codec_warmup_steps:
        default = "" if config.pipeline.warmup_steps == 0 else f", a quarter of run.steps ({config.run.steps})"
        raise ConfigError(
            f"pipeline.anchor is true and pipeline.warmup_steps is 0{default}; allowed: at least 1, since anchors are "
            "fitted to what crosses in these steps"
        )
    if not config.pipeline.is_auto and all(codec.is_plain for codec in codecs.forward):
        raise ConfigError(
            f"pipeline.anchor is true and pipeline.forward is {list(config.pipeline.forward)}, where it has no effect; "
            "allowed: with a format that codes, such as transform, or auto"
        )


def _anchor(config: TrainConfig, layout: PipelineLayout, vocab: int) -> TokenAnchor | None:
    """Return the token anchor of a run, with the embedding that its model begins with; None without one."""
    if not _has_anchor(config, layout):
        return None
    exact = hugging_face_config(config.model, vocab=vocab, sequence=config.data.sequence)
    return TokenAnchor(embedding=read_embedding(config.model.pretrained, exact, vocab=vocab))


def _check_codec(name: str, codec: Codec, shape: tuple[int, ...] | None) -> None:
    try:
        if shape is not None:
            codec.nbytes(shape)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_resume(config: TrainConfig, identity: dict[str, Any]) -> None:
    folder, run = Path(config.run.output) / FOLDER, config.run
    comparable = {key: value for key, value in identity.items() if key != "run.precision"}
    shares = shares_newest_first(folder)
    if not shares and run.resume is True:
        raise ConfigError(NO_CHECKPOINT.format(folder))
    for share in shares:
        try:
            manifest = read_manifest(share)
        except DamagedShareError:
            continue  # the ranks look for an intact one
        changes = changes_between(manifest.identity, comparable, step=manifest.step)
        if problem := refuse(f"checkpoint {share.parent}", changes, run.allow_change):
            raise ConfigError(problem)
        return
