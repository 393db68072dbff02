"""`Calibration`: ranges, means and formats of a model's partial sums, in memory and as a file."""

import dataclasses
import hashlib
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit import files
from lowbit.codecs import FeatureInt
from lowbit.codecs.base import Summable
from lowbit.codecs.checks import check_choice, check_int
from lowbit.codecs.feature_int.codec import CLIPS, FLOOR, GAINS
from lowbit.codecs.feature_int.reference import FEWEST, MOST
from lowbit.escape import Printable, shown
from lowbit.tensor_parallel.identity import identity
from lowbit.tensor_parallel.inputs import INPUT_GROUP, input_format
from lowbit.tensor_parallel.sums import ModelSum, model_sums
from lowbit.wire.messages import gather_json

_FORMAT = "lowbit-calibration"
AVERAGES = ("low", "high", "mean")
SHARE = 64
"""By default one feature in this many is sent as bfloat16: with 4-bit codes (16 + 4 * 63) / 64 = 4.1875 bits per value,
and 16 for each row."""
WIDTHS = (3, 4, 5, 6, 8)
"""Bits of codes among which a budget chooses."""
BUDGET = 4.25
"""Bits per value that layers share by default."""
GRID = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Candidate clips: shares of a token's largest magnitude at which codes may end."""

Curve = dict[int, tuple[float, float]]
"""By bits of codes: the best clip, and the squared error of the sum over the ranks, averaged over rows."""
Features = dict[str, tuple[int, ...]]
"""Outlier features by layer, ascending."""
Offers = Mapping[int, tuple[float, float]]
"""By bits of the codes of a layer's inputs: bits per row, and effect on the model's outputs."""


_Format = TypeVar("_Format")


class CalibrationError(Printable, ValueError):
    """A calibration cannot be used: it is missing, truncated, or made for another model or another setup."""


