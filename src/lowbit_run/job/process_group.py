"""Join the other ranks: meet at one store, prove to belong to the run, connect, and form the process group.

The store is torchrun's, our launcher's, or rank 0's, and anybody can write to it. So before anything else each rank
proves to all others that it knows the run's secret, and nothing that ranks read there is ever unpickled.
"""

import contextlib
import errno
import fcntl
import hashlib
import hmac
import itertools
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from lowbit import escape
from lowbit.escape import Printable, one_line, printable
from lowbit.wire.checksum import ATTEMPT, SECRET, begin_attempt, run_secret
from lowbit.wire.pytorch import default_group, next_round
from lowbit.wire.store import bounded, of_attempt, peek, wait_until
from lowbit_run.config import ConfigError
from lowbit_run.job.peers import Peers, launcher_keeps_store
from lowbit_run.job.refusal import Listener

log = escape.logger(__name__)

_kept: dict[tuple[str, int], TCPStore] = {}  # stores that this process hosts until it ends, by address
_LOOPBACK = ("127.", "localhost", "::1")
_TRY_SECONDS = 8.0  # of the first try to reach the store
_QUIET_SECONDS = 5.0  # seconds of waiting for other machines before a log line reports it
_HEAR_SECONDS = 0.5  # between looks for the reasons why a rank does not come
_ELSEWHERE_SECONDS = 3.0  # between looks for another rank 0
_ANSWER_SECONDS = 2.0  # for another rank 0 to answer
_STORE_SECONDS = 60.0  # of calls that wait, until the ranks meet


class MeetingError(Printable, ConnectionError):
    """The ranks did not meet, or some (`strangers`) do not know this run's secret."""

    strangers: tuple[int, ...] = ()


class AloneError(MeetingError):
    """Other ranks did not come within the time that this one waits for them."""

    alone = True


class InterfaceError(ConfigError):
    """A rank names a network interface that Gloo cannot use; the same text on every rank."""

    on_all_ranks = True


class SizeError(ConfigError):
    """Ranks have different values of WORLD_SIZE; both learn it."""

    on_all_ranks = True


class MisplacedError(ConfigError):
    """This machine is another than that of rank 0, and its RANK is 0; the true rank 0 still waits for this one."""

    told = on_all_ranks = True


def new_secret() -> str:
    """Return a secret for a run whose ranks are all started here."""
    return os.environ.get(SECRET) or secrets.token_hex(32)


def listen(host: str, port: int, timeout: float) -> TCPStore:
    """Host a store, on one interface only; OSError: the port is in use, or this machine cannot listen there.

    `port`: 0 lets the system choose. `timeout`: of calls that wait.
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
            log.warning(
                "%s is not an address of this machine: listening on all of its interfaces, for those who reach them by "
                "it; on all machines except rank 0's, set RANK=1 or more", host,
            )  # fmt: skip
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

    `timeout`: seconds for each later call that waits. `patience`: seconds to wait for the store. `number`: how many
    meetings this process has had before; the same on all ranks. AloneError: no such store answered in time.
    """
    if rank == 0 and not run_secret() and not os.environ["MASTER_ADDR"].startswith(_LOOPBACK):
        text = "%s is not set: whoever reaches %s can take part in this run (docs/security.md)"
        log.warning(text, SECRET, _where())
    _look_up(rank, os.environ["MASTER_ADDR"])
    deadline = time.monotonic() + patience
    hello, left = f"{secrets.token_hex(16)}/{ranks}".encode(), patience
    quiet = True
    while True:
        try:
            # Another program there may accept connections and say nothing: a try is as long as all before it together.
            limit = min(left, max(_TRY_SECONDS, patience - left))
            store = reach(rank, timeout=timeout, patience=limit, number=number)
            claim = partial(store.compare_set, f"hello/{rank}", "", hello.decode())
            if bounded(claim, max(1.0, deadline - time.monotonic())) == hello:
                return store
            # An attempt that is about to end, or a rank that was started twice: wait for another store.
            reason = f"another process has joined as rank {rank} already; was it started twice?"
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
        left = deadline - time.monotonic()
        if left <= 0:
            raise _alone(rank, ranks, patience, reason)
        if quiet and left < patience - _QUIET_SECONDS:
            here = ""
            if os.environ.get("LOCAL_WORLD_SIZE") == "1" and is_own(os.environ["MASTER_ADDR"]):
                here = f"; {os.environ['MASTER_ADDR']} is this machine: if no other process here is rank 0, set RANK=0"
            log.warning("rank %d waits up to %.0f s for rank 0 at %s: %s%s", rank, left, _where(), reason, here)
            quiet = False
        time.sleep(min(0.5, left))


