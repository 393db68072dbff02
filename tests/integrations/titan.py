"""TorchTitan's own `Trainer` on processors without CUDA: its debug model, its pipelining and parallelize functions.

What of it assumes CUDA is replaced: the module of the device, and `torch.distributed.set_timeout`, which PyTorch 2.13
lacks. There `schedule.step` does not take micro-batches either, so `pp_forward_backward_step` hands over whole batches.
"""

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

VOCABULARY, BATCH, SEQUENCE = 2048, 4, 32


def titan_module(name: str) -> Any:
    """A module of TorchTitan."""
    return importlib.import_module(f"torchtitan.{name}")


def without_cuda() -> None:
    """Let TorchTitan find a CPU, also in those of its modules that are imported already."""
    titan_module("trainer")
    device = mock.Mock(
        **{"device_count.return_value": 1, "current_device.return_value": 0, "memory_stats.return_value": {}},
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 34),
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu", device_module=device)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None
    os.environ["LOCAL_RANK"] = str(dist.get_rank())


def debug_config(change: Callable[[Any], None], steps: int) -> Any:
    """The `Trainer.Config` of TorchTitan's Llama debug model, small; `change` gets it last.

    Its attention is `scaled_dot_product_attention`: FlexAttention has no backward on a CPU.
    """
    BaseDataLoader: Any = titan_module("components.dataloader").BaseDataLoader
    BaseTokenizer: Any = titan_module("components.tokenizer").BaseTokenizer
    attention = titan_module("models.common.attention").ScaledDotProductAttention

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *args: Any) -> list[int]:
            return []

        def decode(self, *args: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class RandomTokens(BaseDataLoader):
        """Other tokens on each data-parallel rank."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.generator = torch.Generator().manual_seed(dp_rank)
            self.batch, self.sequence = local_batch_size, seq_len

        def __iter__(self) -> Iterator[Any]:
            positions = torch.arange(self.sequence).expand(self.batch, -1)
            while True:
                x = torch.randint(VOCABULARY, (self.batch, self.sequence + 1), generator=self.generator)
                yield {"input": x[:, :-1], "positions": positions}, x[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    config = titan_module("models.llama3.config_registry").llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = attention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    config.training.local_batch_size, config.training.seq_len = BATCH, SEQUENCE
    config.training.steps, config.training.disable_cuda_graphs = steps, True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a PyTorch later than 2.13
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint = None
    config.debug.seed = 1
    change(config)
    return config


def trained(change: Callable[[Any], None], steps: int = 3) -> SimpleNamespace:
    """Train by TorchTitan's `Trainer`: losses of this rank by step, hashes of its parameters, and its trainer."""
    without_cuda()
    Trainer: Any = titan_module("trainer").Trainer
    losses: list[float] = []

    class Recorded(Trainer):
        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            loss = super().forward_backward_step(**kwargs)
            losses.append(float(loss))
            return loss

        def pp_forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            if "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters:
                return super().pp_forward_backward_step(**kwargs)
            return self.whole_batch(**kwargs)

        def whole_batch(
            self, *, input_dict_mbs: list[dict[str, Any]], label_mbs: list[Any], global_valid_tokens: Any
        ) -> torch.Tensor:
            whole = {name: torch.cat([each[name] for each in input_dict_mbs]) for name in input_dict_mbs[0]}
            inputs = [whole.pop("input")] if self.pp_has_first_stage else []
            whole.pop("input", None)
            last = [] if self.pp_has_last_stage else None
            with self.train_context():
                self.pp_schedule.step(
                    *inputs, **whole, target=torch.cat(label_mbs) if self.pp_has_last_stage else None, losses=last,
                    loss_kwargs={"global_valid_tokens": global_valid_tokens}, return_outputs=False,
                )  # fmt: skip
            return torch.tensor(-1.0) if last is None else torch.stack(last).sum()

    trainer = Recorded(debug_config(change, steps))
    trainer.train()
    trainer.close()
    return SimpleNamespace(losses=losses, weights=_weights(trainer.model_parts), trainer=trainer)


def _weights(parts: list[torch.nn.Module]) -> dict[str, str]:
    named = [(f"{i} {name}", p) for i, part in enumerate(parts) for name, p in part.named_parameters()]
    plain = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in named}
    return {name: hashlib.sha256(p.detach().contiguous().numpy().tobytes()).hexdigest() for name, p in plain.items()}
