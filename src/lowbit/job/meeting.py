"""Let the ranks of a run meet at one store (torchrun's, our launcher's, or rank 0's), and prove that they belong to it.

Anybody can write to a store. So before anything else each rank proves to all others that it knows the run's secret, and
nothing that ranks read there is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import Store, TCPStore

from lowbit.config import ConfigError
from lowbit.wire.checksum import SECRET, run_secret
from lowbit.wire.store import bounded, of_attempt, wait_until

log = logging.getLogger(__name__)

_kept: dict[tuple[str, int], TCPStore] = {}  # stores that this process hosts until it ends, by address
_LOOPBACK = ("127.", "localhost", "::1")
_QUIET_SECONDS = 5.0  # seconds of waiting for other machines before a log line reports it


class MeetingError(ConnectionError):
    """The ranks did not meet, or some (`strangers`) do not know this run's secret."""

    strangers: tuple[int, ...] = ()


class AloneError(MeetingError):
    """Other ranks did not come within the time that this one waits for them."""

    alone = True


def launcher_keeps_store() -> bool:
    """Whether torchrun or our launcher hosts the store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def new_secret() -> str:
    """Return a secret for a run whose ranks are all started here."""
    return os.environ.get(SECRET) or secrets.token_hex(32)


def listen(host: str, port: int, timeout: float) -> TCPStore:
    """Host a store, on one interface only; port 0 lets the system choose. `timeout`: of calls that wait.

    Raises:
        OSError: the port is in use, or this machine cannot listen on the address.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if str(address[0]).startswith("127.") and not host.startswith(_LOOPBACK):
        log.warning("%s is %s here: no other machine can reach this store", host, address[0])
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            log.warning("%s is not an address of this machine: listening on all of its interfaces", host)
            everywhere, host = ("::", "::1") if family == socket.AF_INET6 else ("0.0.0.0", "127.0.0.1")
            listener.bind((everywhere, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    return TCPStore(
        host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout), master_listen_fd=listener.detach(),
    )  # fmt: skip


def meet(rank: int, ranks: int, *, timeout: float, patience: float, number: int = 0) -> Store:
    """Wait for this run's store and return it, once one answers in which this rank has not joined yet.

    Args:
        timeout: seconds for each later call that waits. patience: seconds to wait for the store.
        number: how many meetings this process has had before; the same on all ranks.

    Raises:
        ConfigError: MASTER_PORT is not a valid port.
        AloneError: no such store answered in time.
        MeetingError: this process cannot host the store there.
    """
    if rank == 0:
        _warn_without_secret()
    deadline = time.monotonic() + patience
    hello, left = secrets.token_hex(16).encode(), patience
    quiet = True
    while True:
        try:
            store = reach(rank, timeout=timeout, patience=left, number=number)
            claim = partial(store.compare_set, f"hello/{rank}", "", hello.decode())
            if bounded(claim, max(1.0, left)) == hello:
                return store
            # An attempt that is about to end, or a rank that was started twice: wait for another store.
            reason = f"another process has joined as rank {rank} already; was it started twice?"
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
        left = deadline - time.monotonic()
        if left <= 0:
            raise _alone(rank, ranks, patience, reason)
        if quiet and left < patience - _QUIET_SECONDS:
            log.warning("rank %d waits up to %.0f s for rank 0 at %s: %s", rank, left, _where(), reason)
            quiet = False
        time.sleep(min(0.5, left))


def reach(rank: int, *, timeout: float, patience: float, number: int = 0) -> Store:
    """Connect once to this run's store at MASTER_ADDR and MASTER_PORT, and return its part for this attempt.

    TimeoutError: no store answered there in time; others as `meet`.
    """
    host, port = os.environ["MASTER_ADDR"], master_port()
    if rank or launcher_keeps_store():
        store = _connected(host, port, timeout, patience)
    elif (host, port) in _kept:
        store = _kept[host, port]
    else:
        try:
            store = listen(host, port, timeout)
        except OSError as error:
            reason = error.strerror or error
            raise MeetingError(f"rank 0 cannot listen at {_where()}: {reason}") from error
        if port:
            _kept[host, port] = store
    return of_attempt(store, f"{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}/{number}")


def prove(
    store: Store, rank: int, ranks: int, *, secret: bytes, patience: float, known: Callable[[str], None] | None = None
) -> str:
    """Prove to all other ranks that this one knows the secret, and check their proofs; every rank calls this.

    A proof is a keyed hash (HMAC-SHA256) of all ranks' random numbers (`meet`) and the rank: what was written for
    another run or by another rank proves nothing. Returns the name of this attempt, a digest of the
    numbers; `known` is called with it before the other ranks can see that this one knows it.

    Raises:
        AloneError: a rank did not come in time.
        MeetingError: a rank does not know the secret, or has already met other ranks at the same store.
    """
    numbers = _everybody(store, "hello", rank, ranks, patience)
    run = hashlib.sha256(b"|".join(numbers)).digest()
    if known is not None:
        known(run.hex())
    store.set(f"proof/{rank}", _proof(secret, run, rank))
    proofs = _everybody(store, "proof", rank, ranks, patience)
    strangers = tuple(
        r for r, proof in enumerate(proofs) if not hmac.compare_digest(proof, _proof(secret, run, r).encode())
    )
    if strangers:
        names = ", ".join(f"rank {r}" for r in strangers)
        error = MeetingError(
            f"{names} did not prove knowledge of this run's secret to rank {rank}; "
            f"allowed: the same {SECRET} on all machines"
        )
        error.strangers = strangers
        raise error
    return run.hex()


def _proof(secret: bytes, run: bytes, rank: int) -> str:
    return hmac.new(secret, run + str(rank).encode(), hashlib.sha256).hexdigest()


def _everybody(store: Store, name: str, rank: int, ranks: int, patience: float) -> list[bytes]:
    """Wait until every rank has written its key of this name, and return the values in the order of the ranks."""
    keys = [f"{name}/{r}" for r in range(ranks)]
    left = patience
    if patience > _QUIET_SECONDS and not wait_until(lambda: store.check(keys), _QUIET_SECONDS):
        left -= _QUIET_SECONDS
        absent = ", ".join(f"rank {r}" for r, key in enumerate(keys) if not store.check([key]))
        log.warning("rank %d waits up to %.0f s for %s to come to %s", rank, left, absent or "others", _where())
    if not wait_until(lambda: store.check(keys), left):
        missing = ", ".join(f"rank {r}" for r, key in enumerate(keys) if not store.check([key]))
        raise _alone(rank, ranks, patience, f"{missing} did not join")
    return [bytes(value) for value in store.multi_get(keys)]


def _connected(host: str, port: int, timeout: float, patience: float) -> TCPStore:
    limit = max(0.1, min(timeout, patience))
    wait = timedelta(seconds=limit)
    connect = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=wait)
    try:
        # While it waits for a listener, PyTorch prints warnings all the time.
        socket.create_connection((host, port), timeout=min(5.0, limit)).close()
        # The kernel accepts connections for a stopped process; PyTorch would then wait forever for the first answer.
        store = bounded(connect, limit)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TimeoutError(f"nobody answers there ({reason})") from None
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _warn_without_secret() -> None:
    if not run_secret() and not os.environ["MASTER_ADDR"].startswith(_LOOPBACK):
        text = "%s is not set: whoever reaches %s can take part in this run (docs/security.md)"
        log.warning(text, SECRET, _where())


def _alone(rank: int, ranks: int, patience: float, reason: str) -> AloneError:
    return AloneError(f"rank {rank} did not meet all {ranks} ranks at {_where()} within {patience:g} s: {reason}")


def _where() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def master_port() -> int:
    """MASTER_PORT as a number; ConfigError unless it is an integer from 0 to 65535."""
    text = os.environ["MASTER_PORT"]
    with contextlib.suppress(ValueError):
        if 0 <= int(text) <= 65535:
            return int(text)
    raise ConfigError(f"MASTER_PORT is {text!r}; allowed: 0 to 65535")
