"""torchft: averages over replicas that come and go, in few bits.

`LowBitManager` is torchft's `Manager` with another `allreduce`. Everything that torchft builds on it works unchanged:
`DistributedDataParallel`, `OptimizerWrapper`, `LocalSGD`, `DiLoCo` with fragments, and process groups for FSDP.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit import __version__, escape
from lowbit.codecs.base import Codec
from lowbit.codecs.checks import FLOATS
from lowbit.collectives.calls import Pending
from lowbit.collectives.reduce import SMALL, all_reduce, check_call, check_flat
from lowbit.escape import shown
from lowbit.integrations import engine
from lowbit.wire.agreement import Facts, listed
from lowbit.wire.errors import AgreementError
from lowbit.wire.store import bounded

__all__ = ["LowBitManager"]

_log = escape.logger(__name__)

_engine = functools.partial(engine, package="torchft-nightly", extra="ft", tested="2026.10.26")
_Manager: Any = _engine("torchft.manager", "Manager._reconfigure_pg", "Manager._apply_pending_state_dict").Manager
_Wrapper: Any = _engine("torchft.process_group", "ProcessGroupWrapper.get_reconfigure_handle").ProcessGroupWrapper

_FACTS = "lowbit/facts"  # key in the store to which a replica's handle points
_OTHER_MANAGER = {"manager": "another one"}  # facts of a replica that publishes none
_READ_SECONDS, _STAYING_SECONDS = 10.0, 2.0  # to read the facts of another replica if this one leaves, or if it stays


class LowBitManager(_Manager):
    """torchft's `Manager`, whose `allreduce` sums floats by `lowbit.collectives.all_reduce`.

    The sum is over the replicas that take part in a step, and bit-identical on all of them. Integers, floats of other
    dtypes, and operations other than sums and averages are left to torchft.

    With error feedback each replica adds the quantization errors of a committed step to the same call of the next step.
    This remains correct when replicas come and go: errors of a discarded step are dropped and the older ones used
    again, errors are scaled by the number of replicas that share them, and a replica that takes the weights of another
    starts without any. Calls are identified by their order in a step, in `DiLoCo` for each fragment, so replicas must
    make the same calls in the same order, as torchft requires anyway.

    When the members change, replicas compare version, format and the names, shapes and dtypes in the registered
    `state_dict`s (without optimizer states), before they connect. Replicas that contradict the majority end with an
    error; the others lose one step and continue. A digest of these facts travels in torchft's messages, which it logs
    at each step; the facts themselves are read from a replica's store only if digests differ.

    Args:
        pg: torchft's process group: `ProcessGroupGloo`, or `ProcessGroupNCCL` (not tested).
        codec: a format for gradients, such as `GroupInt(bits=4, group=64, symmetric=True)`.
        error_feedback: see above; takes 8 bytes for each element that is summed in a step.
        small: tensors with fewer elements are summed in float32. `DiLoCo(use_bucketization=True)` sums few large ones.
        checksums: as for `all_reduce`.
        facts: further facts that must be the same on all replicas, such as the learning rate.
        arguments: those of torchft's `Manager`. `timeout` also limits each sum: a missing replica fails the step after
            this time, or at once if its connection closes.

    Raises:
        TypeError, ValueError: an argument that is not allowed.
        ConnectionError: torchft cannot reach its lighthouse or store.
        AgreementError: from `allreduce` and `should_commit`, on a replica that contradicts the others.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        *arguments: Any,
        codec: Codec,
        error_feedback: bool = False,
        small: int = SMALL,
        checksums: bool = True,
        facts: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        check_flat(codec)
        check_call(codec, small=small, checksums=checksums)
        if not isinstance(error_feedback, bool):
            raise TypeError(f"error_feedback is {shown(error_feedback)}; allowed: True or False")
        self._how: dict[str, Any] = {"codec": codec, "small": small, "checksums": checksums}
        self._feedback = _Feedback() if error_feedback else None
        self._more_facts = dict(facts or {})
        self._facts, self._facts_at = "", ""  # as JSON; address of the store where others read them
        self._refused: AgreementError | None = None
        try:
            super().__init__(_Group(pg, self), *arguments, **more)
        except (RuntimeError, TimeoutError) as error:
            reason = escape.one_line(str(error).splitlines()[0])
            raise ConnectionError(
                f"torchft's manager does not start: {reason}; allowed: the address of a running lighthouse "
                "(lighthouse_addr or TORCHFT_LIGHTHOUSE) and of this replica's store"
            ) from error

    def sum_(self, tensor: Tensor) -> Pending:
        """Start to replace a tensor by its sum over all replicas; called by the group behind `allreduce`."""
        rest = None
        if self._feedback is not None:
            fragments = sum(key.startswith("StreamingDiLoCoFragment_") for key in self._user_state_dicts)
            fragment = self.current_step() % max(1, fragments)
            rest = self._feedback.of(tensor, fragment, self.num_participants())
            if not self._healing:
                tensor.add_(rest)
        pending = all_reduce(
            tensor, group=self._pg, async_op=True, errors=rest, timeout=self._timeout.total_seconds(), **self._how
        )
        assert pending is not None
        return pending

    def start_quorum(self, *arguments: Any, **more: Any) -> None:
        if self._feedback is not None:
            self._feedback.begin()
        if not self._facts:
            states = {key: get() for key, get in self._user_state_dicts.items()}
            facts = {
                "manager": "LowBitManager", "lowbit version": __version__, "codec": self._how["codec"].identity(),
                "small": str(self._how["small"]), "checksums": str(self._how["checksums"]),
                "error feedback": "yes" if self._feedback else "no",
                "model": _digest(json.dumps(sorted(_tensors(states, "")))), **self._more_facts,
            }  # fmt: skip
            self._facts = json.dumps(facts, sort_keys=True)
        super().start_quorum(*arguments, **more)

    def wait_quorum(self) -> None:
        super().wait_quorum()
        if self._refused is not None:
            raise self._refused

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self.wait_quorum()
        committed = super().should_commit(timeout)
        if self._feedback is not None:
            self._feedback.settle(committed, self.num_participants())
        return committed

    def stated(self, handle: Mapping[str, Any]) -> dict[str, Any]:
        """The facts that this replica adds to its torchft handle when it asks for a quorum."""
        if self._facts_at != handle["store"]:
            bounded(lambda: _store(handle["store"], _READ_SECONDS).set(_FACTS, self._facts), _READ_SECONDS)
            self._facts_at = handle["store"]
        name = str(self._replica_id or self._logger._replica_id)
        return {"name": name, "facts": _digest(self._facts), "batches": self.batches_committed()}

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        """Compare facts with the replicas of a new quorum, then connect to them; an error fails the step."""
        stated = [_Stated.read(handle, place) for place, handle in enumerate(handles)]
        stays, leave = _contradiction(stated)
        if leave:
            refused = any(each.handle == self._pg._handle_id() for each in leave)
            seconds = _READ_SECONDS if refused else _STAYING_SECONDS
            differences = _differences(stays, leave, lambda each: each.whole(seconds))
            names = listed([each.name for each in leave])
            error = AgreementError(f"replicas do not agree, and {names} must leave: {differences}")
            if refused:
                self._refused = error
            raise error
        names = [each.name for each in stated]
        if again := sorted({name for name in names if names.count(name) > 1}):
            _log.warning(
                "several replicas are called %s; allowed: unique names, so that each replica gets its own data",
                listed(again),
            )
        super()._reconfigure_pg(communicator_id, handles)

    def _apply_pending_state_dict(self) -> None:
        super()._apply_pending_state_dict()
        if self._feedback is not None:
            self._feedback.clear()


