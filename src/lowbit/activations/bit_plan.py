"""The file that `lowbit plan memory` writes and training reads: bits of saved activations by pipeline stage."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.activations.policy import WHOLE, LayerAware, check_bits
from lowbit.codecs.checks import check_int

FORMAT, VERSION = "lowbit plan of saved activations", 1
PLANNED = ("norm", "mlp", "linear")
"""The layer types that a plan has bits for: attention stays as it is."""
_MOST_BYTES, _MOST_STAGES, _MOST_CHARACTERS = 1 << 20, 1 << 12, 300


@dataclass(frozen=True, kw_only=True)
class BitPlan:
    """Bits of saved activations for each stage of a pipeline.

    Args:
        stages: for each stage, in order, bits by layer type: {"norm": 8, "mlp": 4, "linear": 16}.
        group: elements that share a scale.
        made_for: settings that the plan depends on, by name: texts, numbers, booleans or None.

    Raises:
        TypeError, ValueError: bits or a group that `LayerAware` refuses, no stage, other settings.
    """

    stages: tuple[Mapping[str, int], ...]
    group: int = 64
    made_for: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < len(self.stages) <= _MOST_STAGES:
            raise ValueError(f"stages has {len(self.stages)} entries; allowed: 1 to {_MOST_STAGES}")
        for stage, bits in enumerate(self.stages):
            if not isinstance(bits, Mapping) or bits.keys() != set(PLANNED):
                raise ValueError(f"stages[{stage}] is {bits!r}; allowed: bits for {', '.join(PLANNED)}")
            for kind, value in bits.items():
                check_bits(f"stages[{stage}][{kind!r}]", value)
        self.policy(0)  # checks the group
        for name, value in self.made_for.items():
            if not isinstance(value, str | int | float | None) or len(f"{name}{value}") > _MOST_CHARACTERS:
                raise ValueError(f"made_for[{name!r}] is {value!r}; allowed: a short text, a number, a boolean or None")

    def policy(self, stage: int, *, rounding: str = "nearest") -> LayerAware:
        """Return the policy of a stage for `compress_saved_`; ValueError without such a stage."""
        check_int("stage", stage, 0, len(self.stages) - 1)
        bits: Mapping[str, Any] = self.stages[stage]
        return LayerAware(**bits, attention=WHOLE, group=self.group, rounding=rounding)

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON; a reader finds the old file or the new one, never a part.

        Raises:
            OSError: the file cannot be written.
        """
        write_json(path, {
            "format": FORMAT, "version": VERSION, "made_for": dict(self.made_for), "group": self.group,
            "stages": [dict(bits) for bits in self.stages],
        })  # fmt: skip

    @classmethod
    def read(cls, path: str | Path) -> BitPlan:
        """Read a plan that `write` wrote. The file may be hostile: it is data, bounded and checked.

        Raises:
            ValueError: no such file, or something else than a plan of this version.
        """
        values = read_json(path, VERSION)
        match values:
            case {"made_for": dict(made_for), "group": group, "stages": [*stages]} if len(values) == 5:
                try:
                    return cls(stages=tuple(stages), group=group, made_for=made_for)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{path} is not a memory plan: {cut(str(error))}") from None
        raise ValueError(f"{path} is not a memory plan: it lacks made_for, group or stages, or has more than these")


def write_json(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write values as JSON; a reader finds the old file or the new one, never a part."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def version_of(path: str | Path) -> object:
    """The version of a plan's file; ValueError if it is none."""
    values = _read_json(Path(path))
    if (name := values.get("format")) != FORMAT:
        raise ValueError(f"{path} has format {cut(repr(name))}; allowed: {FORMAT!r}")
    return values.get("version")


def read_json(path: str | Path, version: int) -> dict[str, Any]:
    """The values of a plan's file of this version; ValueError for any other."""
    if (found := version_of(path)) != version:
        raise ValueError(f"{path} has version {cut(repr(found))}; this lowbit reads version {version} here")
    return _read_json(Path(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # reading a pipe could take for ever
            raise ValueError(f"{path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} has more than {_MOST_BYTES} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({type(error).__name__})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return values


def cut(text: str) -> str:
    """The beginning of a text that a message quotes from a foreign file."""
    return text if len(text) <= 120 else f"{text[:120]}..."
