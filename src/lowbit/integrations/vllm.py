"""vLLM's tensor-parallel sums in few bits: a plug-in (entry point group `vllm.general_plugins`) for prefills.

vLLM's communicator does not know to which layer a sum belongs, and a calibrated format depends on the layer. So the
plug-in replaces `RowParallelLinear` through vLLM's registry of external layers. Such a layer knows its name. Its
forward multiplies as vLLM does, and calls the operator `lowbit::vllm_row_sum`, one node for `torch.compile`, which sums
by a `LayerSum` of `lowbit.tensor_parallel.rowwise`.

The operator codes a sum if the batch has a prefill and enough values. All other sums use vLLM's own all-reduce:
decoding, small batches, and everything that is captured in a CUDA graph. The decision depends only on what the
scheduler sends to all ranks, so all ranks decide the same.

Nothing changes unless `LOWBIT_VLLM` is set.
"""

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import escape
from lowbit.codecs.checks import check_choice, check_int
from lowbit.escape import Printable, shown
from lowbit.wire.agreement import agree

__all__ = ["RowSums", "VllmError", "VllmSettings", "register", "row_sums"]

TESTED = "0.32 and 0.33"
"""The versions of vLLM: the tests run 0.32.0 for CPUs, and this module was written against the source of 0.33.0."""

_BASE = "RowParallelLinear"
_log = escape.logger("vllm.lowbit")  # vLLM shows what its own loggers say, and drops the information of others
_library = torch.library.Library("lowbit", "FRAGMENT")

VARIABLE = "LOWBIT_VLLM"
"""The environment variable that installs the plug-in: settings as a JSON object, or "on": they are in vLLM's
`additional_config`, under "lowbit"."""
KEY = "lowbit"
"""Key of the settings in `additional_config`."""


class VllmError(Printable, RuntimeError):
    """The settings do not suit this vLLM or its model; the same text on all ranks."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Settings of the plug-in; the same on all ranks.

    Args:
        calibration: a file of `lowbit calibrate --ranks N`, for N tensor-parallel ranks: 4 bits, 8 bits, or mixed.
        format: a codec by name for all layers, instead of a calibration, such as "GroupInt(bits=8, group=64)".
        small: sums of fewer values are left to vLLM. "auto": the ranks measure at the start from which size on few bits
            are faster than PyTorch's all-reduce on their link.
        algorithm: "auto", "one_shot" or "two_shot". timeout: seconds to wait for another rank. checksums: append 8
            bytes to each payload, by which the receiver detects damage.
        check: largest error of a layer's sums, relative to vLLM's own. The first `prefills` of each layer are summed
            both ways; vLLM's sums are the ones used.
        prefills: see `check`; 0: no check.
        over: what happens to a layer over the limit: "engine" (a warning, and vLLM sums it), "refuse" (an error).
        experts: what happens to a model with expert layers, which vLLM sums elsewhere: "refuse", or "engine".
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
            raise ValueError(
                f"calibration is {shown(self.calibration)} and format is {shown(self.format)}; allowed: one of them"
            )
        if self.format:
            check_codec("format", parse(self.format))
        self.sums()
        check_choice("over", self.over, ("engine", "refuse"))
        check_choice("experts", self.experts, ("engine", "refuse"))
        check_int("prefills", self.prefills, 0, 1 << 30)
        if isinstance(self.check, bool) or not isinstance(self.check, int | float) or not self.check > 0:
            raise ValueError(f"check is {shown(self.check)}; allowed: a number above 0, such as 0.2")

    @classmethod
    def of(cls, given: object, where: str) -> "VllmSettings":
        """Read settings from a JSON object, which was found at `where`; ValueError names what is wrong."""
        names = [each.name for each in dataclasses.fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"{where} is {shown(given)}; allowed: a JSON object with {', '.join(names)}")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where} cannot be used: {error}") from error

    def sums(self) -> Any:
        from lowbit.tensor_parallel import SumSettings

        return SumSettings(algorithm=self.algorithm, small=self.small, timeout=self.timeout, checksums=self.checksums)


def settings_of(config: Any) -> VllmSettings:
    """Return the settings; store those of the environment in `additional_config`, a part of vLLM's graph key."""
    more = config.additional_config
    found = more.get(KEY) if isinstance(more, dict) else None
    given = None if found is None else VllmSettings.of(found, f"additional_config[{KEY!r}]")
    settings = from_environment()
    if settings is None:
        if given is None:
            raise VllmError(
                f"{VARIABLE} is 'on' and vLLM's additional_config has no {KEY!r}; allowed: "
                """--additional-config '{"lowbit": {"calibration": "calibration.safetensors"}}'"""
            )
        return given
    if given not in (None, settings):
        raise VllmError(f"LOWBIT_VLLM and additional_config[{KEY!r}] differ; allowed: one of them, or {VARIABLE}=on")
    if isinstance(more, dict):
        more[KEY] = dataclasses.asdict(settings)
    return settings


