"""`calibrate`: observes a model's partial sums over sequences, and chooses their formats."""

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit import escape
from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_choice, check_int
from lowbit.codecs.feature_int.codec import GAINS
from lowbit.collectives import agree
from lowbit.escape import shown
from lowbit.tensor_parallel.calibration import (
    AVERAGES,
    SHARE,
    Calibration,
    CalibrationError,
    Curve,
    check_budget,
    curve_of,
    default_budget,
    dtype_of,
    outlier_count,
    tables_of,
)
from lowbit.tensor_parallel.drift import relative_error, sample
from lowbit.tensor_parallel.identity import identity
from lowbit.tensor_parallel.inputs import (
    INPUT_GROUP,
    INPUT_WIDTHS,
    input_format,
    input_numbers,
    layers_with_inputs,
)
from lowbit.tensor_parallel.observed import ObservedModel, effects_of
from lowbit.tensor_parallel.plan import Plan
from lowbit.tensor_parallel.sums import ModelSum, model_sums
from lowbit.wire.messages import gather_json, gather_tensor

MOST_ROWS = 128
"""Number of rows that are kept for each layer and rank."""
_PER_SEQUENCE = 32


def sampling(count: int) -> tuple[int, int]:
    """Return the rows to keep per sequence, and n if only every n-th sequence is kept, of `count` sequences."""
    rows, every = _PER_SEQUENCE, 1
    while rows * -(-count // every) > MOST_ROWS:
        rows, every = (rows // 2, every) if rows > 1 else (1, 2 * every)
    return rows, every


class Observer:
    """Moving averages over sequences, started at zero and corrected for that, like Adam's averages of gradients.

    After n sequences the corrected average is sum_i m^(n - i) (1 - m) value_i / (1 - m^n). Unlike an average that
    starts with the first value, it gives the first sequences no more weight than the others.

    Args:
        widths: features of each layer. ranks: of the tensor-parallel model. momentum: m, from 0 to 1 (exclusive).

    Attributes:
        averages: "low", "high" and "mean" by layer, float32 (ranks + 1, E), not corrected; the last row is of the sum
            over the ranks.
        samples: rows by layer, bfloat16 (ranks, sequences, rows, E), spread evenly over the sequences of this run; on
            real ranks those of the other ranks are 0 until `gather`.
        count: number of sequences observed. before: those of earlier runs, whose rows are not available.
    """

    def __init__(self, widths: Mapping[str, int], *, ranks: int, momentum: float) -> None:
        self.ranks, self.momentum, self.count, self.before = ranks, momentum, 0, 0
        self.averages = {
            kind: {name: torch.zeros(ranks + 1, width, dtype=torch.float32) for name, width in widths.items()}
            for kind in AVERAGES
        }
        self.samples = {
            name: torch.zeros(ranks, 0, _PER_SEQUENCE, width, dtype=torch.bfloat16) for name, width in widths.items()
        }
        self._seen: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in widths}

    def see(self, layer: str, rank: int, x: Tensor) -> None:
        """Observe the sums of a rank, or of `ranks` for the total: (..., sequence, E); ValueError for NaN and Inf."""
        x = x.detach().reshape(-1, *x.shape[-2:])
        low, high, mean = x.amin(1).float().cpu(), x.amax(1).float().cpu(), x.mean(1, dtype=torch.float32).cpu()
        wrong = ~(torch.isfinite(low) & torch.isfinite(high))
        if bool(wrong.any()):
            feature = int(wrong.any(0).nonzero()[0])
            raise ValueError(
                f"sequence {self.count + int(wrong.any(1).nonzero()[0])} makes feature {feature} of {layer} "
                f"on rank {rank} NaN or infinite; allowed: finite values"
            )
        seen = {"low": low, "high": high, "mean": mean}
        if rank < self.ranks:
            chosen = torch.arange(_PER_SEQUENCE, device=x.device) * x.shape[1] // _PER_SEQUENCE
            seen["rows"] = x[:, chosen].bfloat16().cpu()
        self._seen[layer][rank] = seen

    def commit(self) -> None:
        """Add the observations of one forward pass, which must have used all layers."""
        if missing := [name for name, seen in self._seen.items() if self.ranks not in seen]:
            raise ValueError(f"a forward pass did not use {', '.join(missing)}; allowed: layers that every pass uses")
        batch = 0
        for name, seen in self._seen.items():
            rows = None
            for rank, values in seen.items():
                batch = len(values["low"])
                for kind in AVERAGES:
                    average = self.averages[kind][name][rank]
                    for i in range(batch):
                        average.mul_(self.momentum).add_(values[kind][i], alpha=1 - self.momentum)
                if rank < self.ranks:
                    rows = values["rows"].new_zeros(self.ranks, *values["rows"].shape) if rows is None else rows
                    rows[rank] = values["rows"]
            assert rows is not None
            # Keep rows spread over all sequences, including these: the more sequences, the fewer of each.
            start = self.count - self.before
            (before_rows, before_every), (kept_rows, every) = sampling(start), sampling(start + batch)
            kept = self.samples[name][:, :: every // before_every, :: before_rows // kept_rows]
            chosen = [i for i in range(batch) if (start + i) % every == 0]
            self.samples[name] = torch.cat([kept, rows[:, chosen, :: _PER_SEQUENCE // kept_rows]], 1)
            seen.clear()
        self.count += batch

    def gather(self, group: dist.ProcessGroup) -> None:
        """Complete this rank's averages and rows with those of the others; all ranks of a real group must call this."""
        rank = dist.get_rank(group)
        widths = {name: low.shape[1] for name, low in sorted(self.averages["low"].items())}
        agree(group, {"features of layers": str(widths)}, topic="calibration")
        for averages in self.averages.values():
            parts = gather_tensor(torch.cat([averages[name][rank] for name in widths]), group)
            for name, part in zip(widths, parts.split(list(widths.values()), dim=1), strict=True):
                averages[name][: self.ranks] = part
        for name in widths:
            self.samples[name] = gather_tensor(self.samples[name][rank], group)

    def resume(self, start: Calibration, model: str) -> None:
        """Continue from the averages of an earlier run for this model, or raise CalibrationError."""
        for what, earlier, now in (
            ("the model", start.model, model), ("a world of", start.world, self.ranks),
            ("a momentum of", start.momentum, self.momentum),
        ):  # fmt: skip
            if earlier != now:
                raise CalibrationError(f"start is a calibration for {what} {earlier}, this one is for {now}")
        for kind, by_layer in start.averages.items():
            for name, average in by_layer.items():
                self.averages[kind][name].copy_(average)
        self.count = self.before = start.count


_log = escape.logger("lowbit.tensor_parallel")
_SAMPLES, _TRIED = 4, 4  # rows of a held-out sequence; sequences for measuring the effect of coding on the outputs


@torch.no_grad()
def calibrate(
    model: nn.Module,
    sequences: Iterable[Tensor],
    *,
    ranks: int | None = None,
    k: int | None = None,
    gain: str = "token",
    bits: float | Literal["auto"] | None = "auto",
    inputs: Summable | Literal["auto"] | None = "auto",
    momentum: float = 0.99,
    text: str = "",
    start: Calibration | None = None,
    progress: Callable[[int], None] | None = None,
    plan: Plan | None = None,
) -> Calibration:
    """Measure ranges and means of partial sums by rank, layer and feature, and choose the format of each layer.

    As in the paper (arXiv 2411.07942), minimum and maximum of every sequence enter exponential moving averages, for
    each device, layer and feature; the features with the largest range aggregated over the devices are the outliers.
    Deviations: averages are corrected for their start (`Observer`); unless `gain` is "static", ranges are those around
    the mean, also a moving average, and each token has a gain; ranges of the sum over the ranks are recorded for the
    second step of two_shot. During calibration sums stay in the model's dtype.

    Up to 128 rows of each layer and rank, spread evenly over the sequences, determine where its codes should end. With
    a budget, the model runs over the first four sequences once for each layer, with only this layer's sum coded, and
    once more for each that may send its inputs; formats are chosen so that the errors of the model's outputs add up to
    the least. Meanwhile the logits of these sequences, in float32, and what each block returns stay in memory. The last
    eighth of the sequences, at least one if there are two, is held out: it only measures the errors of the formats,
    with which `Drift` compares.

    A whole model is run as on `ranks` tensor-parallel ranks (`emulate_tensor_parallel_`) and is whole again afterwards.
    On real tensor-parallel ranks all of them call this with the same sequences and get the same result: on two ranks
    bit-identical to the emulation, on more up to the last bits of uncoded sums. They read all `sequences` first, and
    compare them and all settings before the first forward pass.

    Args:
        model: Hugging Face model, whole or loaded with a `tp_plan`; or any module with a `plan` that takes token ids.
        sequences: token ids, int64, (length,) or (batch, length); every row counts as one sequence.
        ranks: number of ranks to calibrate for; None: those that the model is on.
        k: outlier features of each layer; None: E // 64.
        gain: "token": each token has a gain of 16 bits, which multiplies ranges around means. "static": the published
            format. Symmetric ranges alone define the codes, and nothing is computed per token at inference.
        bits: budget of bits per value over all layers, every bit counted. Layers have codes of 3, 4, 5, 6 or 8 bits.
            None: 4-bit codes everywhere (4.19 at E = 4096). "auto": 4.25, or what 4-bit codes take if that is more;
            with gain "static" None.
        inputs: format in which layers send their inputs instead of partial sums if that takes no more bits than 4-bit
            codes, as after attention, such as `GroupInt(bits=8, group=64, symmetric=True)`. Each rank then keeps these
            layers' whole weights and computes all their products. "auto": with a budget, codes of 4, 5, 6 or 8 bits in
            groups of 64 where these are the better use of bits; otherwise no layer. None: no layer.
        momentum: of the moving averages, from 0 to below 1: 0.99 averages over about 100 sequences.
        text: source of the sequences, recorded in the file.
        start: continue this calibration: its averages, count and momentum (which `momentum` must equal).
        progress: called with the number of sequences that are done.
        plan: overrides the model's own.

    Raises:
        ValueError: no sequences, NaN in the model, a layer that is always zero or not used, k not below E, a budget
            below what 3-bit codes take.
        CalibrationError: a `start` of another model, number of ranks or momentum.
        AgreementError: on real ranks, if sequences, models or settings differ; the same text on all.
    """
    layers = model_sums(model, plan)
    group = next(iter(layers.values())).group
    name = identity(model, layers)
    before = start.count if start else 0
    read = list(sequences)

    def prepare() -> _Prepared:
        prepared = _prepared(layers, _world(ranks, group), k, gain, bits, inputs, momentum)
        if start is not None:
            prepared.observer.resume(start, name)
        return prepared

    settings = {
        "text": text, "start": start.fingerprint() if start else None, "k": k, "gain": gain, "bits": bits,
        "inputs": inputs, "momentum": momentum, "model": name,
    }  # fmt: skip
    prepared = prepare() if group is None else _prepare_agreed(prepare, settings, read, group)
    observer = prepared.observer
    observed, held_out = _split(read)

    run, report = ObservedModel(model, layers, group, plan, observer.ranks), progress or (lambda count: None)

    def after(_: int) -> None:
        observer.commit()
        report(observer.count - before)

    run.show(observed, observer.see, after)
    if group is not None:
        observer.gather(group)
    if zeros := tables_of(observer.averages, observer.count, observer.momentum)[2]:
        _log.warning(
            "always zero in the calibration text: %s%s; such features get the smallest range of their layer", zeros[0],
            f", and features of {len(zeros) - 1} more layers" if len(zeros) > 1 else "",
        )  # fmt: skip
    ranges = Calibration(
        averages=observer.averages, count=observer.count, features={}, model=name, world=observer.ranks,
        dtype=dtype_of(layers), text="; ".join(filter(None, [start.text if start else "", text])),
        settings={"momentum": momentum, "gain": gain, "inputs": "auto" if inputs == "auto" else "given"},
    ).select(k=k)  # fmt: skip
    calibration = dataclasses.replace(ranges, curves=_curves(ranges, observer, group), inputs=prepared.sent)
    if prepared.budget is not None:
        tried = [row[None] for batch in observed for row in batch][:_TRIED]
        passes = len(layers) - len(prepared.sent) + len(prepared.offered)
        _log.info("measuring what each layer does to the outputs: %d passes over %d sequences", passes, len(tried))
        effects, offers = effects_of(run, calibration, prepared.offered, tried)
        calibration = dataclasses.replace(calibration, effects=effects, offers=offers)
    budget = prepared.budget
    if budget is not None and calibration.effects and not any(calibration.effects.values()):
        _log.warning("coding no layer's sum changes the model's outputs, so that a budget has nothing to choose by: "
                     "all layers send 4-bit codes")  # fmt: skip
        budget = None
    calibration = calibration.within(budget)
    errors = _held_out(calibration, run, held_out, observer.count - before, report)
    return dataclasses.replace(calibration, held_out=errors)


def _curves(calibration: Calibration, observer: Observer, group: dist.ProcessGroup | None) -> dict[str, Curve]:
    """Measure the errors of all layers' formats; on real ranks, use those of the first rank."""
    rows = {layer: samples.flatten(1, 2).float() for layer, samples in observer.samples.items()}
    curves = {layer: curve_of(calibration.codec(layer), x) for layer, x in rows.items()}
    if group is None:
        return curves
    # All ranks compute them from the same rows, but results may differ in the last bits between processors.
    return {
        layer: {int(width): (clip, error) for width, (clip, error) in curve.items()}
        for layer, curve in gather_json(curves, group)[0].items()
    }


def _held_out(
    calibration: Calibration,
    run: ObservedModel,
    batches: Sequence[Tensor],
    before: int,
    report: Callable[[int], None],
) -> dict[str, tuple[tuple[float, float], ...]]:
    errors: dict[str, dict[str, list[float]]] = {name: {} for name in calibration.features}
    done = before

    def look(layer: str, rank: int, x: Tensor) -> None:
        """Sample as many rows of each sequence as `Drift` does."""
        if rank < calibration.world:
            codec = calibration.codec(layer, rank)
            sampled = errors[layer].setdefault(str(rank), [])
            turns = range(len(sampled), len(sampled) + _SAMPLES)
            sequences = x.reshape(-1, *x.shape[-2:])
            found = [relative_error(codec, sample(rows, turn)) for rows in sequences for turn in turns]
            sampled.extend(torch.stack(found).tolist())

    def after(count: int) -> None:
        nonlocal done
        done += count
        report(done)

    run.show(batches, look, after)
    found: list[Any] = [errors] if run.group is None else gather_json(errors, run.group)
    result: dict[str, tuple[tuple[float, float], ...]] = {}
    for name in errors if batches else ():
        by_rank = {rank: values for one in found for rank, values in one[name].items()}
        ordered = [by_rank[str(rank)] for rank in range(calibration.world)]
        result[name] = tuple((statistics.fmean(values), statistics.pstdev(values)) for values in ordered)
    return result


def _split(sequences: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return batches to observe and batches to hold out: the last eighth, or none if there is only one sequence."""
    batches = []
    for batch in sequences:
        if batch.dim() not in (1, 2) or batch.is_floating_point() or not batch.numel():
            raise ValueError(
                f"sequences has {batch.dtype} {tuple(batch.shape)}; allowed: token ids, (length,) or (batch, length)"
            )
        batches.append(batch if batch.dim() == 2 else batch[None])
    count = sum(map(len, batches))
    if not count:
        raise ValueError("sequences is empty; allowed: at least one sequence")
    left = count - (max(1, count // 8) if count > 1 else 0)
    observed, held_out = [], []
    for batch in batches:
        observed.append(batch[:left])
        held_out.append(batch[left:])
        left = max(0, left - len(batch))
    return [batch for batch in observed if len(batch)], [batch for batch in held_out if len(batch)]


def _sent(inputs: Summable | None, layers: Mapping[str, ModelSum], ranks: int) -> dict[str, tuple[int, int, float]]:
    """Return the numbers of the format of inputs and the bits of a row, by layer that sends them."""
    if inputs is None:
        return {}
    bits, group = input_numbers(inputs)
    found = layers_with_inputs(layers, ranks, inputs, 4 + 12 / SHARE)
    if not found:
        _log.warning("no layer sends its inputs in %s: they take more bits than partial sums do", inputs)
    return {layer: (bits, group, row) for layer, row in found.items()}


def _offered(layers: Mapping[str, ModelSum], ranks: int) -> dict[str, dict[int, float]]:
    """Return the bits of a row of inputs by the bits of their codes, by layer that may send them."""
    offered: dict[str, dict[int, float]] = {}
    for bits in INPUT_WIDTHS:
        found = layers_with_inputs(layers, ranks, input_format(bits, INPUT_GROUP), 4 + 12 / SHARE)
        for layer, row in found.items():
            offered.setdefault(layer, {})[bits] = row
    return offered


def _world(ranks: int | None, group: dist.ProcessGroup | None) -> int:
    world = ranks if group is None else dist.get_world_size(group)
    check_int("ranks", world, 1, 1 << 16)
    assert world is not None
    if ranks not in (None, world):
        raise ValueError(f"ranks is {ranks} and the model is on {world}; allowed: {world}, or None")
    return world


@dataclass(frozen=True)
class _Prepared:
    """What `calibrate` needs to know before the first forward pass.

    Args:
        observer: of the partial sums. budget: bits per value; None: 4-bit codes.
        sent: bits, group and bits per row of the layers that send their inputs in a given format.
        offered: bits per row by bits of the codes, of the layers that may send them.
    """

    observer: Observer
    budget: float | None
    sent: dict[str, tuple[int, int, float]]
    offered: dict[str, dict[int, float]]


def _prepared(
    layers: Mapping[str, ModelSum], world: int, k: int | None, gain: str, bits: Any, inputs: Any, momentum: float
) -> _Prepared:
    """Check the arguments of `calibrate`, as it describes."""
    check_choice("gain", gain, GAINS)
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"momentum is {shown(momentum)}; allowed: a number from 0 to below 1")
    widths = {layer: summed.width for layer, summed in layers.items()}
    counts = {layer: outlier_count(layer, k, width) for layer, width in widths.items()}
    budget = default_budget(widths, counts, gain) if bits == "auto" else bits
    sent = {} if inputs == "auto" else _sent(inputs, layers, world)
    offered = _offered(layers, world) if inputs == "auto" and budget is not None else {}
    check_budget(budget, widths, counts, {layer: row for layer, (_, _, row) in sent.items()}, gain)
    observer = Observer(widths, ranks=world, momentum=momentum)
    return _Prepared(observer=observer, budget=budget, sent=sent, offered=offered)


def _prepare_agreed(
    prepare: Callable[[], _Prepared],
    settings: Mapping[str, object],
    sequences: Iterable[Tensor],
    group: dist.ProcessGroup,
) -> _Prepared:
    """Call `prepare` on all ranks and compare their settings and text; on a difference, raise the same on all."""
    error: Exception | None = None
    stated = {name: str(value) for name, value in settings.items()}
    try:
        prepared, digest = prepare(), hashlib.sha256()
        for batch in sequences:
            digest.update(f"/{batch.dtype}/{tuple(batch.shape)}/".encode())
            digest.update(batch.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        stated |= {"sequences": digest.hexdigest()[:16], "ready": "yes"}
    except Exception as failure:  # of any kind: the other ranks wait for this one's statement
        error, stated["ready"] = failure, f"no ({failure})"
    agree(group, stated, topic="calibration")
    if error is not None:
        raise error
    return prepared
