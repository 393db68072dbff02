"""Settings of the plug-in for vLLM: from the environment, or from vLLM's own configuration."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowbit.codecs.checks import check_choice, check_int

VARIABLE = "LOWBIT_VLLM"
"""The environment variable that installs the plug-in: settings as a JSON object, or "on": they are in vLLM's
`additional_config`, under "lowbit"."""
KEY = "lowbit"
"""Of the settings in `additional_config`."""


class VllmError(RuntimeError):
    """vLLM and the settings do not go together; the same text on all ranks."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """What is coded, and how; the same on all ranks.

    Args:
        calibration: a file of `lowbit calibrate --ranks N`, for N tensor-parallel ranks: 4 bits, 8 bits, or mixed.
        format: a codec by name for all layers, in place of a calibration, such as "GroupInt(bits=8, group=64)".
        small: sums of fewer values stay vLLM's own. "auto": the ranks measure at the start from which size on few bits
            are faster than PyTorch's all-reduce on their link.
        algorithm: "auto", "one_shot" or "two_shot". timeout: seconds to wait for another rank. checksums: 8 bytes
            behind each payload tell if it arrived as it was sent.
        check: largest error of a layer's sums, relative to vLLM's own. The first `prefills` of each layer are summed
            both ways; vLLM's sums are the ones used.
        prefills: see `check`; 0: no check.
        over: what happens to a layer over the limit: "engine" (a warning, and vLLM sums it), "refuse" (an error).
        experts: what happens to a model with expert layers, whose sums vLLM makes elsewhere: "refuse", or "engine".
    """

    calibration: str = ""
    format: str = ""
    small: int | Literal["auto"] = "auto"
    algorithm: Literal["auto", "one_shot", "two_shot"] = "auto"
    timeout: float = 120.0
    checksums: bool = True
    check: float = 0.2
    prefills: int = 1
    over: Literal["engine", "refuse"] = "engine"
    experts: Literal["engine", "refuse"] = "refuse"

    def __post_init__(self) -> None:
        from lowbit.codecs import parse
        from lowbit.tensor_parallel.reduce import check_codec

        if bool(self.calibration) == bool(self.format):
            raise ValueError(f"calibration is {self.calibration!r} and format is {self.format!r}; allowed: one of them")
        if self.format:
            check_codec("format", parse(self.format))
        self.sums()
        check_choice("over", self.over, ("engine", "refuse"))
        check_choice("experts", self.experts, ("engine", "refuse"))
        check_int("prefills", self.prefills, 0, 1 << 30)
        if isinstance(self.check, bool) or not isinstance(self.check, int | float) or not self.check > 0:
            raise ValueError(f"check is {self.check!r}; allowed: a number above 0, such as 0.2")

    @classmethod
    def of(cls, given: object, where: str) -> VllmSettings:
        """Settings from a JSON object; `where` it was found.

        Raises:
            ValueError: not an object, an unknown name, or a value that is not allowed.
        """
        names = [each.name for each in dataclasses.fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"{where} is {given!r}; allowed: a JSON object with {', '.join(names)}")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where} cannot be used: {error}") from error

    def sums(self) -> Any:
        """The `SumSettings`."""
        from lowbit.tensor_parallel import SumSettings

        return SumSettings(algorithm=self.algorithm, small=self.small, timeout=self.timeout, checksums=self.checksums)


def settings_of(config: Any) -> VllmSettings:
    """Those of the environment or of `additional_config`, and part of it: vLLM's key of compiled graphs has it."""
    more = config.additional_config
    given = more.get(KEY) if isinstance(more, dict) else None
    settings = from_environment()
    if settings is not None and given is not None and VllmSettings.of(given, f"additional_config[{KEY!r}]") != settings:
        raise VllmError(f"LOWBIT_VLLM and additional_config[{KEY!r}] differ; allowed: one of them, or {VARIABLE}=on")
    if settings is None:
        if given is None:
            raise VllmError(
                f"{VARIABLE} is 'on' and vLLM's additional_config has no {KEY!r}; allowed: "
                """--additional-config '{"lowbit": {"calibration": "calibration.safetensors"}}'"""
            )
        return VllmSettings.of(given, f"additional_config[{KEY!r}]")
    if isinstance(more, dict):
        more[KEY] = dataclasses.asdict(settings)
    return settings


def from_environment() -> VllmSettings | None:
    """None: the settings are in `additional_config`."""
    text = os.environ.get(VARIABLE, "")
    if text == "on":
        return None
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    return VllmSettings.of(given, VARIABLE)
