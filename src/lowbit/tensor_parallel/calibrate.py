"""`calibrate`: watch a model's partial sums over sampled sequences."""

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
from lowbit.tensor_parallel.artifact import CalibrationError
from lowbit.tensor_parallel.calibration import Calibration, magnitudes_of
from lowbit.tensor_parallel.emulate import emulate_tensor_parallel_
from lowbit.tensor_parallel.identity import identity
from lowbit.tensor_parallel.observe import Observer, join
from lowbit.tensor_parallel.plan import Plan, boundaries, parallel_boundaries
from lowbit.tensor_parallel.reduce import Settings
from lowbit.tensor_parallel.rowwise import group_of, install

MOMENTUM = 0.99
_log = logging.getLogger("lowbit.tensor_parallel")


@torch.no_grad()
def calibrate(
    model: nn.Module,
    sequences: Iterable[Tensor],
    *,
    ranks: int | None = None,
    k: int | None = None,
    features: str = "fixed",
    momentum: float = MOMENTUM,
    text: str = "",
    start: Calibration | None = None,
    state: str | Path | None = None,
    save_every: int = 16,
    progress: Callable[[int], None] | None = None,
    plan: Plan | None = None,
) -> Calibration:
    """Ranges of each rank's partial sums, by boundary and feature, and the features that travel in 16 bits.

    As the paper (arXiv 2411.07942): minimum and maximum of every sequence go into exponential moving averages, for each
    device, boundary and feature; the features with the largest range aggregated over the devices are the outliers.
    Deviations: averages are corrected for their start (`Observer`), and ranges of the sum over the ranks are kept
    beside the ranks' own, for the second step of two_shot. Sums go on in the model's dtype meanwhile.

    A whole model is run as on `ranks` tensor-parallel ranks (`emulate_tensor_parallel_`) and is whole again afterwards.
    On real tensor-parallel ranks all of them call this with the same sequences and get the same result, which is that
    of the emulation. They read all `sequences` and compare them and all settings before the first forward pass.

    Args:
        model: Hugging Face model, whole or loaded with a `tp_plan`; or any module with a `plan` that takes token ids.
        sequences: token ids, int64, (length,) or (batch, length); every row counts as one sequence.
        ranks: to calibrate for; None: those that the model is on.
        k: outlier features of each boundary; None: E // 64. features: "fixed" or "distributed" (`Calibration.select`).
        momentum: of the moving averages, from 0 to below 1: 0.99 looks back over about 100 sequences.
        text: where the sequences are from, for the file.
        start: go on from this calibration: its averages, count and momentum (which `momentum` must equal).
        state: file for the averages, written after every `save_every` sequences. If it is there at the start, as many
            sequences as it has seen are skipped, and the result is the same as without a break.
        progress: called with the number of sequences done, of those in `sequences`.
        plan: overrides the model's own.

    Raises:
        ValueError: no sequences, NaN in the model, a boundary that is always zero or not used, k not below E.
        CalibrationError: a state or `start` of another model, number of ranks or momentum.
        AgreementError: on real ranks, when they hold other sequences, models or settings; the same text on all.
    """
    rows = boundaries(model, plan)
    group = group_of(rows) if parallel_boundaries(model) else None
    name = identity(model, rows)
    if group is not None:  # read before the first pass, to compare what the ranks are about to feed
        sequences = list(sequences)

    def prepare() -> tuple[Observer, int, dict[str, str]]:
        widths = {boundary: module.out_features for boundary, module in rows.items()}
        _check_arguments(k, features, momentum, save_every, widths)
        observer = Observer(widths, ranks=_world(ranks, group), momentum=momentum)
        before = _continue(observer, start, name)
        facts = {
            "model": name,
            "world": str(observer.ranks),
            "momentum": str(momentum),
            "text": text,
        }
        facts["before"] = f"{before} {start.fingerprint() if start else ''}".strip()
        if state is not None:
            observer.resume(state, facts)
        return observer, before, facts

    settings = {
        "k": k,
        "features": features,
        "momentum": momentum,
        "save_every": save_every,
        "saves": state is not None,
    }
    told = {"text": text, "start": start.fingerprint() if start else None} | settings
    observer, before, facts = _agreed(prepare, told, sequences, group)

    def save() -> None:
        if state is not None:
            if group is not None:
                observer.gather(group)
            if group is None or dist.get_rank(group) == 0:
                observer.save(state, facts)

    _run(model, sequences, observer, before, rows, group, save, save_every, progress, plan)
    if observer.count == 0:
        raise ValueError("sequences is empty; allowed: at least one sequence")
    _warn_of_zeros(observer)
    return Calibration(
        lows=observer.lows, highs=observer.highs, count=observer.count, features={}, model=name, world=observer.ranks,
        text="; ".join(filter(None, [start.text if start else "", text])), settings={"momentum": momentum},
    ).select(k=k, features=features)  # fmt: skip


