"""`Calibration`: ranges and outlier features of a model's partial sums, in memory and as a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.codecs import FeatureInt
from lowbit.codecs.checks import check_choice, check_int
from lowbit.tensor_parallel import files
from lowbit.tensor_parallel.files import CalibrationError, join
from lowbit.tensor_parallel.identity import identity
from lowbit.tensor_parallel.sums import ModelSum, model_sums

_FORMAT = "lowbit-calibration"
LAYOUTS = ("fixed", "distributed")
SHARE = 64
"""By default one feature in this many is sent as bfloat16: (16 + 4 * 63) / 64 = 4.1875 bits per value."""
_MOST = 4  # "distributed" gives a layer at most a quarter of its features

Features = dict[str, tuple[int, ...]]
"""Outlier features by layer, ascending."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Ranges and outlier features of all row-wise layers of one model on one number of ranks.

    Args:
        lows: moving averages of the minimum by layer, float32 (world + 1, E); the last row is that of the ranks' sum.
            Not corrected for their start at zero, so that a calibration can go on.
        highs: moving averages of the maximum, likewise.
        count: sequences that they were made from.
        features: by layer, ascending: those sent as bfloat16.
        model: its `identity`.
        world: tensor-parallel ranks.
        text: where the sequences came from.
        settings: momentum, k and layout of the features.

    Attributes:
        ranges: by layer, float32 (world, E): the larger magnitude of the corrected averages. A feature that was always
            zero on a rank gets the smallest range of its layer that is not zero.
        total: the same of the sum over the ranks, (E,).

    Raises:
        ValueError: a layer whose partial sums were always zero.
    """

    lows: Mapping[str, Tensor]
    highs: Mapping[str, Tensor]
    count: int
    features: Features
    model: str
    world: int
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranges: dict[str, Tensor] = field(init=False)
    total: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        magnitudes, _ = magnitudes_of(self.lows, self.highs, self.count, self.momentum)
        object.__setattr__(self, "ranges", {name: m[:-1] for name, m in magnitudes.items()})
        object.__setattr__(self, "total", {name: m[-1] for name, m in magnitudes.items()})

    @property
    def momentum(self) -> float:
        """Of the moving averages."""
        return float(self.settings["momentum"])

    def codec(self, layer: str, rank: int = 0) -> FeatureInt:
        """Return the format of a layer for this rank's partial sums; its `part(r)` is for another rank's.

        Raises:
            CalibrationError: a layer that was not calibrated.
        """
        if layer not in self.features:
            raise CalibrationError(f"layer is {layer!r}; calibrated: {', '.join(self.features)}")
        return self._codecs[layer].part(rank)

    @cached_property
    def _codecs(self) -> dict[str, FeatureInt]:
        artifact = self.fingerprint()
        return {
            name: FeatureInt(ranges=self.ranges[name], total=self.total[name], features=features, artifact=artifact)
            for name, features in self.features.items()
        }

    def select(self, *, k: int | None = None, features: str = "fixed") -> Calibration:
        """Return the same ranges with features chosen anew, as `calibrate` does; k=0: plain INT4 without outliers.

        Raises:
            ValueError: k is not smaller than the features of a layer.
        """
        selected = select(self.ranges, self.total, k=k, layout=features)
        settings = {**self.settings, "k": k, "features": features}
        return dataclasses.replace(self, features=selected, settings=settings)

    def bits_per_value(self, *layers: str) -> float:
        """Bits per value of these layers, or of all, of many rows: gains, outliers and codes."""
        codecs = [self._codecs[name] for name in layers or self.features]
        rows = 1 << 20  # the gaps between a payload's sections do not count
        return sum(8 * c.format_nbytes((rows, c.grain)) for c in codecs) / (rows * sum(c.grain for c in codecs))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of all contents, which ranks compare before the first token."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self._metadata(), sort_keys=True).encode())
        for name, tensor in sorted(join(self.lows, self.highs).items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, model: nn.Module, world: int, layers: Mapping[str, ModelSum] | None = None) -> None:
        """Raise unless it was made for this model on `world` ranks; on real ranks, all of them must call it.

        Args:
            layers: the sums by name; absent: found in the model.

        Raises:
            CalibrationError: another number of ranks, other layers, another model.
        """
        if world != self.world:
            raise CalibrationError(
                f"the calibration is for {self.world} ranks, this is a group of {world}; "
                "allowed: a calibration for as many (lowbit calibrate --ranks)"
            )
        layers = model_sums(model) if layers is None else layers
        if different := sorted(set(layers) ^ set(self.features)):
            raise CalibrationError(
                f"the calibration has {len(self.features)} layers, the model {len(layers)}; "
                f"in one of them only: {', '.join(different[:4])}{', ...' if len(different) > 4 else ''}"
            )
        name = identity(model, layers)
        if name != self.model:
            raise CalibrationError(f"the calibration is for the model {self.model}, this is {name}")

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, atomically: a reader finds the old one or the whole new one."""
        files.write(path, self.lows, self.highs, self._metadata())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file that `save` wrote.

        Raises:
            CalibrationError: no such file, cut short, another format, made for another version of the codec,
                incomplete metadata.
        """
        lows, highs, metadata = files.read(path, _FORMAT)
        version = metadata.get("codec_version")
        if version != str(FeatureInt.payload_version):
            raise CalibrationError(
                f"{path} is for version {version} of {metadata.get('codec')}, this lowbit has version "
                f"{FeatureInt.payload_version} of FeatureInt: calibrate again"
            )
        try:
            return cls(
                lows=lows, highs=highs, count=int(metadata["count"]),
                features={name: tuple(k) for name, k in json.loads(metadata["features"]).items()},
                model=metadata["model"], world=int(metadata["world"]), text=metadata["text"],
                settings=json.loads(metadata["settings"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(
                f"{path} is not as `lowbit calibrate` writes it: {type(error).__name__}: {error}"
            ) from error

    def _metadata(self) -> dict[str, str]:
        return {
            "format": _FORMAT, "codec": "FeatureInt", "codec_version": str(FeatureInt.payload_version),
            "model": self.model, "world": str(self.world), "count": str(self.count), "text": self.text,
            "settings": json.dumps(dict(self.settings), sort_keys=True),
            "features": json.dumps(self.features, sort_keys=True),
        }  # fmt: skip


def magnitudes_of(
    lows: Mapping[str, Tensor], highs: Mapping[str, Tensor], count: int, momentum: float
) -> tuple[dict[str, Tensor], list[str]]:
    """Correct moving averages for their start at zero; return magnitudes by layer, and names of zeros.

    A magnitude (world + 1, E) is the larger one of minimum and maximum; zeros get the smallest of their layer.

    Raises:
        ValueError: a layer whose values are all zero.
    """
    weight = 1 - momentum**count
    magnitudes: dict[str, Tensor] = {}
    zeros: list[str] = []
    for name in lows:
        magnitude = torch.maximum((lows[name] / weight).abs(), (highs[name] / weight).abs())
        empty = magnitude == 0
        if bool(empty.all()):
            raise ValueError(
                f"features 0 to {magnitude.shape[1] - 1} of {name} were zero in all {count} sequences; "
                "allowed: a layer whose output is not always zero"
            )
        if bool(empty.any()):
            rank, feature = (int(i) for i in empty.nonzero()[0])
            where = "the sum" if rank == len(magnitude) - 1 else f"rank {rank}"
            zeros.append(f"feature {feature} on {where} of {name}")
            magnitude = magnitude.masked_fill(empty, float(magnitude[~empty].min()))
        magnitudes[name] = magnitude
    return magnitudes, zeros


def select(
    ranges: Mapping[str, Tensor], totals: Mapping[str, Tensor], *, k: int | None = None, layout: str = "fixed"
) -> Features:
    """Return the features of each layer with the largest range over all ranks.

    The range of a feature is aggregated as the sum of its squares over the ranks, because the expected squared error of
    uniform 4-bit codes is range^2 / (7^2 12) on each rank, and the errors of the ranks are independent. (The paper,
    arXiv 2411.07942, selects by "the largest aggregated range" without a formula.)

    Args:
        ranges: by layer, (ranks, E). totals: by layer, (E,), of the sum over the ranks.
        k: features of each layer; None: E // 64.
        layout: "fixed": k for each layer. "distributed": the same number in all, hence the same bits, but chosen over
            all layers by the expected error that each takes away, relative to the layer's sum (the sum of `totals`
            squared); at most E // 4 of a layer.

    Raises:
        ValueError: k is not smaller than the features of a layer.
    """
    check_choice("features", layout, LAYOUTS)
    counts = {name: outlier_count(name, k, by_rank.shape[1]) for name, by_rank in ranges.items()}
    gains = {name: by_rank.double().square().sum(0) for name, by_rank in ranges.items()}
    if layout == "distributed":
        relative = {name: gains[name] / totals[name].double().square().sum() for name in gains}
        counts = _distribute(relative, sum(counts.values()))
    return {
        name: tuple(sorted(gain.argsort(descending=True, stable=True)[: counts[name]].tolist()))
        for name, gain in gains.items()
    }


def outlier_count(name: str, k: int | None, width: int) -> int:
    """Return k, or the default for a layer of this width; raise ValueError unless it is smaller than the width."""
    if k is None:
        return width // SHARE
    check_int("k", k, 0, 1 << 30)
    if k >= width:
        raise ValueError(f"k is {k}; allowed: 0 to {width - 1}, fewer than the features of {name}")
    return k


def _distribute(gains: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """Return how many of the `count` largest gains each layer has."""
    names = list(gains)
    best = {name: gain.sort(descending=True).values[: max(1, len(gain) // _MOST)] for name, gain in gains.items()}
    owners = torch.cat([torch.full((len(best[name]),), i) for i, name in enumerate(names)])
    order = torch.cat([best[name] for name in names]).argsort(descending=True, stable=True)
    taken = torch.bincount(owners[order[:count]], minlength=len(names))
    return dict(zip(names, taken.tolist(), strict=True))