def from_environment() -> VllmSettings | None:
    """Read settings from the environment; None if they are in `additional_config`."""
    text = os.environ.get(VARIABLE, "")
    if text == "on":
        return None
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    return VllmSettings.of(given, VARIABLE)


def register() -> None:
    """Replace vLLM's `RowParallelLinear` by a subclass; vLLM calls this in each process, any number of times.

    Raises:
        VllmError: another plug-in has replaced this layer, or this vLLM has no such registry.
    """
    if not os.environ.get(VARIABLE):
        return
    from_environment()  # reports an error in it now, and not after the model is loaded
    registry = _vllm("model_executor.custom_op", "op_registry_oot", "PluggableLayer")
    linear = _vllm("model_executor.layers.linear", _BASE)
    replaced = registry.op_registry_oot.get(_BASE)
    if getattr(replaced, "sums_in_few_bits", False):
        return
    if replaced is not None:
        raise VllmError(
            f"{replaced.__module__}.{replaced.__name__} has replaced {_BASE} of vLLM already; "
            f"allowed: one plug-in that does (VLLM_PLUGINS names those that vLLM loads)"
        )
    registry.PluggableLayer.register_oot(name=_BASE)(_subclass(linear.RowParallelLinear))


def row_sums() -> "RowSums | None":
    """The sums of the model that vLLM has built last in this process; None before the first."""
    return _models[-1] if _models else None


def _subclass(base: Any) -> type:
    class LowBitRowParallelLinear(base):
        sums_in_few_bits = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.summed = _adopt(self) if self.reduce_results and self.tp_size > 1 else ""

        def forward(self, input_: Tensor) -> Any:
            if not self.summed:
                return super().forward(input_)
            if not self.input_is_parallel:
                part = input_.shape[-1] // self.tp_size
                input_ = input_.narrow(-1, self.tp_rank * part, part).contiguous()
            partial = self.quant_method.apply(self, input_, None)  # without the bias, as in the calibration
            output = torch.ops.lowbit.vllm_row_sum(partial, self.summed)
            if self.bias is not None and not self.skip_bias_add:
                output = output + self.bias
            return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output

    return LowBitRowParallelLinear


@dataclass
class _Layer:
    """A row-parallel layer: its sum once the formats are known, and the result of its check."""

    name: str
    width: int
    device: torch.device
    sum: Any = None  # a `LayerSum`; None: vLLM's own
    unchecked: int = 0
    error: float = float("nan")