def _check_arguments(k: int | None, features: str, momentum: float, save_every: int, widths: Mapping[str, int]) -> None:
    check_choice("features", features, ("fixed", "distributed"))
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum!r}; allowed: a number from 0 to below 1")
    check_int("save_every", save_every, 1, 1 << 30)
    for boundary, width in widths.items():
        if k is not None and not 0 <= k < width:
            raise ValueError(f"k is {k}; allowed: 0 to {width - 1}, fewer than {boundary} has")


def _warn_of_zeros(observer: Observer) -> None:
    _, floored = magnitudes_of(observer.lows, observer.highs, observer.count, observer.momentum)
    if floored:
        _log.warning(
            "never seen other than zero: %s%s; such features get the smallest range of their boundary", floored[0],
            f", and features of {len(floored) - 1} more boundaries" if len(floored) > 1 else "",
        )  # fmt: skip


def _agreed(
    prepare: Callable[[], tuple[Observer, int, dict[str, str]]],
    told: Mapping[str, object],
    sequences: Iterable[Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[Observer, int, dict[str, str]]:
    """What `prepare` makes, once all ranks have it and are about to do the same; else the same error on all."""
    if group is None:
        return prepare()
    error: Exception | None = None
    facts = {what: str(value) for what, value in told.items()}
    try:
        observer, before, found = prepare()
        facts |= found | {"sequences seen before": str(observer.count)}
        facts["sequences"] = _digest(sequences)
        facts["ready"] = "yes"
    except Exception as failed:  # whatever it is: the other ranks wait for this one to say something
        error, facts["ready"] = failed, f"no ({failed})"
    agree(group, facts, topic="calibration")
    if error is not None:
        raise error
    return observer, before, found


def _digest(sequences: Iterable[Tensor]) -> str:
    """16 hexadecimal digits of all token ids and how they are batched."""
    digest = hashlib.sha256()
    for batch in sequences:
        digest.update(f"/{batch.dtype}/{tuple(batch.shape)}/".encode())
        digest.update(batch.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _world(ranks: int | None, group: dist.ProcessGroup | None) -> int:
    """How many ranks to calibrate for."""
    if group is not None:
        size = dist.get_world_size(group)
        if ranks not in (None, size):
            raise ValueError(f"ranks is {ranks} and the model is on {size}; allowed: {size}, or None")
        return size
    check_int("ranks", ranks, 1, 1 << 16)
    assert ranks is not None
    return ranks


def _continue(observer: Observer, start: Calibration | None, name: str) -> int:
    """Take over an earlier calibration; how many sequences it has seen."""
    if start is None:
        return 0
    for what, told, here in (
        ("the model", start.model, name),
        ("a world of", start.world, observer.ranks),
        ("a momentum of", start.momentum, observer.momentum),
    ):
        if told != here:
            raise CalibrationError(f"start is a calibration for {what} {told}, this one is for {here}")
    observer.take(join(start.lows, start.highs), start.count)
    return start.count


def _run(
    model: nn.Module, sequences: Iterable[Tensor], observer: Observer, before: int, rows: Mapping[str, nn.Linear],
    group: dist.ProcessGroup | None, save: Callable[[], None], save_every: int,
    progress: Callable[[int], None] | None, plan: Plan | None,
) -> None:  # fmt: skip
    """Forward passes over the sequences that have not been seen yet, watched."""
    training = model.training
    model.eval()
    whole = {"use_cache": False} if hasattr(model, "config") else {}
    device = next(model.parameters()).device
    saved = observer.count
    try:
        with _watched(model, observer, rows, group, plan):
            for batch in _unseen(sequences, observer.count - before):
                model(batch.to(device), **whole)
                observer.commit()
                if observer.count - saved >= save_every:
                    save()
                    saved = observer.count
                if progress is not None:
                    progress(observer.count - before)
    finally:
        model.train(training)
    if group is not None:
        observer.gather(group)
    save()


def _watched(
    model: nn.Module,
    observer: Observer,
    rows: Mapping[str, nn.Linear],
    group: dist.ProcessGroup | None,
    plan: Plan | None,
) -> contextlib.AbstractContextManager[object]:
    """Show the observer what comes through the boundaries."""

    def see(name: str, partials: Sequence[Tensor], total: Tensor, first: int = 0) -> None:
        for rank, partial in enumerate(partials, first):
            observer.see(name, rank, partial)
        observer.see(name, observer.ranks, total)

    if group is None:
        return emulate_tensor_parallel_(model, observer.ranks, plan=plan, watch=see)
    rank = dist.get_rank(group)

    def see_mine(name: str, partial: Tensor, total: Tensor) -> None:
        see(name, [partial], total, rank)

    return install(rows, {}, group, Settings(), watch=see_mine)


def _unseen(sequences: Iterable[Tensor], skip: int) -> Iterator[Tensor]:
    """Batches without the first `skip` sequences."""
    for batch in sequences:
        if batch.dim() not in (1, 2) or batch.is_floating_point() or not batch.numel():
            raise ValueError(
                f"sequences has {batch.dtype} {tuple(batch.shape)}; allowed: token ids, (length,) or (batch, length)"
            )
        rows = batch if batch.dim() == 2 else batch[None]
        if skip < len(rows):
            yield rows[skip:]
        skip = max(0, skip - len(rows))
