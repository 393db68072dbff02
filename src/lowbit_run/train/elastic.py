"""Replicas that come and go: each is a pipeline and a run of its own, joined to the others by torchft's lighthouse."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit import escape
from lowbit.codecs import RateGoal
from lowbit.collectives import all_reduce_bytes
from lowbit.wire.errors import AgreementError, first_line
from lowbit.wire.messages import gather_json
from lowbit.wire.traffic import note_sent
from lowbit_run.config import ConfigError
from lowbit_run.job.process_group import interface_towards
from lowbit_run.train.checkpoints.state import collect, restore
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.metrics import Work
from lowbit_run.train.stages import Pipeline

if TYPE_CHECKING:
    from lowbit_run.train.prepare import Prepared

log = escape.logger(__name__)

_PAUSE = 0.5  # seconds between two checks for enough replicas
_RETRY_SECONDS = 5.0  # between two requests for a quorum, when the lighthouse does not answer
_COMPARED = ("model.", "lora.", "optimizer.", "data.sequence", "data.tokenizer", "gradients.", "run.steps")
"""Prefixes of the keys of a run's identity that must be equal on all replicas."""


def check_elastic(config: TrainConfig, goals: Iterable[RateGoal]) -> None:
    """Check a configuration with a lighthouse, before ranks start."""
    if not config.elastic.lighthouse:
        return
    if config.pipeline.is_auto:
        raise ConfigError(
            "pipeline.forward is auto, the default; allowed with elastic.lighthouse: formats by name, such as "
            "transform, since a replica that joins takes over what the codecs of another keep"
        )
    if config.pipeline.anchor:
        raise ConfigError(
            "pipeline.anchor is true; allowed with elastic.lighthouse: false, since anchors are fitted in the warm-up, "
            "which a replica that comes later does not have"
        )
    try:
        _import_torchft()
    except ImportError as error:
        raise ConfigError(f"elastic.lighthouse needs torchft: {error}") from error
    if not config.elastic.name:
        raise ConfigError("elastic.name is ''; allowed with elastic.lighthouse: a name that no other replica has")
    if config.pipeline.data_parallel > 1:
        raise ConfigError(
            f"pipeline.data_parallel is {config.pipeline.data_parallel}; allowed with elastic.lighthouse: 1, since "
            "each replica is a run of its own"
        )
    for goal in goals:
        raise ConfigError(
            f"pipeline.forward or backward is {goal}; allowed with elastic.lighthouse: formats that leave "
            "nothing to the warm-up, which a replica that comes later does not have"
        )


def _import_torchft() -> None:
    """Import torchft; as it logs several lines per step, silence all but warnings unless the user asks for its log."""
    level = os.environ.get("RUST_LOG")
    os.environ["RUST_LOG"] = level or "warn"  # torchft reads it once, on import
    try:
        import lowbit.integrations.torchft  # noqa: F401
    finally:
        if level is None:
            del os.environ["RUST_LOG"]
    if not level:
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # no tracebacks: `Elastic.commit` logs the reason


def seed_of(config: TrainConfig) -> int:
    """Return the seed of the data's order; with a lighthouse, each replica has its own."""
    name = config.elastic.name if config.elastic.lighthouse else ""
    return config.run.seed + (int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) if name else 0)


def _transport(limit: timedelta) -> Any:
    """Make torchft's transport of weights to a replica that is behind, restricted to unpickle only tensors."""
    from torch.distributed._serialization import _streaming_load
    from torchft.checkpointing.http_transport import HTTPTransport  # pyright: ignore[reportMissingImports]

    class WeightTransport(HTTPTransport):
        def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
            note_sent("replicas", len(dst_ranks) * sum(x.nbytes for x in _tensors_in(state_dict)))
            super().send_checkpoint(dst_ranks, step, state_dict, timeout)

        @classmethod
        def _load_from_address(cls, address: str, timeout: timedelta) -> object:
            with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as stream:
                return _streaming_load(stream, weights_only=True)

    return WeightTransport(timeout=limit, num_chunks=0)


def _tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors_in(value)