def _look_up(rank: int, host: str) -> None:
    """Report at once that a name leads nowhere, though the ranks wait: it may have been mistyped, or be new."""
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError:
        raise ConfigError(f"MASTER_ADDR is {host!r}; allowed: an address or the name of a machine") from None
    except OSError as error:
        log.warning("rank %d cannot look up MASTER_ADDR, %r: %s", rank, host, error.strerror)


def reach(rank: int, *, timeout: float, patience: float, number: int = 0) -> Store:
    """Connect once to this run's store, and return its part for this attempt; TimeoutError, or errors as of `meet`."""
    host, port = os.environ["MASTER_ADDR"], master_port()
    if rank or launcher_keeps_store():
        limit = max(0.1, min(timeout, patience))
        connect = partial(TCPStore, host, port, wait_for_workers=False, timeout=timedelta(seconds=limit))
        try:
            # While it waits for a listener, PyTorch prints warnings all the time.
            socket.create_connection((host, port), timeout=min(5.0, limit)).close()
            # The kernel accepts connections for a stopped process; PyTorch would wait forever for the first answer.
            store = bounded(connect, limit)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TimeoutError(f"nobody answers there ({reason})") from None
        store.set_timeout(timedelta(seconds=timeout))
    elif (host, port) in _kept:
        store = _kept[host, port]
        store.set_timeout(timedelta(seconds=timeout))
    else:
        if not is_own(host) and _answers(host, port):
            raise _misplaced()
        try:
            store = listen(host, port, timeout)
        except OSError as error:
            reason = error.strerror or error
            taken = "; allowed: a free MASTER_PORT, and one rank 0 (RANK is 0 here)" if port else ""
            raise MeetingError(f"rank 0 cannot listen at {_where()}: {reason}{taken}") from error
        if port:
            _kept[host, port] = store
    return of_attempt(store, f"{os.environ.get('TORCHELASTIC_RESTART_COUNT') or 0}/{number}")


def open_store() -> None:
    """Let rank 0 of several machines keep its store from now on, before it reads text and settings.

    So ranks that refuse theirs meanwhile can say so and leave (`decline`), though rank 0 is not ready to meet.
    """
    rank, ranks = world()
    if rank == 0 and ranks > 1 and not (dist.is_initialized() or launcher_keeps_store()) and master_port():
        reach(0, timeout=_STORE_SECONDS, patience=_STORE_SECONDS)


def is_own(host: str) -> bool:
    """Whether a name or an address is one of this machine."""
    with contextlib.suppress(OSError, UnicodeError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    return False


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWER_SECONDS):
        return True
    return False


def _misplaced() -> MisplacedError:
    return MisplacedError(
        f"RANK is 0, and MASTER_ADDR is {os.environ['MASTER_ADDR']!r}, another machine, where a rank 0 answers; "
        "allowed here: set RANK=1, or the next number that is free"
    )


def _check_place(store: Store) -> None:
    """Raise MisplacedError if another rank 0 answers where this one listens in vain; through a NAT it may be itself."""
    try:
        other = reach(1, timeout=_ANSWER_SECONDS, patience=_ANSWER_SECONDS)
        first = bounded(partial(peek, other, "hello/0"), _ANSWER_SECONDS)
    except (RuntimeError, TimeoutError):
        return
    if first != peek(store, "hello/0"):
        raise _misplaced()