class _Group(_Wrapper):
    """torchft's group with sums in few bits, on which `Manager.allreduce` and its averages are built."""

    def __init__(self, pg: dist.ProcessGroup, manager: LowBitManager) -> None:
        super().__init__(pg=pg)
        self._manager = manager

    def get_reconfigure_handle(self) -> str:
        """Return the handle, which torchft logs and sends to all replicas with each quorum."""
        handle = json.loads(super().get_reconfigure_handle())
        return json.dumps(handle | {"lowbit": self._manager.stated(handle)})

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        if len(tensors) != 1 or tensors[0].dtype not in FLOATS or opts.reduceOp != dist.ReduceOp.SUM:
            return super().allreduce(tensors, opts)
        return _Work(self._manager.sum_(tensors[0]), tensors[0])


class _Work(dist._Work):  # pyright: ignore[reportPrivateImportUsage]
    def __init__(self, pending: Pending, tensor: Tensor) -> None:
        super().__init__()
        self._pending = pending
        devices: list[Any] = [tensor.device] if tensor.is_cuda else []
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)

        def settle(error: BaseException | None) -> None:
            self._future.set_result([tensor]) if error is None else self._future.set_exception(error)  # pyright: ignore

        pending.then(settle)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True

    def block_current_stream(self) -> None:
        self._pending.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Feedback:
    """Quantization errors of committed steps, float32, for each call of a step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._new: dict[tuple[int, ...], Tensor] = {}
        self._replicas: dict[tuple[int, ...], int] = {}  # number that shared a mean when its errors were kept
        self._calls = 0

    def begin(self) -> None:
        """Begin a step; errors that an earlier step has not settled are dropped."""
        self._calls = 0
        self._new.clear()

    def of(self, tensor: Tensor, fragment: int, replicas: int) -> Tensor:
        """The errors for which this step's next call compensates; `all_reduce` then overwrites them with its own.

        A mean of n replicas lacks 1 / n of an error, for which a later mean of m replicas compensates with m / n.
        """
        key = (fragment, self._calls, tensor.numel())
        self._calls += 1
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape:
            new = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
        else:
            new = kept * (replicas / self._replicas[key])
        self._new[key] = new
        return new

    def settle(self, committed: bool, replicas: int) -> None:
        if committed:
            self._kept |= self._new
            self._replicas |= dict.fromkeys(self._new, replicas)
        self._new = {}

    def clear(self) -> None:
        """Drop all errors, because the weights now come from another replica and the errors belong to the old ones."""
        self._kept.clear()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _store(address: str, seconds: float) -> TCPStore:
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=seconds)
    return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)


def _tensors(value: Any, name: str) -> Iterator[str]:
    """Names, shapes and dtypes of all tensors in nested dictionaries, except those of optimizers."""
    if isinstance(value, Tensor):
        yield f"{name}: {value.dtype} {tuple(value.shape)}"
    elif isinstance(value, Mapping) and not {"state", "param_groups"} <= set(value):
        for key in value:
            yield from _tensors(value[key], f"{name}/{key}")


@dataclass(frozen=True)
class _Stated:
    """The content of a replica's handle: its name, committed batches, the id of its torchft handle, and its facts.

    Attributes:
        facts: their digest; empty if the replica publishes none. store: "host:port" of the store that has them.
    """

    name: str
    facts: str
    batches: int
    handle: str
    store: str

    @classmethod
    def read(cls, handle: str, place: int) -> "_Stated":
        """Parse a handle, which may come from an untrusted sender."""
        try:
            value = json.loads(handle)
            said = value["lowbit"]
            return cls(
                str(said["name"]), str(said["facts"]), int(said["batches"]), str(value["id"]), str(value["store"])
            )
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            return cls(f"replica {place} of the quorum", "", 0, "", "")

    def whole(self, seconds: float) -> Facts:
        """The facts themselves, from the replica's store; empty if they do not match the digest."""
        if not self.facts:
            return _OTHER_MANAGER
        try:
            text = bounded(lambda: _store(self.store, seconds).get(_FACTS), seconds).decode()
            facts = json.loads(text) if _digest(text) == self.facts else {}
            return {str(name): str(fact) for name, fact in facts.items()}
        except (RuntimeError, ValueError, TypeError, AttributeError, OSError, OverflowError):
            return {}