@dataclass
class RowSums:
    """The sums of one model's row-parallel layers on this rank.

    Args:
        settings: of the plug-in. config: vLLM's.

    Attributes:
        layers: by name. traffic: counts what was sent in few bits; sums that vLLM makes are not counted.
    """

    settings: VllmSettings
    config: Any
    layers: dict[str, _Layer] = field(default_factory=dict)
    traffic: Any = None
    _started: bool = False
    _seen: object = None  # the attention metadata for which `_prefills` was computed
    _prefills: bool = False
    _reported: bool = False  # the outcome of the check

    def __post_init__(self) -> None:
        self._group: Any = _vllm("distributed.parallel_state", "get_tp_group").get_tp_group()
        self._context = _vllm("forward_context")

    @property
    def _first(self) -> bool:
        return dist.get_rank(self._group.cpu_group) == 0

    @property
    def errors(self) -> dict[str, float]:
        """Result of the check by layer: the largest error on any rank; NaN before the check."""
        return {name: layer.error for name, layer in self.layers.items()}

    def sum(self, x: Tensor, name: str) -> Tensor:
        """Return the sum over all ranks, in few bits or by vLLM; never the tensor `x` itself."""
        layer = self.layers[name]
        if not self._started and not _capturing(x):
            self._start(x.dtype)
        own = layer.sum
        if own is None or own.settings.choice(x, own.ranks, own.codec) == "plain":
            return self._whole(x)
        known = self._context.is_forward_context_available()
        metadata = self._context.get_forward_context().attn_metadata if known else None
        if metadata is not self._seen:
            self._report(began=True)
            speculative = getattr(self.config, "speculative_config", None)
            self._prefills = has_prefill(metadata, 1 + (getattr(speculative, "num_speculative_tokens", 0) or 0))
            self._seen = metadata
        if not self._prefills or _capturing(x):
            return self._whole(x)
        total = x.clone(memory_format=torch.contiguous_format)
        own.reduce_(total, self._group.device_group)
        if layer.unchecked:
            return self._checked(layer, total, self._whole(x))
        return total

    def _whole(self, x: Tensor) -> Tensor:
        total = self._group._all_reduce_out_place(x)
        return total.clone() if total.data_ptr() == x.data_ptr() else total

    def _start(self, dtype: torch.dtype) -> None:
        """Choose the formats of all layers, and compare them with those of other ranks, during vLLM's trial run."""
        from lowbit.tensor_parallel import Calibration, SumTraffic
        from lowbit.tensor_parallel.low_bit import load_agreed, sums_instead
        from lowbit.tensor_parallel.reduce import SumSample, measured
        from lowbit.tensor_parallel.rowwise import LayerSum

        settings, cpu_group = self.settings, self._group.cpu_group
        experts = getattr(self.config.compilation_config, "static_all_moe_layers", None) or []
        if experts and settings.experts == "refuse":
            raise VllmError(
                f"vLLM sums the expert layers {_some(experts)} itself, in the model's dtype; allowed: models without, "
                'or "experts": "engine" to code the other sums only'
            )
        if getattr(self.config, "lora_config", None) is not None:
            raise VllmError("vLLM's LoRA layers sum in the model's dtype by themselves; allowed: a model without LoRA")
        agree(cpu_group, {"settings": str(settings), "layers": ", ".join(self.layers)}, settings.timeout, topic="vllm")
        source: Any = settings.calibration
        if settings.format:
            from lowbit.codecs import parse

            source = parse(settings.format)
        sums = settings.sums()
        source = load_agreed(source, cpu_group, sums)
        calibrated = source.features if isinstance(source, Calibration) else self.layers
        if isinstance(source, Calibration):
            self._compare(source)
            source = sums_instead(source, "vLLM's layers", first=self._first)
        coded = [layer for name, layer in self.layers.items() if name in calibrated]
        codecs = [source.codec(layer.name) if isinstance(source, Calibration) else source for layer in coded]
        group = self._group.device_group
        samples = [SumSample(each.width, dtype, each.device, codec) for each, codec in zip(coded, codecs, strict=True)]
        sums = measured(samples, group, sums)
        self.traffic = SumTraffic()
        for layer, codec in zip(coded, codecs, strict=True):
            layer.sum = LayerSum(
                name=layer.name, width=layer.width, device=layer.device, codec=codec, settings=sums,
                ranks=self._group.world_size, group=group, traffic=self.traffic,
            )  # fmt: skip
            layer.unchecked = settings.prefills
        self._started = True
        if left := [name for name in self.layers if name not in calibrated]:
            _log.warning("vLLM sums %s itself: the calibration has no format for that", _some(left))
        if coded and self._first:
            small = f"fewer than {sums.small}" if isinstance(sums.small, int) else "as few as its sums are faster for"
            _log.info(
                "lowbit: %d row-parallel layers sum prefills in few bits over %d ranks: %s; vLLM sums %s values, and "
                "what it decodes", len(coded), self._group.world_size, _some(sorted({*map(str, codecs)})), small,
            )  # fmt: skip

    def _compare(self, calibration: Any) -> None:
        """Raise unless the calibration is for this model. Weights are not compared, because vLLM renames them."""
        from lowbit.tensor_parallel import CalibrationError

        path, ranks = self.settings.calibration, self._group.world_size
        if calibration.world != ranks:
            raise CalibrationError(
                f"{path} is for {calibration.world} ranks, and vLLM has {ranks} tensor-parallel ranks; "
                f"allowed: a calibration for as many (lowbit calibrate --ranks {ranks})"
            )
        missing = [name for name in calibration.features if name not in self.layers]
        stages = getattr(self.config.parallel_config, "pipeline_parallel_size", 1)
        if missing and (stages == 1 or len(missing) == len(calibration.features)):
            raise CalibrationError(
                f"{path} has formats for {_some(missing)}, which vLLM does not sum as row-parallel layers; it sums "
                f"{_some(list(self.layers))}: is it a calibration of this model?"
            )
        for name, total in calibration.total.items():
            if name in self.layers and len(total) != self.layers[name].width:
                raise CalibrationError(
                    f"{path} has {len(total)} features for {name}, and the model {self.layers[name].width}"
                )

    def _checked(self, layer: _Layer, total: Tensor, whole: Tensor) -> Tensor:
        layer.unchecked -= 1
        power = whole.float().square().mean()
        error = ((total.float() - whole.float()).square().mean() / power).sqrt()
        found = torch.stack([error, power, 1 / power]).cpu()
        found = torch.where(torch.isfinite(found), found, torch.inf)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group.cpu_group)
        if not bool(torch.isfinite(found[1:]).all()):
            layer.unchecked += 1
            what = "zero only" if bool(torch.isfinite(found[1])) else "NaN or infinite"
            _log.warning("%s: vLLM's own sum is %s; this batch does not count as a check", layer.name, what)
            return whole
        error = float(found[0])
        layer.error = max(error, layer.error)  # nothing is larger than NaN
        if error > self.settings.check:
            text = (
                f"{layer.name}: sums in few bits differ from vLLM's by {100 * error:.1f} %, more than "
                f"{100 * self.settings.check:g} % (check)"
            )
            if self.settings.over == "refuse":
                raise VllmError(f"{text}; allowed: a calibration on text like this, more bits, or a larger limit")
            layer.sum = None
            _log.warning("%s: vLLM sums this layer itself", text)
        self._report(began=False)
        return whole

    def _report(self, *, began: bool) -> None:
        """Log the check's outcome once all layers are checked, or all that summed a prefill when the next batch began.

        The encoders of images and sounds are layers of vLLM's, too, and run outside of its batches.
        """
        coded = [each for each in self.layers.values() if each.sum is not None]
        waiting = [each for each in coded if each.unchecked]
        done = [each for each in coded if not each.unchecked and each.error == each.error]
        if self._reported or not done or any(each.unchecked < self.settings.prefills or not began for each in waiting):
            return
        self._reported = True
        if self._first:
            errors = sorted(each.error for each in done)
            _log.info(
                "lowbit: %d layers checked: errors of their sums %.2f to %.2f %%",
                len(errors), 100 * errors[0], 100 * errors[-1],
            )  # fmt: skip
            if waiting:
                names = _some([each.name for each in waiting])
                _log.warning("lowbit: vLLM has summed %s itself so far: no prefill was there", names)