def _check_sizes(store: Store, rank: int, ranks: int) -> None:
    """Raise SizeError if WORLD_SIZE of rank 0 differs from this rank's, or on rank 0 that of any."""
    for other in range(ranks) if rank == 0 else (0,):
        size = peek(store, f"hello/{other}").rpartition(b"/")
        if size[1] and size[2].isdigit() and len(size[2]) < 9 and int(size[2]) != ranks:
            raise SizeError(
                f"WORLD_SIZE is {ranks} on rank {rank} and {int(size[2])} on rank {other}; allowed: the same everywhere"
            )


def prove(
    store: Store, rank: int, ranks: int, *, secret: bytes, patience: float, known: Callable[[str], None] | None = None
) -> str:
    """Prove to all other ranks that this one knows the secret, and check their proofs; every rank calls this.

    A proof is a keyed hash (HMAC-SHA256) of all ranks' random numbers (`meet`) and the rank: what was written for
    another run or by another rank proves nothing. Returns the name of this attempt, a digest of the
    numbers; `known` is called with it before the other ranks can see that this one knows it.

    AloneError: a rank did not come in time. MeetingError: a rank does not know the secret, or has already met others.
    """
    listener, foreign = Listener(store, rank, secret), rank == 0 and _is_foreign()
    due = [0.0, time.monotonic() + _ELSEWHERE_SECONDS]

    def hear() -> None:
        if time.monotonic() < due[0]:
            return
        due[0] = time.monotonic() + _HEAR_SECONDS
        listener.hear()
        _check_sizes(store, rank, ranks)
        if foreign and time.monotonic() > due[1]:
            _check_place(store)
            due[1] = time.monotonic() + _ELSEWHERE_SECONDS

    run = hashlib.sha256(b"|".join(_everybody(store, "hello", rank, ranks, patience, hear))).digest()
    _check_sizes(store, rank, ranks)
    if known is not None:
        known(run.hex())
    expected = [hmac.new(secret, run + str(r).encode(), hashlib.sha256).hexdigest() for r in range(ranks)]
    store.set(f"proof/{rank}", expected[rank])
    proofs = _everybody(store, "proof", rank, ranks, patience, hear)
    strangers = tuple(r for r in range(ranks) if not hmac.compare_digest(proofs[r], expected[r].encode()))
    if strangers:
        names = ", ".join(f"rank {r}" for r in strangers)
        error = MeetingError(
            f"{names} did not prove knowledge of this run's secret to rank {rank}; "
            f"allowed: the same {SECRET} on all machines"
        )
        error.strangers = strangers
        raise error
    return run.hex()


def _everybody(
    store: Store, name: str, rank: int, ranks: int, patience: float, hear: Callable[[], None] | None = None
) -> list[bytes]:
    """Wait until every rank has written its key of this name, and return the values in the order of the ranks.

    `hear` is called meanwhile, and may raise the reason why a rank does not come.
    """
    keys = [f"{name}/{r}" for r in range(ranks)]

    def come() -> bool:
        if store.check(keys):
            return True
        if hear is not None:
            hear()
        return False

    def missing() -> str:
        return ", ".join(f"rank {r}" for r, key in enumerate(keys) if not store.check([key]))

    left = patience
    if patience > _QUIET_SECONDS and not wait_until(come, _QUIET_SECONDS):
        left -= _QUIET_SECONDS
        log.warning("rank %d waits up to %.0f s for %s to come to %s", rank, left, missing() or "others", _where())
    if not wait_until(come, left):
        raise _alone(rank, ranks, patience, f"{missing()} did not join")
    return [bytes(value) for value in store.multi_get(keys)]


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


