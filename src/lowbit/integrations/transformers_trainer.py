"""Hugging Face's `Trainer` with gradients in few bits between replicas: one callback, and no subclass.

    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[LowBitGradients(BlockFloat8())])

`Accelerate` alone needs no callback, since its `prepare` returns the DDP module:
`model.register_comm_hook(None, all_reduce_hook(BlockFloat8()))`.
"""

import functools
import gc
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lowbit import escape
from lowbit.codecs import Codec
from lowbit.gradients import all_reduce_hook
from lowbit.gradients.data_parallel import LOW_BIT_HOOKS, Hook
from lowbit.integrations import engine

__all__ = ["LowBitGradients"]

log = escape.logger(__name__)

from_transformers = functools.partial(engine, package="transformers", extra="train", tested="5.23.0")
_Callback: Any = from_transformers("transformers", "TrainerCallback").TrainerCallback


class LowBitGradients(_Callback):
    """Averages the gradients of `Trainer`'s replicas in few bits; on a single process it only warns.

    Attributes:
        hook: what DDP calls; None before training, and on a single process.

    Args:
        codec: the format, such as `BlockFloat8()`. options: further arguments of `all_reduce_hook`.

    Raises:
        RuntimeError: (when training begins) several processes train, and `Trainer` does not wrap the model in DDP, or
            DDP has another communication hook.
    """

    def __init__(self, codec: Codec, **options: Any) -> None:
        self._codec, self._options = codec, options
        self.hook: Hook | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Find DDP's wrapper of the model, and register the hook; `Trainer` calls this on every rank."""
        if args.world_size < 2:
            log.warning("LowBitGradients does nothing: Trainer trains on a single process (start it by torchrun)")
            return
        # `Trainer` hands the bare model to callbacks, and neither its wrapper nor itself.
        wrappers = [x for x in gc.get_objects() if type(x) is DistributedDataParallel and x.module is model]
        if not wrappers:
            raise RuntimeError(
                f"Trainer trains {type(model).__name__} on {args.world_size} processes without "
                "DistributedDataParallel; allowed: with it (for FSDP, see LowBitReduceScatter)"
            )
        hooks: list[Any] = [hook for wrapper in wrappers for hook, _ in wrapper._comm_hooks]
        if any(hook not in LOW_BIT_HOOKS for hook in hooks):
            raise RuntimeError(f"DDP's wrapper of {type(model).__name__} has another communication hook; allowed: none")
        # One of an earlier `Trainer` may be left, so all get it.
        self.hook = hook = hooks[0] if hooks else all_reduce_hook(self._codec, **self._options)
        for wrapper in wrappers:
            if not wrapper._comm_hooks:
                wrapper.register_comm_hook(None, hook)