def _contradiction(stated: Sequence[_Stated]) -> tuple[_Stated, list[_Stated]]:
    """Return one of the replicas that stay, and the replicas that must leave.

    The replicas with the most common facts stay; on a tie, those with more committed batches, then the first.
    """
    kinds = [each.facts for each in stated]
    count, most = Counter(kinds), dict.fromkeys(kinds, 0)
    for each in stated:
        most[each.facts] = max(most[each.facts], each.batches)
    place = max(range(len(stated)), key=lambda place: (count[kinds[place]], most[kinds[place]], -place))
    return stated[place], [each for each in stated if each.facts != kinds[place]]


def _differences(stays: _Stated, leave: Sequence[_Stated], whole: Callable[[_Stated], Facts]) -> str:
    """Describe the facts in which replicas contradict the others; facts are read once for each digest."""
    common = whole(stays)
    kinds = {each.facts: each for each in leave}
    facts = {kind: whole(each) for kind, each in kinds.items()} if common else {}
    differences = []
    for name, value in common.items():
        for other in sorted({facts[kind][name] for kind in kinds if name in facts[kind]} - {value}):
            names = listed([each.name for each in leave if facts[each.facts].get(name) == other])
            differences.append(f"{name} is {other} on {names}, {value} on the others")
    for kind in kinds:
        names = listed([each.name for each in leave if each.facts == kind])
        if not (common and facts[kind]):
            differences.append(f"the facts of {names if common else 'the others'} cannot be read")
        elif _OTHER_MANAGER not in (common, facts[kind]) and (missing := set(common) ^ set(facts[kind])):
            differences.append(f"{listed(sorted(missing))} is stated by {names} or by the others, not by both")
    return "; ".join(dict.fromkeys(differences))
