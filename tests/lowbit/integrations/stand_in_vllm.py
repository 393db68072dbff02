"""What the plug-in uses of vLLM, with the names and signatures of vLLM 0.33.0, which has no package for CPUs.

Written for the tests: layers, groups and contexts do what vLLM's do, on Gloo, and nothing more.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class CompilationConfig:
    static_forward_context: dict[str, Any] = field(default_factory=dict)
    static_all_moe_layers: list[str] = field(default_factory=list)


@dataclass
class VllmConfig:
    additional_config: dict[str, Any] = field(default_factory=dict)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    parallel_config: Any = field(default_factory=lambda: SimpleNamespace(pipeline_parallel_size=1))
    lora_config: Any = None
    speculative_config: Any = None


@dataclass
class Metadata:
    """As the attention metadata of most of vLLM's backends."""

    max_query_len: int


class GroupCoordinator:
    """Of the tensor-parallel ranks. Attribute `sums`: how many vLLM made itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.device_group = self.cpu_group = group
        self.world_size, self.rank_in_group = dist.get_world_size(group), dist.get_rank(group)
        self.sums = 0

    def all_reduce(self, input_: Tensor) -> Tensor:
        return input_ if self.world_size == 1 else self._all_reduce_out_place(input_)

    def _all_reduce_out_place(self, input_: Tensor) -> Tensor:
        self.sums += 1
        dist.all_reduce(input_, group=self.device_group)  # as vLLM's on CPUs, it returns the tensor that it was given
        return input_


def modules(group: dist.ProcessGroup, config: VllmConfig) -> dict[str, ModuleType]:
    """The modules of a fresh vLLM whose current config this is."""
    coordinator = GroupCoordinator(group)
    oot: dict[str, type] = {}
    current: list[Any] = []

    class PluggableLayer(nn.Module):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(oot.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
            def decorator(layer_cls: Any) -> Any:
                known = name if name is not None else cls.__name__
                assert known not in oot, f"Duplicate layer name: {known}"
                layer_cls.name = known
                oot[known] = layer_cls
                return layer_cls

            return decorator if _decorated_layer_cls is None else decorator(_decorated_layer_cls)

    class RowParallelLinear(PluggableLayer):
        def __init__(
            self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = True,
            skip_bias_add: bool = False, params_dtype: Any = None, reduce_results: bool = True,
            quant_config: Any = None, prefix: str = "", *, return_bias: bool = True, disable_tp: bool = False,
        ) -> None:  # fmt: skip
            super().__init__()
            self.tp_size = 1 if disable_tp else coordinator.world_size
            self.tp_rank = 0 if disable_tp else coordinator.rank_in_group
            self.input_size, self.output_size, self.prefix = input_size, output_size, prefix
            self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
            self.reduce_results, self.return_bias = reduce_results, return_bias
            self.quant_method = SimpleNamespace(apply=lambda layer, x, bias=None: F.linear(x, layer.weight, bias))
            self.weight = nn.Parameter(torch.empty(output_size, input_size // self.tp_size, dtype=params_dtype))
            self.bias = nn.Parameter(torch.empty(output_size, dtype=params_dtype)) if bias else None

        def forward(self, input_: Tensor) -> Any:
            if not self.input_is_parallel:
                input_ = input_.chunk(self.tp_size, -1)[self.tp_rank].contiguous()
            fused = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
            output = self.quant_method.apply(self, input_, fused)
            if self.reduce_results and self.tp_size > 1:
                output = coordinator.all_reduce(output)
            return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output

    @contextlib.contextmanager
    def set_forward_context(attn_metadata: Any, vllm_config: VllmConfig) -> Iterator[None]:
        current.append(SimpleNamespace(attn_metadata=attn_metadata))
        try:
            yield
        finally:
            current.pop()

    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: coordinator},
        "vllm.forward_context": {
            "get_forward_context": lambda: current[-1],
            "is_forward_context_available": lambda: bool(current),
            "set_forward_context": set_forward_context,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": oot},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {"RowParallelLinear": RowParallelLinear},
    }
    made = {name: ModuleType(name) for name in contents}
    for name, names in contents.items():
        vars(made[name]).update(names)
    return made


@contextlib.contextmanager
def stand_in(config: VllmConfig, group: dist.ProcessGroup | None = None) -> Iterator[Any]:
    """Have `vllm` importable in this block; yields its modules by the last part of their names."""
    found = modules(group or dist.group.WORLD, config)  # pyright: ignore[reportArgumentType]
    with mock.patch.dict(sys.modules, found):
        yield SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in found.items()})
