"""`calibrate`: observe a model's partial sums over sequences."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.codecs.checks import check_choice, check_int
from lowbit.collectives import agree
from lowbit.tensor_parallel.calibration import LAYOUTS, Calibration, magnitudes_of, outlier_count
from lowbit.tensor_parallel.emulate import emulate_tensor_parallel_
from lowbit.tensor_parallel.files import CalibrationError
from lowbit.tensor_parallel.identity import identity
from lowbit.tensor_parallel.observe import Observer
from lowbit.tensor_parallel.plan import Plan
from lowbit.tensor_parallel.reduce import SumSettings
from lowbit.tensor_parallel.rowwise import Installed, install
from lowbit.tensor_parallel.sums import ModelSum, model_sums

_log = logging.getLogger("lowbit.tensor_parallel")


@torch.no_grad()
def calibrate(
    model: nn.Module,
    sequences: Iterable[Tensor],
    *,
    ranks: int | None = None,
    k: int | None = None,
    features: str = "fixed",
    momentum: float = 0.99,
    text: str = "",
    start: Calibration | None = None,
    state: str | Path | None = None,
    save_every: int = 16,
    progress: Callable[[int], None] | None = None,
    plan: Plan | None = None,
) -> Calibration:
    """Measure the ranges of partial sums by rank, layer and feature, and choose the features sent in 16 bits.

    As in the paper (arXiv 2411.07942), minimum and maximum of every sequence enter exponential moving averages, for
    each device, layer and feature; the features with the largest range aggregated over the devices are the outliers.
    Deviations: averages are corrected for their start (`Observer`), and ranges of the sum over the ranks are kept
    beside the ranks' own, for the second step of two_shot. Meanwhile sums stay in the model's dtype.

    A whole model is run as on `ranks` tensor-parallel ranks (`emulate_tensor_parallel_`) and is whole again afterwards.
    On real tensor-parallel ranks all of them call this with the same sequences and get the same result, that of the
    emulation. They read all `sequences` first, and compare them and all settings before the first forward pass.

    Args:
        model: Hugging Face model, whole or loaded with a `tp_plan`; or any module with a `plan` that takes token ids.
        sequences: token ids, int64, (length,) or (batch, length); every row counts as one sequence.
        ranks: to calibrate for; None: those that the model is on.
        k: outlier features of each layer; None: E // 64. features: "fixed" or "distributed" (`calibration.select`).
        momentum: of the moving averages, from 0 to below 1: 0.99 looks back over about 100 sequences.
        text: where the sequences are from, for the file.
        start: go on from this calibration: its averages, count and momentum (which `momentum` must equal).
        state: file for the averages, written after every `save_every` sequences. If it exists at the start, the
            sequences that it has seen are skipped, and the result is the same as without the interruption.
        progress: called with the number of sequences done, of those in `sequences`.
        plan: overrides the model's own.

    Raises:
        ValueError: no sequences, NaN in the model, a layer that is always zero or not used, k not below E.
        CalibrationError: a state or `start` of another model, number of ranks or momentum.
        AgreementError: on real ranks, if they hold other sequences, models or settings; the same text on all.
    """
    layers = model_sums(model, plan)
    group = next(iter(layers.values())).group
    name = identity(model, layers)
    before = start.count if start else 0
    if group is not None:  # read before the first pass, so that the ranks can compare them
        sequences = list(sequences)

    def prepare() -> tuple[Observer, dict[str, str]]:
        """Check the arguments and load averages of earlier runs; also return facts that identify this run."""
        widths = {layer: summed.width for layer, summed in layers.items()}
        _check_arguments(k, features, momentum, save_every, widths)
        observer = Observer(widths, ranks=_world(ranks, group), momentum=momentum)
        if start is not None:
            _check_start(start, name, observer)
            observer.resume(start.lows, start.highs, start.count)
        facts = {
            "model": name, "world": str(observer.ranks), "momentum": str(momentum), "text": text,
            "before": f"{before} {start.fingerprint() if start else ''}".strip(),
        }  # fmt: skip
        if state is not None:
            observer.load(state, facts)
        return observer, facts

    settings = {
        "text": text, "start": start.fingerprint() if start else None, "k": k, "features": features,
        "momentum": momentum, "save_every": save_every, "saves": state is not None,
    }  # fmt: skip
    observer, facts = prepare() if group is None else _prepare_agreed(prepare, settings, sequences, group)

    def save() -> None:
        if group is not None:
            observer.gather(group)
        if state is not None and (group is None or dist.get_rank(group) == 0):
            observer.save(state, facts)

    options = {"use_cache": False} if hasattr(model, "config") else {}
    device = next(model.parameters()).device
    saved = observer.count
    with _observed(model, observer, layers, group, plan):
        for batch in _unseen(sequences, observer.count - before):
            model(batch.to(device), **options)
            observer.commit()
            if state is not None and observer.count - saved >= save_every:
                save()
                saved = observer.count
            if progress is not None:
                progress(observer.count - before)
    save()
    if observer.count == 0:
        raise ValueError("sequences is empty; allowed: at least one sequence")
    _warn_of_zeros(observer)
    return Calibration(
        lows=observer.lows, highs=observer.highs, count=observer.count, features={}, model=name, world=observer.ranks,
        text="; ".join(filter(None, [start.text if start else "", text])), settings={"momentum": momentum},
    ).select(k=k, features=features)  # fmt: skip


def _check_arguments(k: int | None, features: str, momentum: float, save_every: int, widths: Mapping[str, int]) -> None:
    check_choice("features", features, LAYOUTS)
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum!r}; allowed: a number from 0 to below 1")
    check_int("save_every", save_every, 1, 1 << 30)
    for layer, width in widths.items():
        outlier_count(layer, k, width)


def _world(ranks: int | None, group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks to calibrate for."""
    if group is not None:
        size = dist.get_world_size(group)
        if ranks not in (None, size):
            raise ValueError(f"ranks is {ranks} and the model is on {size}; allowed: {size}, or None")
        return size
    check_int("ranks", ranks, 1, 1 << 16)
    assert ranks is not None
    return ranks


