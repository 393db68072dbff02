"""Run the calls on a process group one after the other on a separate thread, and check that all ranks make the same.

All ranks agree on a new kind of call (shape, dtype, codec, algorithm, ...) before its first byte. Any call that takes
long checks whether another rank is in a different one, so that ranks whose programs diverge get the same error.
"""

import atexit
import concurrent.futures
import contextlib
import hashlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lowbit import __version__
from lowbit.collectives.exchange import CollectiveExchange, Marks, MessageExchange, PayloadExchange, Scratch
from lowbit.wire import pytorch
from lowbit.wire.agreement import Agreement
from lowbit.wire.checksum import Checksums, secret_facts
from lowbit.wire.errors import AgreementError
from lowbit.wire.failure import FailureBoard
from lowbit.wire.pytorch import rank_names

_IDLE = 5.0  # seconds without calls after which the threads of a queue end
_SLOW, _LOOK = 2.0, 0.5  # seconds until a call first checks whether the others are in the same one, and between checks
_LAST = 5.0  # seconds that a process waits for a call when it ends

TIMEOUT = 120.0
"""Seconds after which a missing or failed peer is an error."""

Transport = Literal["auto", "messages", "collectives"]


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call of a collective, on one rank.

    `facts`: everything that must be equal on all ranks; "collective" is the name of the call. `work`: the algorithm;
    the queue waits for its sends afterwards. `transport`: "auto" means messages if the backend has tags, which is Gloo
    between CPUs. `layer`: calls that differ only in it share an agreement; a rank in another layer is detected by the
    messages' tags or, without messages, by the checksums.
    """

    facts: Mapping[str, str]
    group: dist.ProcessGroup
    device: torch.device
    timeout: float
    work: Callable[[PayloadExchange], None]
    transport: Transport = "auto"
    layer: str = ""
    checksums: bool = True

    def __post_init__(self) -> None:
        if self.transport == "messages" and not self._can_be_messages:
            raise ValueError(f"transport is 'messages', on {self.device}; allowed: tensors on the CPU in a Gloo group")

    @property
    def as_messages(self) -> bool:
        return self.transport != "collectives" and self._can_be_messages

    @property
    def _can_be_messages(self) -> bool:
        return self.device.type == "cpu" and pytorch.carries(self.group, "gloo", self.device)

    @property
    def stated(self) -> dict[str, str]:
        transport = "messages" if self.as_messages else "collectives"
        return {**self.facts, "transport": transport, "checksums": "on" if self.checksums else "off"}


@dataclass
class _Job:
    call: CollectiveCall
    number: int
    future: concurrent.futures.Future[None]
    inference: bool
    event: torch.cuda.Event | None = None  # on CUDA: recorded after the caller's work so far, later after this work
    stream: torch.cuda.Stream | None = None
    started: float = 0.0
    compared: Agreement | None = None  # checks whether the other ranks are in the same call
    board: FailureBoard | None = None

    def agreement(self) -> Agreement:
        return Agreement(self.call.group, f"collective call/{self.number}", self.call.timeout)

    def facts(self) -> dict[int, dict[str, str]]:
        common = {"lowbit version": __version__, **secret_facts()}
        return {self.call.group.rank(): common | self.call.stated | {"layer": self.call.layer}}


class Pending:
    """A call in progress; do not touch its tensors before `wait` has returned."""

    def __init__(self, job: _Job) -> None:
        self._future, self._device = job.future, job.call.device
        self._event, self._stream = job.event, job.stream
        # On CUDA, the call's packed copies must stay until the work that reads them has been waited for.
        self._call: CollectiveCall | None = job.call

    def wait(self) -> None:
        """Wait for the result (on CUDA: make the current stream wait for it); raises the errors of the call."""
        self._future.result()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._call = None

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def then(self, act: Callable[[BaseException | None], None]) -> None:
        """Call `act` with the error or None once the call is over, on the thread (on CUDA: stream) that ends it."""

        def over(future: concurrent.futures.Future[None]) -> None:
            with torch.cuda.stream(self._stream):  # does nothing if it is None
                act(future.exception())

        self._future.add_done_callback(over)


class CallQueue:
    """All calls of this process on one group, in order. It must not reference the group, its key in `_queues`."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: _Job | None = None
        self._calls = 0
        self._kinds: set[str] = set()
        self._slow: list[Agreement] = []
        self._failure: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.threads: list[threading.Thread] = []

    def submit(self, call: CollectiveCall) -> Pending:
        with self._lock:
            job = _Job(call, self._calls, concurrent.futures.Future(), torch.is_inference_mode_enabled())
            if call.device.type == "cuda":
                job.stream = self._streams.get(call.device) or torch.cuda.Stream(call.device)
                self._streams[call.device] = job.stream
                job.event = torch.cuda.Event()
                job.event.record(torch.cuda.current_stream(call.device))
            self._calls += 1
            if self._failure is not None:  # the thread may still wait for what will not come
                job.future.set_exception(self._failure)
                return Pending(job)
            self.jobs.put(job)
            if self not in _busy:
                _busy.add(self)
                ended = threading.Event()
                self.threads = [
                    threading.Thread(target=target, args=(ended,), name=f"lowbit-{name}", daemon=True)
                    for name, target in (("calls", self._work), ("watch", self._watch))
                ]
                for thread in self.threads:
                    thread.start()
        return Pending(job)

    def _work(self, ended: threading.Event) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=_IDLE)
            except queue.Empty:
                job = None
            if job is not None:
                future, error = job.future, self._do(job)
                # The caller continues from here. If it destroyed the group while this thread holds a reference, the
                # destructor would run on this thread, and wait with the interpreter's lock for threads that need it.
                del job
                _settle(future, error)
                del future, error
                continue
            with self._lock:
                if self.jobs.empty():
                    _busy.discard(self)
                    ended.set()
                    return

    def _do(self, job: _Job) -> BaseException | None:
        job.started = time.monotonic()
        self._current = job
        try:
            if self._failure is not None:
                raise self._failure
            try:
                exchange = self._exchange(job)
            except AgreementError as error:
                # Another rank may be inside a call that it knew, which it can only leave by an error that lasts.
                self._failure = error
                raise
            # Use the caller's inference mode: only in it may the caller's tensors be written to.
            with torch.inference_mode(job.inference), torch.no_grad(), _on_stream(job):
                try:
                    job.call.work(exchange)
                    exchange.finish()
                except BaseException as error:
                    # Bytes of this call may still be under way, so no later call could be trusted.
                    self._failure = self._failure or error
                    raise
        except BaseException as error:
            return error
        finally:
            self._current = None
            self.scratch.reset()
        return None

    def _exchange(self, job: _Job) -> PayloadExchange:
        """Agree with all ranks on a new kind of call, and return the exchange for the call's payloads."""
        call, names = job.call, rank_names(job.call.group)
        kind = hashlib.sha256(repr(sorted(call.stated.items())).encode()).hexdigest()
        if kind not in self._kinds:
            job.compared = job.agreement()
            job.compared.exchange(job.facts(), names)
            self._kinds.add(kind)
        topic = f"collective/{kind}/{call.layer}/{job.number}"
        about = f"{call.facts['collective']}, call {job.number}"
        marks = Marks(Checksums(topic, enabled=call.checksums), about, names)
        if not call.as_messages:
            return CollectiveExchange(call.group, call.device, self.scratch, marks, call.timeout)
        digest = hashlib.sha256((kind + call.layer).encode()).hexdigest()
        job.board = FailureBoard(call.group, f"collective/{job.number}", names, call.timeout)
        return MessageExchange(call.group, call.device, self.scratch, marks, job.board, int(digest[:8], 16))

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK):
            job = self._current
            if job is not None and time.monotonic() - job.started > _SLOW:
                with contextlib.suppress(RuntimeError, TimeoutError):  # the store is gone: the call will notice
                    self._look(job)
                    # A rank that has given up on another will send nothing more.
                    if job.board and not job.future.done() and (rank := job.board.given_up()) is not None:
                        error = job.board.blame(rank, None)
                        self._failure = self._failure or error
                        _settle(job.future, error)

    def _look(self, job: _Job) -> None:
        """Fail a call if others are in a different one: its thread stays blocked, but its caller gets the error."""
        if job.compared is None:
            job.compared = job.agreement()
            self._slow.append(job.compared)
            while len(self._slow) > 2:  # calls before these are over on all ranks
                self._slow.pop(0).forget()
        elif job.compared not in self._slow:  # all ranks have agreed on it, or are about to
            return
        try:
            job.compared.look(job.facts(), rank_names(job.call.group))
        except AgreementError as error:
            self._failure = error
            _settle(job.future, error)


