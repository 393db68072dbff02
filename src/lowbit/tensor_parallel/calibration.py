"""`Calibration`: what a calibrated model's partial sums look like, in memory and as a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.codecs import FeatureInt4
from lowbit.tensor_parallel import artifact
from lowbit.tensor_parallel.artifact import CalibrationError
from lowbit.tensor_parallel.identity import identity
from lowbit.tensor_parallel.observe import corrected, join, split
from lowbit.tensor_parallel.plan import boundaries
from lowbit.tensor_parallel.select import Features, select

_FORMAT = "lowbit-calibration"


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Ranges and outlier features of every boundary of one model on one number of ranks.

    Args:
        lows, highs: moving averages of minimum and maximum by boundary, float32 (world + 1, E), the last row of the sum
            over the ranks; not corrected for their start at zero, so that a calibration can go on.
        count: sequences that they were made from. features: by boundary, ascending: what travels in bfloat16.
        model: what `identity` tells of the model. world: tensor-parallel ranks.
        text: where the sequences came from. settings: momentum, k and layout of the features.

    Attributes:
        ranges: by boundary, float32 (world, E): the larger magnitude of the corrected averages. A feature that was
            always zero on a rank gets the smallest range of its boundary that is not zero.
        total: likewise of the sum over the ranks, (E,).

    Raises:
        ValueError: a boundary that was always zero.
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
    _codecs: dict[str, FeatureInt4] = field(init=False, default_factory=dict, repr=False)
    _made: list[str] = field(init=False, default_factory=list, repr=False)  # the fingerprint

    def __post_init__(self) -> None:
        magnitudes, _ = magnitudes_of(self.lows, self.highs, self.count, self.momentum)
        object.__setattr__(self, "ranges", {name: m[:-1] for name, m in magnitudes.items()})
        object.__setattr__(self, "total", {name: m[-1] for name, m in magnitudes.items()})

    @property
    def momentum(self) -> float:
        """Of the moving averages."""
        return float(self.settings["momentum"])

    def codec(self, boundary: str, rank: int = 0) -> FeatureInt4:
        """The format of a boundary, coding this rank's partial sums; `part(r)` of it codes another's.

        Raises:
            CalibrationError: a boundary that was not calibrated.
        """
        if boundary not in self.features:
            raise CalibrationError(f"boundary is {boundary!r}; calibrated: {', '.join(self.features)}")
        if boundary not in self._codecs:
            self._codecs[boundary] = FeatureInt4(
                ranges=self.ranges[boundary],
                total=self.total[boundary],
                features=self.features[boundary],
                artifact=self.fingerprint(),
            )
        return self._codecs[boundary].part(rank)

    def select(self, *, k: int | None = None, features: str = "fixed") -> Calibration:
        """The same ranges with features chosen anew, as `calibrate` does; k=0: plain INT4 without outlier features.

        Raises:
            ValueError: k is not smaller than the features of a boundary.
        """
        chosen = select(self.ranges, self.total, k=k, layout=features)
        settings = {**self.settings, "k": k, "features": features}
        return dataclasses.replace(self, features=chosen, settings=settings)

    def bits_per_value(self, *boundaries: str) -> float:
        """Bits on the wire for each value of these boundaries; without any, of all: (16 k + 4 (E - k)) / E."""
        names = boundaries or tuple(self.features)
        widths = [self.lows[name].shape[1] for name in names]
        bits = 4 * sum(widths) + 12 * sum(len(self.features[name]) for name in names)
        return bits / sum(widths)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of everything in it: what ranks compare before the first token."""
        if self._made:
            return self._made[0]
        digest = hashlib.sha256(json.dumps(self._metadata(), sort_keys=True).encode())
        for name, tensor in sorted(join(self.lows, self.highs).items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        self._made.append(digest.hexdigest()[:16])
        return self._made[0]

    def check(self, model: nn.Module, world: int, rows: Mapping[str, nn.Module] | None = None) -> None:
        """Raise unless it is for this model on so many ranks; on real ranks, all of them must call it.

        Args:
            rows: the row-wise modules by name; absent: found in the model.

        Raises:
            CalibrationError: another world size, other boundaries, another model.
        """
        if world != self.world:
            raise CalibrationError(
                f"the calibration is for {self.world} ranks, this is a group of {world}; "
                "allowed: a calibration for as many (lowbit calibrate --ranks)"
            )
        found: Any = boundaries(model) if rows is None else rows
        if strange := sorted(set(found) ^ set(self.features)):
            raise CalibrationError(
                f"the calibration has {len(self.features)} boundaries, the model {len(found)}; "
                f"in one of them only: {', '.join(strange[:4])}{', ...' if len(strange) > 4 else ''}"
            )
        name = identity(model, found)
        if name != self.model:
            raise CalibrationError(f"the calibration is for the model {self.model}, this is {name}")

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: there is the old one or the whole new one, whatever happens meanwhile."""
        artifact.write(path, join(self.lows, self.highs), self._metadata())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file that `save` wrote.

        Raises:
            CalibrationError: no such file, cut short, another format, made for another version of the codec,
                without some of its metadata.
        """
        tensors, metadata = artifact.read(path, _FORMAT)
        version = metadata.get("codec_version")
        if version != str(FeatureInt4.payload_version):
            raise CalibrationError(
                f"{path} is for version {version} of FeatureInt4, this lowbit has version "
                f"{FeatureInt4.payload_version}: calibrate again"
            )
        try:
            lows, highs = split(tensors)
            return cls(
                lows=lows,
                highs=highs,
                count=int(metadata["count"]),
                features={name: tuple(k) for name, k in json.loads(metadata["features"]).items()},
                model=metadata["model"],
                world=int(metadata["world"]),
                text=metadata["text"],
                settings=json.loads(metadata["settings"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(
                f"{path} is not as `lowbit calibrate` writes it: {type(error).__name__}: {error}"
            ) from error

    def _metadata(self) -> dict[str, str]:
        return {
            "format": _FORMAT, "codec": "FeatureInt4", "codec_version": str(FeatureInt4.payload_version),
            "model": self.model, "world": str(self.world), "count": str(self.count), "text": self.text,
            "settings": json.dumps(dict(self.settings), sort_keys=True),
            "features": json.dumps(self.features, sort_keys=True),
        }  # fmt: skip


def magnitudes_of(
    lows: Mapping[str, Tensor], highs: Mapping[str, Tensor], count: int, momentum: float
) -> tuple[dict[str, Tensor], list[str]]:
    """The larger magnitude of minimum and maximum, by boundary, (world + 1, E), never zero; and what was zero.

    Raises:
        ValueError: a boundary whose values are all zero.
    """
    low, high = corrected(lows, count, momentum), corrected(highs, count, momentum)
    found: dict[str, Tensor] = {}
    floored: list[str] = []
    for name in low:
        magnitude = torch.maximum(low[name].abs(), high[name].abs())
        empty = magnitude == 0
        if bool(empty.all()):
            raise ValueError(
                f"features 0 to {magnitude.shape[1] - 1} of {name} were zero in all {count} sequences; "
                "allowed: a boundary that carries something"
            )
        if bool(empty.any()):
            rank, feature = (int(i) for i in empty.nonzero()[0])
            where = "the sum" if rank == len(magnitude) - 1 else f"rank {rank}"
            floored.append(f"feature {feature} on {where} of {name}")
            magnitude = magnitude.masked_fill(empty, float(magnitude[~empty].min()))
        found[name] = magnitude
    return found, floored
