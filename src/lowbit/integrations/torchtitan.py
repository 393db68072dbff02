"""TorchTitan in few bits: its pipeline, the gradients of its FSDP, and the activations that it saves for backward.

TorchTitan describes a model by a `ModelSpec`, which holds two functions: `pipelining_fn` cuts the model into pipeline
stages, and `parallelize_fn` applies tensor parallelism, checkpointing, compilation and FSDP to each part. `low_bit`
returns the spec with both wrapped. Nothing of TorchTitan is copied or permanently changed.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from lowbit.activations import LayerAware, compress_saved_
from lowbit.codecs.base import Codec
from lowbit.codecs.defaults import RECOMMENDED
from lowbit.collectives.reduce import all_reduce
from lowbit.escape import shown
from lowbit.gradients import LowBitReduceScatter
from lowbit.integrations import EngineError, engine
from lowbit.pipeline import LowBitStage
from lowbit.pipeline.arguments import Codecs, check_numbers, default_backward
from lowbit.wire.checksum import check_checksums

__all__ = ["LowBitConfig", "low_bit", "parallelize_fn", "pipelining_fn"]

TESTED = "0.3.0"
STAGE = "PipelineStage"
"""The name under which TorchTitan's pipelining functions look up the class of their stages."""

_engine = functools.partial(engine, package="torchtitan", extra="titan", tested=TESTED)
_pipelines = _engine("torchtitan.distributed.pipeline_parallel", STAGE)
_ModelSpec: Any = _engine("torchtitan.protocols.model_spec", "ModelSpec").ModelSpec
_FullAC: Any = _engine("torchtitan.distributed.activation_checkpoint", "FullAC").FullAC

_swapping = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class LowBitConfig:
    """Settings for what a run of TorchTitan sends and keeps in few bits.

    Args:
        forward: format of activations between stages: a codec, or a mapping from boundary index. None: PyTorch's own
            stages.
        backward: format of gradients between stages, likewise; None: the default for `forward`.
        warmup_steps: number of first calls of the schedule that send everything at full precision; gradient
            accumulation calls it several times a step.
        gradients: format of data-parallel gradients, such as `BlockFloat8()`; None: as TorchTitan sends them.
        activations: bits of the activations that autograd saves; None: as TorchTitan saves them.
        timeout: seconds after which a rank that does not come or answer is an error.
        checksums: append 8 bytes to each payload, by which the receiver detects damage.

    Raises:
        TypeError, ValueError: an invalid value, which the text names.
    """

    forward: Codecs | None = RECOMMENDED
    backward: Codecs | None = None
    warmup_steps: int = 0
    gradients: Codec | None = None
    activations: LayerAware | None = None
    timeout: float = 120.0
    checksums: bool = True

    def __post_init__(self) -> None:
        check_numbers(self.warmup_steps, self.timeout)
        check_checksums(self.checksums)
        if self.forward is None and self.backward is not None:
            raise ValueError(f"backward is {self.backward}; allowed where forward is None: None")
        if self.forward is not None:
            backward = default_backward(self.forward) if self.backward is None else self.backward
            for name, codecs in (("forward", self.forward), ("backward", backward)):
                for codec in codecs.values() if isinstance(codecs, Mapping) else [codecs]:
                    if not isinstance(codec, Codec):
                        raise TypeError(
                            f"{name} is {shown(codec)}; allowed: a codec such as lowbit.codecs.TransformQuant(), "
                            "or a mapping from boundary index to codec"
                        )
                    if codec.needs_key:
                        raise ValueError(
                            f"{name} is {codec}, which needs the ids of samples, and TorchTitan's loop has none; "
                            "allowed: formats without, such as TransformQuant()"
                        )
        if self.gradients is not None:
            self.reduce_scatter()
        if not isinstance(self.activations, LayerAware | None):
            raise TypeError(f"activations is {shown(self.activations)}; allowed: a LayerAware, or None")

    def reduce_scatter(self) -> LowBitReduceScatter:
        assert self.gradients is not None
        return LowBitReduceScatter(self.gradients, timeout=self.timeout, checksums=self.checksums)


def low_bit(spec: Any, config: LowBitConfig | None = None) -> Any:
    """Return a TorchTitan `ModelSpec` like `spec` whose runs send and keep few bits.

    Args:
        spec: of one of TorchTitan's models or your own, such as `config.model_spec` in a function of a config registry.
        config: absent: `LowBitConfig()`, few bits between pipeline stages.

    Raises:
        TypeError: not a `ModelSpec`. ValueError: one that is low-bit already.
    """
    config = LowBitConfig() if config is None else config
    if not isinstance(spec, _ModelSpec):
        raise TypeError(f"spec is {type(spec).__name__}; allowed: torchtitan.protocols.model_spec.ModelSpec")
    functions = {"parallelize_fn": parallelize_fn(spec.parallelize_fn, config)}
    if spec.pipelining_fn is not None:
        functions["pipelining_fn"] = pipelining_fn(spec.pipelining_fn, config)
    return replace(spec, **functions)


