"""Low-bit sums on real ranks: `low_bit_` for a loaded model, `low_bit_styles` for PyTorch's `parallelize_module`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from lowbit import escape
from lowbit.codecs.base import Codec
from lowbit.collectives import agree
from lowbit.escape import shown
from lowbit.tensor_parallel.calibration import Calibration, CalibrationError
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.inputs import send_inputs
from lowbit.tensor_parallel.plan import is_cut_by_input
from lowbit.tensor_parallel.reduce import SumSample, SumSettings, check_codec, measured
from lowbit.tensor_parallel.rowwise import LAYER_SUM, Installed, LayerSum, install, local, row_forward
from lowbit.tensor_parallel.sums import ModelSum, counted, group_of, real_sums

_log = escape.logger("lowbit.tensor_parallel")
Source = str | Path | Calibration | Codec


def low_bit_(
    model: nn.Module, calibration: Source, *, settings: SumSettings | None = None, drift: Drift | None = None
) -> Installed:
    """Make a tensor-parallel model add up its partial sums in few bits, in place; call it on all ranks.

        config = DistributedConfig(tp_plan="auto")         # of transformers.distributed; torchrun --nproc-per-node 2
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        low_bit_(model, "calibration.safetensors")

    The ranks compare calibration and settings before anything is changed; all continue or all raise the same error.
    Then they measure which sums are faster in few bits on their link, which takes a few seconds, unless `settings`
    contains thresholds. `torch.compile` compiles the model without a graph break. Bytes: see `LowBitRowwiseParallel`.

    Args:
        model: on real tensor-parallel ranks. Row-wise layers, with plain or quantized weights, and layers of experts
            are coded (`model_sums`); embeddings that are cut by the vocabulary are only counted.
        calibration: a file of `lowbit calibrate`, a `Calibration`, or a codec for all layers.
        settings: how partial sums are added up; default `SumSettings()`.
        drift: watches at run time whether the calibrated ranges hold.

    Returns:
        An `Installed`, whose `remove()` undoes it, with `thresholds`, and `measure()` for a link that has changed.

    Raises:
        ValueError: no module of the model adds up partial sums, one returns something unknown or adds up in few bits
            already, or a codec or the thresholds of `settings` do not fit.
        CalibrationError: the file is missing, cut short, or for another model, world size or codec version.
        AgreementError: models, formats or settings differ between ranks; the same text on all of them.
    """
    sums = real_sums(model)
    if not sums:
        raise ValueError(
            f"no module of {type(model).__name__} adds up partial sums of real ranks; allowed: a model loaded with "
            "tp_plan='auto' under torchrun (in one process: emulate_tensor_parallel_)"
        )
    group, settings = group_of(sums), settings or SumSettings()
    source = load_agreed(calibration, group, settings)
    if isinstance(source, Calibration):
        source.check(model, dist.get_world_size(group), sums)
    return install_formats(model, sums, source, group, settings, drift)


def install_formats(
    model: nn.Module,
    sums: Mapping[str, ModelSum],
    source: Calibration | Codec,
    group: dist.ProcessGroup,
    settings: SumSettings,
    drift: Drift | None,
) -> Installed:
    """Install the formats of a calibration that has been checked, or one codec, on all ranks of a group."""
    codecs = {name: source.codec(name) if isinstance(source, Calibration) else source for name in sums}
    installed = install(sums, codecs, group, settings, counted=counted(model), drift=drift)
    if isinstance(source, Calibration):
        send_inputs(installed, sums, source.inputs_codecs(), group)
    return installed


def load_agreed(source: Source, group: dist.ProcessGroup, settings: SumSettings) -> Calibration | Codec:
    """Load a calibration, or return the codec, after checking that it is the same on all ranks; all must call this.

    Raises:
        AgreementError: ranks have different ones, or some have none; the same text on all.
        CalibrationError, TypeError: no rank could load it, or it is neither a calibration nor a codec.
    """
    error: Exception | None = None
    loaded: Any = source
    try:
        if isinstance(source, str | Path):
            loaded = Calibration.load(source)
        elif not isinstance(source, Calibration):
            check_codec("calibration", source)
        stated = f"{type(loaded).__name__} [{loaded.fingerprint()}]"
    except Exception as failure:  # of any kind: the other ranks wait for this one's statement
        error, stated = failure, f"none ({failure})"
    agree(group, {"calibration": stated, "settings": str(settings)}, settings.timeout, topic="tensor parallel")
    if error is not None:
        raise error
    return loaded


def sums_instead(calibration: Calibration, who: str, *, first: bool) -> Calibration:
    """Return a calibration whose layers all send sums, and say so on the first rank, for those who code nothing else.

    Raises:
        CalibrationError: with a budget, layers whose format of inputs was given, so that their sums have none.
    """
    if not calibration.inputs:
        return calibration
    try:
        summed = calibration.summed()
    except ValueError as error:
        raise CalibrationError(
            f"the calibration sends the inputs of {next(iter(calibration.inputs))} in a given format; allowed for "
            f"{who}: one made without inputs (lowbit calibrate --inputs none)"
        ) from error
    if first:
        _log.warning(
            "the calibration lets %d of %d layers send their inputs, and %s add up partial sums only: all layers send "
            "sums, in %.2f bits per value, with larger errors than the calibration's", len(calibration.inputs),
            len(calibration.features), who, summed.bits_per_value(),
        )  # fmt: skip
    return summed


def low_bit_styles(
    calibration: str | Path | Calibration,
    mesh: DeviceMesh,
    *,
    settings: SumSettings | None = None,
    drift: Drift | None = None,
) -> "dict[str, LowBitRowwiseParallel]":
    """Return styles for `parallelize_module(model, mesh, {**column_wise, **low_bit_styles(...)})`, by layer.

    Args:
        calibration: a file or a `Calibration` for this model; its layers are the keys. Where it lets layers send their
            inputs, all send sums instead, within its budget or in 4-bit codes, and a warning says so.
        mesh: one dimension, the tensor-parallel ranks; all of them must call this.
        settings: how partial sums are added up. drift: watches at run time whether the calibrated ranges hold.

    Raises:
        TypeError: a codec instead of a calibration. ValueError: a mesh of several dimensions.
        CalibrationError, AgreementError: as `low_bit_`; the model itself is not compared, only the sizes of its layers.
    """
    settings = settings or SumSettings()
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; allowed: 1, such as mesh['tp']")
    loaded = load_agreed(calibration, mesh.get_group(), settings)
    if not isinstance(loaded, Calibration):
        raise TypeError(
            f"calibration is {type(loaded).__name__}; allowed: a file or a Calibration (a codec alone: "
            "LowBitRowwiseParallel(codec))"
        )
    if loaded.world != mesh.size():
        raise CalibrationError(f"the calibration is for {loaded.world} ranks, this mesh has {mesh.size()}")
    loaded = sums_instead(loaded, "styles", first=mesh.get_local_rank() == 0)
    styles = {
        name: LowBitRowwiseParallel(loaded.codec(name), settings=settings, drift=drift, name=name)
        for name in loaded.features
    }
    for style in styles.values():
        style.agreed = True
    return styles


class LowBitRowwiseParallel(RowwiseParallel):
    """A `RowwiseParallel` for `parallelize_module` whose partial sums are added up in few bits. For inference.

    The weight is cut by inputs and the bias kept whole, as by PyTorch's style. Of n values of b bits (in a
    calibration 3 to 8 and more for outliers, by layer) each of W ranks sends (W - 1) n b / 8 bytes with one_shot and
    2 (W - 1) / W n b / 8 with two_shot; results are bit-identical on all ranks. Sums that `settings.small` leaves
    uncoded are added up by PyTorch's all-reduce in the model's dtype. By default their size is measured when
    `parallelize_module` meets the first layer of a kind. An `Embedding` is cut and summed by PyTorch's own style: all
    ranks but one add zeros.

    Args:
        codec: format of the layer's partial sums: `calibration.codec(name)`, or `GroupInt`; see also `low_bit_styles`.
        settings: how they are added up.
        input_layouts: `Shard(-1)` (default) or `Replicate()`.
        output_layouts: `Replicate()` only.
        use_local_output: return a plain tensor instead of a `DTensor`.
        drift: watches at run time whether the calibrated ranges hold.
        name: of the layer, in reports and errors; each style that shares a `drift` needs its own.

    Raises:
        ValueError: another layout; in `parallelize_module` a module other than `Linear`, or of another width.
        AgreementError: in `parallelize_module`, if codecs or settings differ between ranks; the same text on all.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        settings: SumSettings | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        drift: Drift | None = None,
        name: str = "this module",
    ) -> None:
        if output_layouts not in (None, Replicate()):
            raise ValueError(f"output_layouts is {shown(output_layouts)}; allowed: Replicate()")
        if input_layouts not in (None, Shard(-1), Replicate()):
            raise ValueError(f"input_layouts is {shown(input_layouts)}; allowed: Shard(-1), Replicate()")
        super().__init__(input_layouts=input_layouts, use_local_output=use_local_output)
        check_codec("codec", codec)
        self.codec, self.settings = codec, settings or SumSettings()
        self.drift, self.name = drift, name
        self.agreed = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        if type(module) is not nn.Linear:
            raise ValueError(
                f"LowBitRowwiseParallel is for row-wise parallel modules; {self.name} is {type(module).__name__}; "
                "allowed: torch.nn.Linear and torch.nn.Embedding"
            )
        group = device_mesh.get_group()
        check_codec(self.name, self.codec, module.out_features, device_mesh.size())
        if not self.agreed:
            facts = {
                "codec": f"{type(self.codec).__name__} [{self.codec.fingerprint()}]",
                "codec version": str(self.codec.payload_version),
                "settings": str(self.settings),
            }
            agree(group, facts, self.settings.timeout, topic="tensor parallel")
        self._partition_linear_fn(self.name, module, device_mesh)
        assert is_cut_by_input(module)
        weight = local(module.weight)
        sample = SumSample(module.out_features, weight.dtype, weight.device, self.codec)
        layer_sum = LayerSum(
            name=self.name, width=module.out_features, device=weight.device, codec=self.codec,
            settings=measured([sample], group, self.settings), ranks=device_mesh.size(), group=group, drift=self.drift,
        )  # fmt: skip
        forward = row_forward(module, layer_sum, group)

        def wrapped(x: Tensor) -> Tensor:
            total = forward(x)
            if self.use_local_output:
                return total
            return DTensor.from_local(total, device_mesh, [Replicate()], run_check=False)

        setattr(wrapped, LAYER_SUM, layer_sum)
        module.__dict__["forward"] = wrapped
        return module