_queues: weakref.WeakKeyDictionary[dist.ProcessGroup, CallQueue] = weakref.WeakKeyDictionary()
_queues_lock = threading.Lock()
_busy: set[CallQueue] = set()  # queues with running threads, even after their group has ended


@atexit.register
def _end_all() -> None:
    """End all threads: one that is inside PyTorch when the interpreter ends would abort the process."""
    for calls in list(_busy):
        calls.jobs.put(None)
        for thread in calls.threads:  # those that wait for a peer may stay
            thread.join(_LAST)


def queue_of(group: dist.ProcessGroup) -> CallQueue:
    """Return the queue of a group, created at its first use."""
    with _queues_lock:
        return _queues.setdefault(group, CallQueue())


def payload_bytes() -> int:
    """Bytes of memory that this process keeps for payloads of later calls, on all groups."""
    with _queues_lock:
        return sum(calls.scratch.nbytes() for calls in _queues.values())


@contextlib.contextmanager
def _on_stream(job: _Job) -> Iterator[None]:
    """Run CUDA work on a separate stream that first waits for the caller's work so far."""
    if job.event is None or job.stream is None:
        yield
        return
    with torch.cuda.device(job.call.device), torch.cuda.stream(job.stream):
        job.stream.wait_event(job.event)
        yield
        job.event.record(job.stream)  # safe to record again: callers wait for it only once the future is done


def _settle(future: concurrent.futures.Future[None], error: BaseException | None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_result(None) if error is None else future.set_exception(error)
