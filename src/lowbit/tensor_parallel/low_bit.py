"""The ways in: `low_bit_` for a loaded model, `low_bit_styles` for PyTorch, `low_bit_plan` for Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lowbit.codecs.base import Codec
from lowbit.collectives import agree
from lowbit.tensor_parallel.artifact import CalibrationError
from lowbit.tensor_parallel.calibration import Calibration
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.plan import OURS, is_row, parallel_boundaries, plan_of
from lowbit.tensor_parallel.reduce import Settings, check_codec
from lowbit.tensor_parallel.rowwise import (
    Installed,
    LowBitRowwiseParallel,
    group_of,
    install,
)

Source = str | Path | Calibration | Codec


def low_bit_(
    model: nn.Module,
    calibration: Source,
    *,
    settings: Settings | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Let a tensor-parallel model add up its partial sums in few bits, in place, on all ranks at once.

        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")   # torchrun --nproc-per-node 2
        low_bit_(model, "calibration.safetensors")

    All ranks compare what they hold before anything is changed, and load the same or raise the same.

    Args:
        model: on real tensor-parallel ranks: its row-wise `Linear`s have `DTensor` weights.
        calibration: a file of `lowbit calibrate`, a `Calibration`, or a codec for all boundaries.
        settings: how sums travel; default `Settings()`.
        drift: watches at run time whether the calibrated ranges hold.

    Returns:
        An `Installed`, whose `remove()` undoes it.

    Raises:
        ValueError: no module of the model is row-wise parallel, or a codec does not fit.
        CalibrationError: the file is missing, cut short, or for another model, world size or codec version.
        AgreementError: the ranks do not hold the same; the same text on all of them.
    """
    rows = parallel_boundaries(model)
    if not rows:
        raise ValueError(
            f"no module of {type(model).__name__} is row-wise parallel on real ranks; allowed: a model loaded with "
            "tp_plan='auto' under torchrun (in one process: emulate_tensor_parallel_)"
        )
    group = group_of(rows)
    chosen = settings or Settings()
    found = load_agreed(calibration, group, chosen)
    if isinstance(found, Calibration):
        found.check(model, dist.get_world_size(group), rows)
    codecs = {name: found.codec(name) if isinstance(found, Calibration) else found for name in rows}
    return install(rows, codecs, group, chosen, drift=drift)


def load_agreed(
    source: Source, group: dist.ProcessGroup, settings: Settings
) -> Calibration | Codec:
    """A calibration or codec that is the same on all ranks; to be called by all of them.

    Raises:
        AgreementError: ranks hold different ones, or some have none; the same text on all.
        CalibrationError: none of them could load it.
    """
    error: CalibrationError | None = None
    found: Any = source
    try:
        if isinstance(source, str | Path):
            found = Calibration.load(source)
        elif not isinstance(source, Calibration):
            check_codec("calibration", source)
        stated = f"{type(found).__name__} [{found.fingerprint()}]"
    except CalibrationError as failed:
        error, stated = failed, f"none ({failed})"
    facts = {"calibration": stated, "settings": str(settings)}
    agree(group, facts, settings.timeout, topic="tensor parallel")
    if error is not None:
        raise error
    return found


def low_bit_styles(
    calibration: Source,
    mesh: DeviceMesh,
    *,
    settings: Settings | None = None,
) -> dict[str, LowBitRowwiseParallel]:
    """Styles for `parallelize_module(model, mesh, {**column_wise, **low_bit_styles(...)})`, by boundary.

    Args:
        calibration: a file or a `Calibration` for this model; its boundaries are the keys.
        mesh: one dimension, the tensor-parallel ranks; all of them must call this.
        settings: how sums travel.

    Raises:
        As `low_bit_`; the model itself is not compared, only the sizes of its modules.
    """
    chosen = settings or Settings()
    found = load_agreed(calibration, mesh.get_group(), chosen)
    if not isinstance(found, Calibration):
        raise TypeError(
            f"calibration is {type(found).__name__}; allowed: a file or a Calibration (a codec alone: "
            "LowBitRowwiseParallel(codec))"
        )
    if found.world != mesh.size():
        raise CalibrationError(
            f"the calibration is for {found.world} ranks, this mesh has {mesh.size()}"
        )
    styles = {
        name: LowBitRowwiseParallel(found.codec(name), settings=chosen) for name in found.features
    }
    for name, style in styles.items():
        style.name, style.agreed = name, True
    return styles