Tensors = Mapping[str, Mapping[str, Tensor]]
"""By kind ("low", "high", ...), then by layer."""
_DIGEST = "sha256"
_TABLES = ("settings", "features", "bits", "effects", "inputs", "offers", "curves", "held_out")  # fields, as JSON


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Calibration:
    """Ranges, means and formats of all sums of one model on one number of ranks.

    Args:
        averages: moving averages of the minimum ("low"), the maximum ("high") and the mean ("mean") of a sequence, by
            layer, float32 (world + 1, E); the last row is that of the ranks' sum. Not corrected for their start at
            zero, so that a calibration can be continued.
        count: number of sequences from which they were made.
        features: by layer, ascending: those sent as bfloat16.
        bits: bits of codes by layer; 4 for layers that are not named.
        effects: by layer: effect of 4-bit codes on the model's outputs; measured only for a budget of bits.
        inputs: by layer that sends its inputs instead of its partial sums: bits and group of their format
            (`inputs.input_format`), and its bits per row.
        offers: by layer that may send its inputs, if a budget decides (`Offers`).
        curves: by layer: the best clip of codes and the error, for each width (`Curve`).
        held_out: by layer, for each rank: mean and standard deviation of the relative error of held-out rows.
        model: its `identity`. dtype: of its partial sums.
        world: number of tensor-parallel ranks.
        text: source of the sequences.
        settings: momentum, k, gain, and budget of bits.

    Attributes:
        ranges: by layer, float32 (world, E): the largest distance of the corrected averages of the extremes from that
            of the mean, or their magnitude if they never differ from it. A feature that was always zero on a rank gets
            the smallest range of its layer; none is below 1/64 of the root mean square of its rank's. With gain
            "static", as published: the magnitude of the extremes, so that ranges are symmetric.
        total: the same for the sum over the ranks, (E,).
        means: by layer, float32 (world + 1, E); not used by formats with gain "static".

    Raises:
        ValueError: a layer whose partial sums were always zero.
    """

    averages: Tensors
    count: int
    features: Features
    model: str
    world: int
    dtype: str = "float32"
    bits: Mapping[str, int] = field(default_factory=dict)
    effects: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)
    offers: Mapping[str, Offers] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    held_out: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranges: dict[str, Tensor] = field(init=False)
    total: dict[str, Tensor] = field(init=False)
    means: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        check_choice("gain", self.gain, GAINS)
        ranges, means, _ = tables_of(self.averages, self.count, self.momentum, self.gain)
        object.__setattr__(self, "ranges", {name: r[:-1] for name, r in ranges.items()})
        object.__setattr__(self, "total", {name: r[-1] for name, r in ranges.items()})
        object.__setattr__(self, "means", means)

    def __repr__(self) -> str:
        return (
            f"Calibration({len(self.features)} layers, {self.world} ranks, {self.count} sequences, {self._fingerprint})"
        )

    @property
    def momentum(self) -> float:
        """Momentum of the moving averages."""
        return float(self.settings["momentum"])

    @property
    def gain(self) -> Any:
        """Gain of all layers' formats, in the spelling of `FeatureInt`."""
        return self.settings.get("gain", "token")

    def codec(self, layer: str, rank: int = 0) -> FeatureInt:
        """Return the format of a layer for this rank's partial sums; its `part(r)` is that of rank r.

        Raises:
            CalibrationError: a layer that was not calibrated.
        """
        if layer not in self.features:
            raise CalibrationError(f"layer is {shown(layer)}; calibrated: {', '.join(self.features)}")
        return self._codecs[layer].part(rank)

    @cached_property
    def _codecs(self) -> dict[str, FeatureInt]:
        artifact = self.fingerprint()
        codecs = {}
        for name, features in self.features.items():
            bits, means = self.bits.get(name, 4), self.means[name] if self.gain == "token" else None
            codecs[name] = FeatureInt(
                bits=bits, gain=self.gain, clip=self.curves[name][bits][0] if name in self.curves else None,
                ranges=self.ranges[name], offsets=None if means is None else means[:-1], total=self.total[name],
                total_offset=None if means is None else means[-1], features=features, artifact=artifact,
                held_out=self.held_out.get(name, ()),
            )  # fmt: skip
        return codecs

    def inputs_codecs(self) -> dict[str, Summable]:
        """Return the formats of inputs, by layer that sends inputs when its partial sums would be coded."""
        return {name: input_format(bits, group) for name, (bits, group, _) in self.inputs.items()}

    def select(self, *, k: int | None = None, gain: str | None = None) -> "Calibration":
        """Return the same averages and bits with features chosen anew, as `calibrate` does; k=0: none in bfloat16.

        With another `gain`, ranges are computed differently, and everything that was chosen for the old ones is
        dropped: codes have 4 bits, no layer sends its inputs, and there are no held-out errors.

        Raises:
            ValueError: k is not smaller than the features of a layer, or an unknown gain.
        """
        if gain not in (None, self.gain):
            settings = {**self.settings, "gain": gain, "bits": None}
            chosen = {key: {} for key in _TABLES if key != "settings"}
            return dataclasses.replace(self, **chosen, settings=settings).select(k=k)
        return dataclasses.replace(self, features=select(self.ranges, k), settings={**self.settings, "k": k})

    def within(self, bits: float | None) -> "Calibration":
        """Return the same ranges and features with formats chosen anew for a budget of bits, as `calibrate` does.

        None: 4-bit codes everywhere. Layers that a budget let send their inputs then send sums.

        Raises:
            ValueError: a budget below what the narrowest codes take, or effects that were not measured.
        """
        widths = {name: r.shape[1] for name, r in self.ranges.items()}
        counts = {name: len(features) for name, features in self.features.items()}
        inputs = {} if self.offers else dict(self.inputs)
        fixed = {name: row for name, (_, _, row) in inputs.items()}
        check_budget(bits, widths, counts, fixed, self.gain)
        chosen = dict.fromkeys(counts, 4)
        if bits is not None:
            if missing := [name for name in counts if name not in fixed and name not in self.effects]:
                raise ValueError(
                    f"effects of {missing[0]} were not measured; allowed: a calibration made for a budget of bits"
                )
            choices: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
            for name in (name for name in counts if name not in fixed):
                costs, curve = _costs(widths[name], counts[name], self.gain), self.curves[name]
                unit = self.effects[name] / (curve[4][1] or 1.0)
                choices[name] = {("sums", width): (costs[width], unit * curve[width][1]) for width in WIDTHS}
                choices[name] |= {("inputs", width): offer for width, offer in self.offers.get(name, {}).items()}
            for name, (kind, width) in spend(choices, bits * sum(widths.values()) - sum(fixed.values())).items():
                if kind == "sums":
                    chosen[name] = width
                else:
                    inputs[name] = (width, INPUT_GROUP, self.offers[name][width][0])
        held_out = {  # of other codes in proportion to the errors of the sums
            name: tuple((mean * scale, spread * scale) for mean, spread in by_rank)
            for name, by_rank in self.held_out.items()
            for curve in [self.curves[name]]
            for scale in [math.sqrt(curve[chosen[name]][1] / (curve[self.bits.get(name, 4)][1] or 1.0))]
        }
        settings = {**self.settings, "bits": bits}
        return dataclasses.replace(self, bits=chosen, inputs=inputs, held_out=held_out, settings=settings)

    def summed(self, bits: float | Literal["same"] | None = "same") -> "Calibration":
        """Return a calibration whose layers all send sums, for engines that code nothing else.

        Args:
            bits: as in `within`; "same": the same budget.

        Raises:
            ValueError: as `within`; with a budget, also a layer whose format of inputs was given, as the effect of its
                sum was not measured.
        """
        budget = self.settings.get("bits") if bits == "same" else bits
        return dataclasses.replace(self, inputs={}, offers={}).within(budget)

    def bits_per_value(self, *layers: str) -> float:
        """Bits per value of these layers, or of all, for many rows: gains, outliers and codes, or inputs."""
        names = layers or tuple(self.features)
        widths = {name: self.ranges[name].shape[1] for name in names}
        costs = (
            self.inputs[name][2]
            if name in self.inputs
            else _costs(widths[name], len(self.features[name]), self.gain)[self.bits.get(name, 4)]
            for name in names
        )
        return sum(costs) / sum(widths.values())

    def fingerprint(self) -> str:
        """Return a digest of all contents, 16 hexadecimal digits, which ranks compare before the first token."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return digest_of(join(self.averages), self._metadata())[:16]

    def check(
        self, model: nn.Module, world: int, layers: Mapping[str, ModelSum] | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Raise unless it was made for this model on `world` ranks; on real ranks, all of them must call it.

        Args:
            layers: the sums by name; absent: found in the model.
            stages: ranks that hold the other layers of a model that is cut into stages.

        Raises:
            CalibrationError: another number of ranks, other layers, another model or data type. (float32 and bfloat16
                weights of the same values count as the same.)
        """
        if world != self.world:
            raise CalibrationError(
                f"the calibration is for {self.world} ranks, this is a group of {world}; "
                "allowed: a calibration for as many (lowbit calibrate --ranks)"
            )
        layers = model_sums(model) if layers is None else layers
        known = set(layers)
        if stages is not None:
            known = {name for names in gather_json(list(layers), stages) for name in names}
        if different := sorted(known ^ set(self.features)):
            raise CalibrationError(
                f"the calibration has {len(self.features)} layers, the model {len(known)}; "
                f"in one of them only: {', '.join(different[:4])}{', ...' if len(different) > 4 else ''}"
            )
        name = identity(model, layers, stages)
        if name != self.model:
            here = dtype_of(layers)
            ours, theirs = ("", "") if here == self.dtype else (f" in {self.dtype}", f" in {here}")
            raise CalibrationError(f"the calibration is for the model {self.model}{ours}, this is {name}{theirs}")

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically: a reader finds the old one or the whole new one."""
        from safetensors.torch import save

        path, metadata = Path(path), self._metadata()
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: t.contiguous() for name, t in join(self.averages).items()}
        data = save(whole, {**metadata, _DIGEST: digest_of(whole, metadata)})
        files.write(path, data)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read a file that `save` wrote.

        Raises:
            CalibrationError: no such file, cut short, another format, made for another version of the codec,
                incomplete metadata.
        """
        averages, metadata = _read(path)
        version = metadata.get("codec_version")
        if version != str(FeatureInt.payload_version):
            raise CalibrationError(
                f"{path} is for version {version} of {metadata.get('codec')}, this lowbit has version "
                f"{FeatureInt.payload_version} of FeatureInt: calibrate again"
            )
        try:
            # Files of before inputs were chosen by a budget have no offers.
            tables = {name: json.loads((metadata | {"offers": metadata.get("offers", "{}")})[name]) for name in _TABLES}
            tables["features"] = {name: tuple(k) for name, k in tables["features"].items()}
            tables["inputs"] = {
                name: (int(bits), int(group), float(row)) for name, (bits, group, row) in tables["inputs"].items()
            }
            for kind in ("curves", "offers"):
                tables[kind] = {
                    name: {int(bits): (one, other) for bits, (one, other) in by_bits.items()}
                    for name, by_bits in tables[kind].items()
                }
            tables["held_out"] = {
                name: tuple((mean, spread) for mean, spread in ranks) for name, ranks in tables["held_out"].items()
            }
            return cls(
                averages=averages, count=int(metadata["count"]), world=int(metadata["world"]),
                model=metadata["model"], dtype=metadata["dtype"], text=metadata["text"], **tables,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CalibrationError(
                f"{path} is not a file of `lowbit calibrate`: {type(error).__name__}: {error}"
            ) from error

    def _metadata(self) -> dict[str, str]:
        return {
            "format": _FORMAT, "codec": "FeatureInt", "codec_version": str(FeatureInt.payload_version),
            "model": self.model, "dtype": self.dtype, "world": str(self.world), "count": str(self.count),
            "text": self.text,
            **{name: json.dumps(dict(getattr(self, name)), sort_keys=True) for name in _TABLES},
        }  # fmt: skip


def join(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a file: "layer.kind"."""
    return {f"{name}.{kind}": t for kind, by_layer in tensors.items() for name, t in by_layer.items()}


def digest_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the digest of all contents of a file, which is in its metadata."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"/{name} {t.dtype} {tuple(t.shape)}/".encode())
        digest.update(t.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Return tensors and metadata; CalibrationError unless the file is a whole calibration."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}; allowed: a file that `lowbit calibrate` wrote") from error
    try:
        tensors = load(data)  # checks that the file is as long as its header says
    except (SafetensorError, KeyError) as error:
        raise CalibrationError(
            f"{path} is cut short, or not a safetensors file: it has {len(data)} bytes; {error}"
        ) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != _FORMAT:
        raise CalibrationError(f"{path} has the format {metadata.get('format')!r}; expected {_FORMAT!r}")
    if metadata.pop(_DIGEST, None) != digest_of(tensors, metadata):
        raise CalibrationError(f"{path} is damaged: its digest differs from that of its contents; calibrate again")
    found = {
        kind: {name.removesuffix(f".{kind}"): t for name, t in tensors.items() if name.endswith(f".{kind}")}
        for kind in AVERAGES
    }
    return found, metadata


def dtype_of(sums: Mapping[str, ModelSum]) -> str:
    """Return the data type of a model's partial sums, or all of them."""
    return ", ".join(sorted({str(summed.dtype).removeprefix("torch.") for summed in sums.values()}))


def tables_of(
    averages: Tensors, count: int, momentum: float, gain: str = "token"
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Correct moving averages for their start at zero; return ranges and means by layer, and names of zeros.

    Both are (world + 1, E), and ranges as `Calibration` has them. ValueError for a layer whose values are all zero.
    """
    weight = 1 - momentum**count
    ranges: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    zeros: list[str] = []
    for name in averages["low"]:
        low, high, mean = (averages[kind][name] / weight for kind in AVERAGES)
        magnitude, spread = torch.maximum(low.abs(), high.abs()), torch.maximum(high - mean, mean - low)
        empty = magnitude == 0
        if bool(empty.all()):
            raise ValueError(
                f"features 0 to {magnitude.shape[1] - 1} of {name} were zero in all {count} sequences; "
                "allowed: a layer whose output is not always zero"
            )
        magnitude = torch.where((spread > 0) & (gain == "token"), spread, magnitude)
        if bool(empty.any()):
            rank, feature = (int(i) for i in empty.nonzero()[0])
            where = "the sum" if rank == len(magnitude) - 1 else f"rank {rank}"
            zeros.append(f"feature {feature} on {where} of {name}")
            magnitude = magnitude.masked_fill(empty, float(magnitude[~empty].min()))
        # A feature that hardly varied here may vary more later: it must not set the gain of all others then.
        least = magnitude.square().mean(1, keepdim=True).sqrt() * (FLOOR if gain == "token" else 0.0)
        ranges[name], means[name] = torch.maximum(magnitude, least), mean
    return ranges, means, zeros


def select(ranges: Mapping[str, Tensor], k: int | None) -> Features:
    """Return the k features of each layer with the largest range over all ranks; None: E // 64.

    The range of a feature is aggregated as the sum of its squares over the ranks, because the expected squared error of
    uniform 4-bit codes is range^2 / (7^2 12) on each rank, and the errors of the ranks are independent. (The paper,
    arXiv 2411.07942, selects by "the largest aggregated range" without a formula.)
    """
    counts = {name: outlier_count(name, k, by_rank.shape[1]) for name, by_rank in ranges.items()}
    gains = {name: by_rank.double().square().sum(0) for name, by_rank in ranges.items()}
    return {
        name: tuple(sorted(gain.argsort(descending=True, stable=True)[: counts[name]].tolist()))
        for name, gain in gains.items()
    }


def check_budget(
    bits: object, widths: Mapping[str, int], outliers: Mapping[str, int], fixed: Mapping[str, float], gain: str
) -> None:
    """Raise unless a budget of bits per value is None, or suffices for the narrowest codes of these layers.

    `fixed`: bits per row of the layers that send their inputs.
    """
    if bits is None:
        return
    if isinstance(bits, bool) or not isinstance(bits, int | float):
        raise TypeError(f"bits is {shown(bits)}; allowed: 'auto', a number of bits per value, or None")
    if bits > 16:
        raise ValueError(f"bits is {bits:g}; allowed: at most 16")
    least = sum(fixed.get(name, _costs(width, outliers[name], gain)[WIDTHS[0]]) for name, width in widths.items())
    if bits * sum(widths.values()) < least:
        raise ValueError(
            f"bits is {bits:g}; allowed: at least {least / sum(widths.values()):.4g}, which codes of {WIDTHS[0]} bits "
            "take, or None: 4-bit codes"
        )


def default_budget(widths: Mapping[str, int], outliers: Mapping[str, int], gain: str) -> float | None:
    """Return the budget of bits per value that `calibrate` has by default."""
    if gain == "static":
        return None
    uniform = sum(_costs(width, outliers[name], gain)[4] for name, width in widths.items()) / sum(widths.values())
    return max(BUDGET, uniform)


def _costs(width: int, outliers: int, gain: str) -> dict[int, int]:
    """Bits of a row of a payload, by the bits of its codes."""
    return {bits: FeatureInt.row_bits(bits, width, outliers, gain) for bits in range(FEWEST, MOST + 1)}


def outlier_count(name: str, k: int | None, width: int) -> int:
    """Return k, or the default for a layer of this width; raise ValueError unless it is smaller than the width."""
    if k is None:
        return width // SHARE
    check_int("k", k, 0, 1 << 30)
    if k >= width:
        raise ValueError(f"k is {k}; allowed: 0 to {width - 1}, fewer than the features of {name}")
    return k


def curve_of(codec: FeatureInt, rows: Tensor) -> Curve:
    """Measure a layer's error on (ranks, rows, E) for each width of codes, with the clip for which it is least."""
    exact, curve = rows.double().sum(0), Curve()

    @cache
    def error(bits: int, i: int) -> float:
        each = codec.like(bits=bits, clip=GRID[i])
        payloads = [each.part(rank).encode(part) for rank, part in enumerate(rows)]
        total = each.sum(payloads, out=torch.empty(exact.shape, dtype=torch.float32))
        return float((total - exact).square().sum(1).mean())

    for bits in WIDTHS:
        # Descend from the usual clip: the error has one minimum over the grid. Static ranges are not clipped.
        at = GRID.index(CLIPS[bits] if codec.gain == "token" else 1.0)
        for step in (-1, 1) if codec.gain == "token" else ():
            while 0 <= at + step < len(GRID) and error(bits, at + step) < error(bits, at):
                at += step
        curve[bits] = GRID[at], error(bits, at)
    return curve


def spend(choices: Mapping[str, Mapping[_Format, tuple[float, float]]], budget: float) -> dict[str, _Format]:
    """Return the format of each layer within a budget for which the effects on the model's outputs add up to the least.

    Args:
        choices: by layer and format: bits per row, and effect. budget: bits per row of all layers together, enough for
            the cheapest formats.
    """
    chosen = {name: min(formats, key=lambda f, own=formats: own[f]) for name, formats in choices.items()}
    spent = sum(choices[name][one][0] for name, one in chosen.items())
    while True:
        offers = [
            ((effect - least) / max(more - cost, 1e-9), name, other)
            for name, one in chosen.items()
            for cost, effect in [choices[name][one]]
            for other, (more, least) in choices[name].items()
            if least < effect and spent + more - cost <= budget
        ]
        if not offers:
            return chosen
        _, name, other = max(offers, key=operator.itemgetter(0))
        spent += choices[name][other][0] - choices[name][chosen[name]][0]
        chosen[name] = other