_meetings = itertools.count()  # numbers this process's meetings: each uses its own part of the store
_met = False  # whether the ranks of this process have met: from then on, all of them learn of errors
_CHOSEN = "GLOO_SOCKET_IFNAME"
_LEAVE_SECONDS = 5.0  # most seconds to destroy the group after an error
_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913  # Linux ioctls: get the IPv4 address, the flags of an interface
_UP = 1  # the flag of an interface that is not down
_LONGEST_NAME = 15  # bytes of an interface's name
_INTERFACES6 = Path("/proc/net/if_inet6")  # a line for each IPv6 address, with its scope and its interface at the end
_LINK_LOCAL = "20"  # the scope of addresses that lead nowhere without the name of an interface


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks, from the process group or the environment; (0, 1) without either."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if not is_launched():
        return 0, 1
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in names if os.environ.get(name)]
    if missing := [name for name in names if name not in present]:
        raise ConfigError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}; "
            "allowed: all (torchrun sets them) or none"
        )
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        text = f"RANK is {os.environ['RANK']!r} and WORLD_SIZE {os.environ['WORLD_SIZE']!r}; allowed: integers"
        raise ConfigError(text) from None
    if not 0 <= rank < ranks:
        raise ConfigError(f"RANK is {rank}; allowed with WORLD_SIZE {ranks}: 0 to {ranks - 1}")
    return rank, ranks


def is_launched() -> bool:
    """Whether the environment makes this process one rank of a run.

    Raises:
        ConfigError: it names several ranks without saying which one this is, so that this machine would train alone.
    """
    if os.environ.get("RANK"):
        return True
    if (ranks := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE is {one_line(ranks)} and RANK is not set; allowed: RANK=0 on the machine of MASTER_ADDR and "
            "RANK=1 or more on the others, or no WORLD_SIZE, to use this machine alone"
        )
    return False


@contextlib.contextmanager
def joined(timeout: float, *, backend: str = "gloo", patience: float | None = None) -> Iterator[None]:
    """Use the existing default process group, or make one from the environment for this block.

    Every wait has a limit: calls of the group and of its store have their own; for everything else a watchdog ends this
    process once another rank has been silent for `timeout` seconds or has failed (`lowbit_run.job.peers`).

    `backend`: "gloo" or "nccl" for tensors on GPUs; Gloo carries those on the CPU in either case. `patience`: seconds
    to wait for all ranks to come; None: `timeout`. ConnectionError: they did not, or a rank does not know the secret.
    PeerError: another rank was the cause of an error in the block.
    """
    global _met
    rank, ranks = world()
    if dist.is_initialized():
        group = default_group()
        unused = PrefixStore(f"lowbit/peers/{next_round(group, 'peers')}", group.get_group_store())
        with _watched(unused, rank, ranks, timeout):
            yield
        return
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    patience = patience or timeout
    alone = not is_launched()
    store = HashStore() if alone else meet(rank, ranks, timeout=timeout, patience=patience, number=next(_meetings))
    # By default Gloo uses the interface that the host's own name resolves to, from which peers are often unreachable.
    if not alone and not os.environ.get(_CHOSEN) and (name := interface_towards(os.environ["MASTER_ADDR"])):
        os.environ[_CHOSEN] = name
    try:
        with _watched(store, rank, ranks, timeout) as peers:
            if not alone:
                known = None if peers is None or ATTEMPT in os.environ else peers.enter
                begin_attempt(prove(store, rank, ranks, secret=run_secret(), patience=patience, known=known))
                _met = True
                if peers is not None:
                    peers.settle()
            _check_interfaces(store, rank, ranks, patience)
            connect(backend, PrefixStore("group", store), rank, ranks, timedelta(seconds=0.8 * timeout))
            yield
    except BaseException:
        with contextlib.suppress(Exception):  # destructors of a broken group can wait for peers that are gone
            bounded(dist.destroy_process_group, _LEAVE_SECONDS)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def have_met() -> bool:
    """Whether this process has met the other ranks of its run."""
    return _met