def _check_start(start: Calibration, model: str, observer: Observer) -> None:
    compared = ("the model", start.model, model), ("a world of", start.world, observer.ranks)
    for name, earlier, now in (*compared, ("a momentum of", start.momentum, observer.momentum)):
        if earlier != now:
            raise CalibrationError(f"start is a calibration for {name} {earlier}, this one is for {now}")


def _prepare_agreed(
    prepare: Callable[[], tuple[Observer, dict[str, str]]],
    settings: Mapping[str, object],
    sequences: Iterable[Tensor],
    group: dist.ProcessGroup,
) -> tuple[Observer, dict[str, str]]:
    """Call `prepare` on all ranks and compare their settings and text; on a difference, raise the same on all."""
    error: Exception | None = None
    stated = {name: str(value) for name, value in settings.items()}
    try:
        observer, facts = prepare()
        stated |= facts | {"sequences seen before": str(observer.count), "sequences": _digest(sequences)}
        stated["ready"] = "yes"
    except Exception as failure:  # of any kind: the other ranks wait for this one's statement
        error, stated["ready"] = failure, f"no ({failure})"
    agree(group, stated, topic="calibration")
    if error is not None:
        raise error
    return observer, facts


def _digest(sequences: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits of all token ids and batch shapes."""
    digest = hashlib.sha256()
    for batch in sequences:
        digest.update(f"/{batch.dtype}/{tuple(batch.shape)}/".encode())
        digest.update(batch.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _observed(
    model: nn.Module,
    observer: Observer,
    layers: Mapping[str, ModelSum],
    group: dist.ProcessGroup | None,
    plan: Plan | None,
) -> Iterator[None]:
    """Set the model to evaluation, and show the observer all its partial sums and their totals, for this block."""
    batch = torch.Size((1, 1))
    first = 0 if group is None else dist.get_rank(group)

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal batch
        batch = args[0].shape

    def by_sequence(x: Tensor) -> Tensor:
        """Experts get all sequences as one, some of them once for each expert: (experts * batch * length, E)."""
        return x.view(-1, *batch, x.shape[-1]).transpose(0, 1).reshape(batch[0], -1, x.shape[-1])

    def see(layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
        for rank, partial in enumerate(partials, first):
            observer.see(layer, rank, by_sequence(partial))
        observer.see(layer, observer.ranks, by_sequence(total))

    training = {module: module.training for module in model.modules()}
    model.eval()
    hook = model.register_forward_pre_hook(note)
    try:
        if group is None:
            watched: Installed = emulate_tensor_parallel_(model, observer.ranks, plan=plan, watch=see)
        else:
            watched = install(layers, {}, group, SumSettings(), watch=see)
        with watched:
            yield
    finally:
        hook.remove()
        for module, mode in training.items():
            module.training = mode


def _unseen(sequences: Iterable[Tensor], skip: int) -> Iterator[Tensor]:
    """Yield batches without the first `skip` sequences."""
    for batch in sequences:
        if batch.dim() not in (1, 2) or batch.is_floating_point() or not batch.numel():
            raise ValueError(
                f"sequences has {batch.dtype} {tuple(batch.shape)}; allowed: token ids, (length,) or (batch, length)"
            )
        rows = batch if batch.dim() == 2 else batch[None]
        if skip < len(rows):
            yield rows[skip:]
        skip = max(0, skip - len(rows))


def _warn_of_zeros(observer: Observer) -> None:
    _, zeros = magnitudes_of(observer.lows, observer.highs, observer.count, observer.momentum)
    if zeros:
        _log.warning(
            "always zero in the calibration text: %s%s; such features get the smallest range of their layer", zeros[0],
            f", and features of {len(zeros) - 1} more layers" if len(zeros) > 1 else "",
        )  # fmt: skip