_models: list[RowSums] = []
"""In the order in which vLLM built them: a draft model for speculative decoding has layers of the same names."""


def has_prefill(metadata: Any, decode: int) -> bool:
    """Whether vLLM's attention metadata of a batch has a prefill: a request with more than `decode` tokens.

    Args:
        metadata: of one forward pass: by layer, a list of these (microbatches), or None (a trial run).
    """
    batches = metadata if isinstance(metadata, list) else [metadata]
    parts = [each for batch in batches if batch for each in (batch.values() if isinstance(batch, dict) else [batch])]
    for each in {id(part): part for part in parts}.values():
        prefills = getattr(each, "num_prefills", None)
        longest = getattr(each, "max_query_len", None)
        if prefills or (prefills is None and longest is not None and longest > decode):
            return True
    return False


def _adopt(layer: Any) -> str:
    """Register a layer that vLLM is building, and return its key.

    It is the place of its model and its name; "" (vLLM sums it) if it has no name, or the name is taken.
    """
    config = _vllm("config", "get_current_vllm_config").get_current_vllm_config()
    compilation = config.compilation_config
    place = next((i for i, each in enumerate(_models) if each.config.compilation_config is compilation), len(_models))
    if place == len(_models):
        _models.append(RowSums(settings_of(config), config))
    layers = _models[place].layers
    if not layer.prefix:
        _log.warning("a row-parallel layer has no name: vLLM sums it itself")
        return ""
    if layer.prefix in layers:
        _log.warning("a second row-parallel layer is called %s: vLLM sums it itself", layer.prefix)
        return ""
    device = next(layer.parameters()).device
    layers[layer.prefix] = _Layer(layer.prefix, layer.output_size, device)
    return f"{place}/{layer.prefix}"


def _row_sum(x: Tensor, layer: str) -> Tensor:
    place, _, name = layer.partition("/")
    return _models[int(place)].sum(x, name)


def _vllm(module: str, *names: str) -> Any:
    """Import a module of vLLM, which must have these attributes."""
    try:
        imported = importlib.import_module(f"vllm.{module}")
    except ImportError as error:
        raise VllmError(f"this vLLM has no vllm.{module}: {error}; lowbit was written for vLLM {TESTED}") from error
    for name in names:
        if not hasattr(imported, name):
            raise VllmError(f"this vLLM has no vllm.{module}.{name}; lowbit was written for vLLM {TESTED}")
    return imported


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_library.define("vllm_row_sum(Tensor x, str layer) -> Tensor")
_library.impl("vllm_row_sum", _row_sum, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::vllm_row_sum", lambda x, layer: torch.empty_like(x), lib=_library)