def _is_foreign() -> bool:
    """Whether rank 0 keeps its store here, and MASTER_ADDR is an address of another machine."""
    return "MASTER_ADDR" in os.environ and not launcher_keeps_store() and not is_own(os.environ["MASTER_ADDR"])


def connect(backend: str, store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    """Make the default group of all ranks that have met; MeetingError if they do not reach each other in time."""
    join = partial(dist.init_process_group, backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        bounded(join, limit.total_seconds())  # Gloo itself keeps trying for five times as long
    except (dist.DistError, RuntimeError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
        if not isinstance(error, TimeoutError) and not re.search("connect|timed? ?out", reason, re.IGNORECASE):
            raise MeetingError(f"rank {rank} cannot open connections: {reason}") from error
        raise MeetingError(
            f"rank {rank} did not connect to all {ranks} ranks within {limit.total_seconds():g} s: "
            f"{reason}; allowed: firewalls that let the ranks connect to each other, on all ports"
        ) from error


@contextlib.contextmanager
def _watched(store: Store, rank: int, ranks: int, timeout: float) -> Iterator[Peers | None]:
    if ranks == 1:
        yield None
        return
    peers = Peers(store, rank=rank, ranks=ranks, timeout=timeout, secret=run_secret())
    with peers.explaining():
        yield peers


def asked(interface: str, request: int) -> bytes:
    """What the kernel states about an interface: 16 bytes; OSError if it has no such interface, or not what is asked.

    `request`: a Linux ioctl.
    """
    name = os.fsencode(interface)[:_LONGEST_NAME]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("40s", name))[16:32]


def interfaces() -> dict[str, str]:
    """Return the first IPv4 address of each network interface that has one and is not down."""
    addresses: dict[str, str] = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if not _fault(name):
                addresses[name] = socket.inet_ntoa(asked(name, _SIOCGIFADDR)[4:8])
    return addresses


def interface_problem() -> str:
    """Describe why Gloo cannot use what GLOO_SOCKET_IFNAME names; empty if it can, or if that is not set."""
    for name in filter(None, os.environ.get(_CHOSEN, "").split(",")):
        if fault := _fault(name):
            value = os.environ[_CHOSEN]
            return f"{_CHOSEN} is {value!r}: {printable(name)} {fault}; allowed: {', '.join(interfaces())}"
    return ""


def _check_interfaces(store: Store, rank: int, ranks: int, patience: float) -> None:
    """Raise an InterfaceError on all ranks if Gloo could not start on one of them, for which the others would wait."""
    store.set(f"interface/{rank}", interface_problem())
    problems = _everybody(store, "interface", rank, ranks, patience)
    for other, problem in enumerate(problems):
        if problem:
            text = one_line(problem.decode(errors="replace"))
            raise InterfaceError(f"rank {other}: {text}" if ranks > 1 else text)


def _fault(name: str) -> str:
    """Why Gloo cannot use an interface; empty if it can."""
    try:
        if not struct.unpack_from("H", asked(name, _SIOCGIFFLAGS))[0] & _UP:
            return "is down"
    except OSError:
        return "is not an interface of this machine"
    with contextlib.suppress(OSError):
        asked(name, _SIOCGIFADDR)
        return ""
    with contextlib.suppress(OSError):
        lines = map(str.split, _INTERFACES6.read_text().splitlines())
        if any(line[-1] == name and line[3] != _LINK_LOCAL for line in lines):
            return ""
    return "has no address"


def address_towards(host: str) -> str:
    """Return this machine's source address for packets to an IPv4 host; empty if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent
        return probe.getsockname()[0]
    return ""


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface for packets to an IPv4 host; None if it cannot be found."""
    with contextlib.suppress(OSError):
        address, target = address_towards(host), socket.gethostbyname(host)
        if target.startswith("127.") or target == address:
            # The first rank's machine would use loopback to reach itself, where no other machine can reach it.
            address = target
        return next((name for name, theirs in interfaces().items() if theirs == address), None)
    return None