def low_bit_plan(
    folder: str | Path, calibration: Source, *, settings: Settings | None = None
) -> dict[str, str]:
    """A Hugging Face `tp_plan` for a checkpoint folder, whose row-wise modules sum in few bits.

        plan = low_bit_plan(folder, "calibration.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan=plan)

    The plan names styles of its own in `ALL_PARALLEL_STYLES`, for this one model. The calibration is loaded, agreed on
    and compared with the model's weights at the first forward pass, when they are there; the errors are those of
    `low_bit_`, the same on all ranks, and come before the first token.

    Raises:
        ValueError: the model in the folder has no tensor-parallel plan.
        ImportError: this version of transformers has other base classes for styles.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rows = [name for name, style in plan_of(model).items() if is_row(style)]
    late = _Late(config, calibration, settings or Settings(), rows)
    return {rule: _register(late, rule) for rule in dict.fromkeys(map(_rule, rows))}


def _rule(name: str) -> str:
    """The name with a `*` for the number of a layer, as Hugging Face writes it."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


class _Late:
    """A calibration that waits for the model: styles hear of modules one by one, without names, before weights come.

    Hugging Face installs a style on the modules of a rule in the order in which the model has them.
    """

    def __init__(
        self, config: Any, calibration: Source, settings: Settings, rows: list[str]
    ) -> None:
        self._config, self._calibration, self._settings = config, calibration, settings
        self._names = {rule: [r for r in rows if _rule(r) == rule] for rule in map(_rule, rows)}
        self._rows = rows
        self._modules: dict[str, list[nn.Linear]] = {rule: [] for rule in self._names}

    def add(self, rule: str, module: nn.Linear) -> None:
        """One more module of a rule."""
        if len(self._modules[rule]) == len(self._names[rule]):
            raise ValueError(
                f"a plan of low_bit_plan is for one model, and {rule} has {len(self._names[rule])} modules already; "
                "allowed: a new plan for each from_pretrained"
            )
        self._modules[rule].append(module)

        def forward(x: Tensor) -> Tensor:
            self._bind()
            return module(x)

        module.__dict__["forward"] = forward

    def _bind(self) -> None:
        """Everything is loaded: agree, compare, and install the sums."""
        found = {
            name: module
            for rule, names in self._names.items()
            for name, module in zip(names, self._modules[rule], strict=True)
        }
        rows = {name: found[name] for name in self._rows}
        group = group_of(rows)
        calibration = load_agreed(self._calibration, group, self._settings)
        if isinstance(calibration, Calibration):
            calibration.check(self._config, dist.get_world_size(group), rows)
            codecs = {name: calibration.codec(name) for name in rows}
        else:
            codecs = dict.fromkeys(rows, calibration)
        install(rows, codecs, group, self._settings)


def _register(late: _Late, rule: str) -> str:
    """Make a style of Hugging Face's; its name."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
    from transformers.integrations.tensor_parallel import RowwiseParallel as Base

    if not hasattr(Base, "install_forward"):
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} has styles without install_forward; allowed: a version whose "
            "tensor parallelism is built on DTensor, or low_bit_(model, calibration) after from_pretrained"
        )

    class LowBitRowwise(Base):
        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            if type(module) is not nn.Linear:
                raise ValueError(
                    f"{rule} is {type(module).__name__}; allowed for {OURS}: torch.nn.Linear"
                )
            late.add(rule, module)
            return module

    name = f"{OURS}/{id(late):x}/{rule}"
    styles: Any = ALL_PARALLEL_STYLES  # its annotation says functions
    styles.register(name, LowBitRowwise())
    return name
