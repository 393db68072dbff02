"""The ways in: `low_bit_` for a loaded model, `low_bit_styles` for PyTorch, `low_bit_plan` for Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook

from lowbit.codecs.base import Codec
from lowbit.collectives import agree
from lowbit.tensor_parallel.artifact import CalibrationError
from lowbit.tensor_parallel.calibration import Calibration
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.plan import OURS, is_row, plan_of, sharded_rowwise_layers
from lowbit.tensor_parallel.reduce import SumSettings, check_codec
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
    settings: SumSettings | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Let a tensor-parallel model add up its partial sums in few bits, in place, on all ranks at once.

        config = DistributedConfig(tp_plan="auto")         # of transformers.distributed; torchrun --nproc-per-node 2
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        low_bit_(model, "calibration.safetensors")

    All ranks compare what they hold before anything is changed, and load the same or raise the same.

    Args:
        model: on real tensor-parallel ranks: its row-wise `Linear`s have `DTensor` weights.
        calibration: a file of `lowbit calibrate`, a `Calibration`, or a codec for all boundaries.
        settings: how sums travel; default `SumSettings()`.
        drift: watches at run time whether the calibrated ranges hold.

    Returns:
        An `Installed`, whose `remove()` undoes it.

    Raises:
        ValueError: no module of the model is row-wise parallel, or a codec does not fit.
        CalibrationError: the file is missing, cut short, or for another model, world size or codec version.
        AgreementError: the ranks do not hold the same; the same text on all of them.
    """
    rows = sharded_rowwise_layers(model)
    if not rows:
        raise ValueError(
            f"no module of {type(model).__name__} is row-wise parallel on real ranks; allowed: a model loaded with "
            "tp_plan='auto' under torchrun (in one process: emulate_tensor_parallel_)"
        )
    group = group_of(rows)
    chosen = settings or SumSettings()
    found = load_agreed(calibration, group, chosen)
    if isinstance(found, Calibration):
        found.check(model, dist.get_world_size(group), rows)
    codecs = {name: found.codec(name) if isinstance(found, Calibration) else found for name in rows}
    return install(rows, codecs, group, chosen, drift=drift)


def load_agreed(source: Source, group: dist.ProcessGroup, settings: SumSettings) -> Calibration | Codec:
    """A calibration or codec that is the same on all ranks; to be called by all of them.

    Raises:
        AgreementError: ranks hold different ones, or some have none; the same text on all.
        CalibrationError, TypeError: none of them could load it, or it is neither a calibration nor a codec.
    """
    error: Exception | None = None
    found: Any = source
    try:
        if isinstance(source, str | Path):
            found = Calibration.load(source)
        elif not isinstance(source, Calibration):
            check_codec("calibration", source)
        stated = f"{type(found).__name__} [{found.fingerprint()}]"
    except Exception as failed:  # whatever it is: the other ranks wait for this one to say something
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
    settings: SumSettings | None = None,
    drift: Drift | None = None,
) -> dict[str, LowBitRowwiseParallel]:
    """Styles for `parallelize_module(model, mesh, {**column_wise, **low_bit_styles(...)})`, by boundary.

    Args:
        calibration: a file or a `Calibration` for this model; its boundaries are the keys.
        mesh: one dimension, the tensor-parallel ranks; all of them must call this.
        settings: how sums travel. drift: watches at run time whether the calibrated ranges hold.

    Raises:
        As `low_bit_`; the model itself is not compared, only the sizes of its modules.
    """
    chosen = settings or SumSettings()
    found = load_agreed(calibration, mesh.get_group(), chosen)
    if not isinstance(found, Calibration):
        raise TypeError(
            f"calibration is {type(found).__name__}; allowed: a file or a Calibration (a codec alone: "
            "LowBitRowwiseParallel(codec))"
        )
    if found.world != mesh.size():
        raise CalibrationError(f"the calibration is for {found.world} ranks, this mesh has {mesh.size()}")
    styles = {
        name: LowBitRowwiseParallel(found.codec(name), settings=chosen, drift=drift, name=name)
        for name in found.features
    }
    for style in styles.values():
        style.agreed = True
    return styles


def low_bit_plan(
    folder: str | Path,
    calibration: Source,
    *,
    settings: SumSettings | None = None,
    drift: Drift | None = None,
) -> dict[str, str]:
    """A Hugging Face `tp_plan` for a checkpoint folder, whose row-wise modules sum in few bits.

        plan = low_bit_plan(folder, "calibration.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan=plan))

    The plan gives the model's row-wise modules a style of its own in `ALL_PARALLEL_STYLES`, which is Hugging Face's
    until the model is called: at its first forward pass, when the weights are there, it does what `low_bit_` does. The
    errors are the same, on all ranks, and come before the first token.

    Args:
        folder: of the checkpoint. calibration, settings, drift: as for `low_bit_`.

    Raises:
        ValueError: the model in the folder has no tensor-parallel plan.
        ImportError: this version of transformers has other base classes for styles.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
    from transformers.integrations.tensor_parallel import RowwiseParallel as Base

    if not hasattr(Base, "install_forward"):
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} has styles without install_forward; allowed: a version whose "
            "tensor parallelism is built on DTensor, or low_bit_(model, calibration) after from_pretrained"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    rows = [name for name, style in plan_of(model).items() if is_row(style)]
    waiting: list[nn.Module] = []

    def called(model: nn.Module) -> None:
        low_bit_(model, calibration, settings=settings, drift=drift)

    class LowBit(Base):
        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            waiting.append(module)
            if len(waiting) == len(rows):
                _when_called(waiting, called)
            return super().install_forward(module, mesh)

    style = LowBit()
    name = f"{OURS}/{id(style):x}"
    styles: Any = ALL_PARALLEL_STYLES  # its annotation says functions
    styles.register(name, style)
    return {re.sub(r"\.\d+(\.|$)", r".*\1", row): name for row in rows}


def _when_called(parts: Sequence[nn.Module], act: Callable[[nn.Module], object]) -> None:
    """Do something once, before the first forward pass of the module that has all these parts.

    A style hears of parts only, one by one, and before weights come; so this listens to all modules of the process
    until the one is called.
    """

    def hook(module: nn.Module, arguments: object) -> None:
        if set(parts) <= set(module.modules()):
            handle.remove()
            act(module)

    handle = register_module_forward_pre_hook(hook)