def pipelining_fn(function: Callable[..., Any], config: LowBitConfig | None = None) -> Callable[..., Any]:
    """Return a pipelining function like `function` whose stages are `LowBitStage`.

    While it runs, the name `PipelineStage` in its module and in TorchTitan's own stands for `LowBitStage`, in this
    thread only; so it works for any function that builds its stages by that name, also with several stages on a rank.

    Args:
        function: `pipeline_llm`, `pipeline_vlm` or a function of yours with the same arguments.
        config: absent: `LowBitConfig()`. With `forward=None` the function is returned unchanged.

    Raises:
        ValueError: `function` is low-bit already; or, when called: a stage of its schedule is not a `LowBitStage`.
    """
    config = LowBitConfig() if config is None else config
    _refuse_twice(function)
    if config.forward is None:
        return function

    @functools.wraps(function)
    def low_bit_pipelining(*args: Any, **kwargs: Any) -> Any:
        with _stages_of(function, config):
            built = function(*args, **kwargs)
        schedule = built[0]
        stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        if others := sorted({type(stage).__name__ for stage in stages if not isinstance(stage, LowBitStage)}):
            raise ValueError(
                f"{_name(function)} made stages of {', '.join(others)}; allowed: a pipelining function that builds its "
                f"stages by the name {STAGE}, in its own module or by torchtitan's pipeline_llm"
            )
        return built

    setattr(low_bit_pipelining, _MARK, True)
    return low_bit_pipelining


def parallelize_fn(function: Callable[..., Any], config: LowBitConfig) -> Callable[..., Any]:
    """Return a parallelize function like `function` with low-bit gradients and saved activations.

    Saved activations are changed before `function`, because checkpointing, compilation and FSDP wrap what they find;
    gradients after it, because they belong to FSDP's modules.

    Args:
        function: `parallelize_llama` or another function with the same arguments.
        config: `gradients` and `activations` are used. With neither, the function is returned unchanged.

    Raises:
        ValueError: `function` is low-bit already; or, when called: selective checkpointing or tensor parallelism with
            `activations`, or no FSDP with `gradients`.
    """
    _refuse_twice(function)
    if config.gradients is None and config.activations is None:
        return function

    @functools.wraps(function)
    def low_bit_parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        if config.activations is not None:
            checkpointing, dims = kwargs.get("ac_config"), kwargs["parallel_dims"]
            if not isinstance(checkpointing, _FullAC.Config | None):
                raise ValueError(
                    f"activation_checkpoint is {type(checkpointing).__qualname__}, whose recomputation does not "
                    "reproduce the tensors that low-bit activations save; allowed: FullAC.Config() or None"
                )
            if dims.tp_enabled:
                raise ValueError(f"tensor_parallel_degree is {dims.tp}; allowed with low-bit activations: 1")
            compress_saved_(model, config.activations)
        model = function(model, **kwargs)
        if config.gradients is not None:
            _reduce_in_few_bits(model, config, _name(function))
        return model

    setattr(low_bit_parallelize, _MARK, True)
    return low_bit_parallelize


_MARK = "_lowbit"


def _refuse_twice(function: Callable[..., Any]) -> None:
    if getattr(function, _MARK, False):
        raise ValueError(f"{_name(function)} is low-bit already; allowed: TorchTitan's function or spec")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


@contextlib.contextmanager
def _stages_of(function: Callable[..., Any], config: LowBitConfig) -> Iterator[None]:
    """Let the name of the stages stand for `LowBitStage` in the modules of a pipelining function, for this thread."""
    thread, inner = threading.get_ident(), function
    while isinstance(inner, functools.partial):
        inner = inner.func
    own = sys.modules.get(getattr(inner, "__module__", "") or "")
    options = {
        "forward": config.forward, "backward": config.backward, "warmup_steps": config.warmup_steps,
        "timeout": config.timeout, "checksums": config.checksums,
    }  # fmt: skip

    class Stage(LowBitStage):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            mine = threading.get_ident() == thread
            return super().__new__(cls) if mine else PipelineStage(*args, **kwargs)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **options, **kwargs)

    with _swapping:
        modules = [module for module in {_pipelines, own} if getattr(module, STAGE, None) is PipelineStage]
        for module in modules:
            setattr(module, STAGE, Stage)
        try:
            yield
        finally:
            for module in modules:
                setattr(module, STAGE, PipelineStage)


def _reduce_in_few_bits(model: nn.Module, config: LowBitConfig, name: str) -> None:
    """Set the collectives of all FSDP modules; TorchTitan also replicates by FSDP (HSDP)."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"{name} applied no FSDP; allowed with low-bit gradients: a function that calls fully_shard")
    for module in modules:
        module.set_custom_reduce_scatter(config.reduce_scatter())
        module.set_force_sum_reduction_for_comms(True)  # TorchTitan divides by the tokens itself
        state = module._get_fsdp_state()
        if not hasattr(state, "_fsdp_param_groups"):
            raise EngineError(
                f"torch {torch.__version__} has no FSDPState._fsdp_param_groups; lowbit works with torch 2.13 to 2.15"
            )
        for group in state._fsdp_param_groups:
            mesh: Any = group.mesh_info
            replicas = getattr(mesh, "replicate_process_group", None)
            if replicas is not None and not isinstance(replicas, _Replicas):
                mesh.replicate_process_group = _Replicas(replicas, config)


class _Replicas(dist.ProcessGroup):
    """A group whose all-reduce sends few bits, because FSDP has no argument for the one between its replicas."""

    def __init__(self, group: dist.ProcessGroup, config: LowBitConfig) -> None:
        super().__init__(group.rank(), group.size())  # pyright: ignore[reportCallIssue] it knows one of two
        self._group, self._config = group, config

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> None:
        config = self._config
        assert config.gradients is not None
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"op is {op}; allowed: SUM")
        for tensor in tensors:
            all_reduce(tensor, config.gradients, self._group, timeout=config.timeout, checksums=config.checksums)