class Elastic:
    """This rank's part of a replica among others; every rank of the replica makes one.

    Args:
        prepared: with a part of the identity that must be equal on all replicas.
        pipeline, optimizer: hold the state that a replica that is behind takes over from another.
        side: a group of the ranks of this replica.

    Attributes:
        replicas: number of replicas that share the current step.

    Raises:
        ConnectionError: torchft does not reach the lighthouse.
    """

    def __init__(self, prepared: Prepared, pipeline: Pipeline, optimizer: Any, side: dist.ProcessGroup | None) -> None:
        _import_torchft()
        from torchft.process_group import ProcessGroupGloo  # pyright: ignore[reportMissingImports]

        from lowbit.integrations.torchft import LowBitManager

        config, identity = prepared.config, prepared.identity
        self._codec, self._pipeline, self._optimizer = prepared.all_reduce, pipeline, optimizer
        self._rank, self._ranks, self._checksums = dist.get_rank(), dist.get_world_size(), config.run.checksums
        self.replicas, self._at_least, self._patience = 0, config.elastic.at_least, config.run.rejoin_seconds
        self._elements = self._bytes = 0.0
        # Gloo reaches other replicas over the network that leads to the lighthouse, unless the user names another.
        chosen, host = os.environ.get("GLOO_SOCKET_IFNAME"), urlsplit(config.elastic.lighthouse).hostname
        of_ranks = interface_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        if host and chosen in (None, "", of_ranks) and (name := interface_towards(host)):
            os.environ["GLOO_SOCKET_IFNAME"] = name
        if self._rank == 0:
            log.warning(
                "replica %s meets others at %s; torchft's own log: RUST_LOG=info",
                config.elastic.name, config.elastic.lighthouse,
            )  # fmt: skip
        limit = timedelta(seconds=0.8 * config.run.timeout_seconds)
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if self._rank == 0 else None
        port = gather_json(self._store and self._store.port, side)[0]
        self.manager: Any = LowBitManager(
            ProcessGroupGloo(timeout=limit), codec=self._codec, error_feedback=config.elastic.error_feedback,
            checksums=config.run.checksums, facts={k: str(v) for k, v in identity.items() if k.startswith(_COMPARED)},
            load_state_dict=self._load, state_dict=self._save, min_replica_size=config.elastic.at_least,
            use_async_quorum=False, timeout=limit, connect_timeout=limit,
            quorum_timeout=timedelta(seconds=config.run.rejoin_seconds),
            quorum_retries=max(1, int(config.run.rejoin_seconds / _RETRY_SECONDS)),
            rank=self._rank, world_size=self._ranks,
            store_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"), store_port=port,
            lighthouse_addr=config.elastic.lighthouse, replica_id=config.elastic.name,
            checkpoint_transport=_transport(limit),
        )  # fmt: skip

    def resume(self, done: int) -> None:
        """Continue after `done` steps, which were restored from this replica's own checkpoint."""
        self.manager.load_state_dict({"step": done, "batches_committed": done})

    def begin(self) -> int:
        """Meet the other replicas for the next step, and take the weights of one that is ahead.

        Returns:
            Number of steps done.

        Raises:
            ConnectionError: fewer than `elastic.at_least` replicas came, or the lighthouse is gone.
        """
        deadline, replicas = time.monotonic() + self._patience, 0
        try:
            while replicas < self._at_least:
                if replicas:  # the quorum came at once, with too few
                    time.sleep(_PAUSE)
                self.manager.start_quorum()
                replicas = self.manager.num_participants()
                if replicas < self._at_least and time.monotonic() > deadline:
                    raise TimeoutError
        except AgreementError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise ConnectionError(
                f"no quorum of replicas, with {replicas} there: {first_line(error)}; allowed: elastic.at_least "
                f"({self._at_least}) replicas within run.rejoin_seconds, and a lighthouse that answers"
            ) from error
        if replicas != self.replicas and self._rank == 0:
            count = "1 replica" if replicas == 1 else f"{replicas} replicas"
            log.warning("step %d: %s", self.manager.current_step() + 1, count)
        self.replicas = replicas
        return self.manager.current_step()

    def average(self, flat: Tensor) -> Any:
        """Start to replace gradients, float32 and one-dimensional, by their mean over all replicas."""
        if self.replicas > 1:
            self._bytes += all_reduce_bytes(
                flat.numel(), self._codec, rank=0, ranks=self.replicas, checksums=self._checksums
            )
            self._elements += 2 * (self.replicas - 1) / self.replicas * flat.numel()
        return self.manager.allreduce(flat)

    def commit(self) -> bool:
        """Return whether all ranks of this replica have the step's means; if not, the step must be repeated.

        Raises:
            AgreementError: this replica contradicts the others.
        """
        committed = self.manager.should_commit()
        if not committed and self._rank == 0:
            error = self.manager.errored()
            reason = first_line(error.original_exception) if error else "too few replicas, or another rank's error"
            log.warning("step %d is tried again: %s", self.manager.current_step() + 1, reason)
        return committed

    def note_traffic(self, work: Work) -> None:
        """Add the gradients that this rank has sent since the last call."""
        work.gradient_bytes += self._bytes
        work.gradient_elements += self._elements
        self._bytes = self._elements = 0.0

    def close(self) -> None:
        """Leave the other replicas."""
        with contextlib.suppress(Exception):
            self.manager.shutdown(wait=False)

    def _save(self) -> dict[str, Any]:
        """Return what a replica behind takes over; "param_groups" exempts moments, empty at first, from checks."""
        tensors, _ = collect(self._pipeline, self._optimizer)
        weights = {name: x for name, x in tensors.items() if name.startswith("model/")}
        moments = {name: x for name, x in tensors.items() if name.startswith("optimizer/")}
        return {"model": weights, "optimizer": {"state": moments, "param_groups": []}}

    def _load(self, states: dict[str, Any]) -> None:
        done = self.manager.current_step()
        log.warning("step %d: taking over the weights of another replica", done + 1)
        moments = {name: x.clone() for name, x in states["optimizer"]["state"].items()}
        restore(self._pipeline, self._optimizer, states["model"] | moments, {}, steps=done)
