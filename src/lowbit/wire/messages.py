"""What ranks tell each other outside of a pipeline's traffic: values of all ranks, and messages between two of them.

Values are gathered by PyTorch's collectives as JSON: nothing that a peer sends is ever unpickled. A conversation has
single messages between CPUs over Gloo, counted at both ends, with a time limit and a checksum. `Sums` adds up a few
numbers over all ranks, once a step: one message to the first rank and one back. The first rank of a pipeline is the
last to finish a step and the first to begin the next: it continues at once, where an all-reduce would take several
round trips. The functions at the end measure round trip, clock offset and rate of the link between two ranks.
"""

import bisect
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import pytorch, tags
from lowbit.wire.checksum import Checksums, sealed_bytes
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Expected, Mailbox, Route, Sent
from lowbit.wire.pytorch import default_group, is_known, next_round, rank_names, unwrapped_group
from lowbit.wire.traffic import note_sent

MOST_BYTES = 64 << 20
"""Largest text of one rank; a limit, because a peer's announcement decides how much memory is allocated here."""
AGREEING = "values of all ranks"
"""Purpose under which `lowbit.wire.traffic` counts these values."""


def gather_json(value: Any, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks; every rank calls this.

    This takes two of PyTorch's collectives, in which every rank sends as many bytes as the longest text has. `timeout`:
    seconds for each, as in `pytorch.wait_within`. ValueError: a text is above 64 MiB (on all ranks), or not JSON.
    """
    group = unwrapped_group(group)
    ranks, device = group.size(), _device(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    _gather(sizes, torch.tensor([text.numel()], device=device), group, timeout)
    lengths: list[int] = sizes.tolist()
    if not all(0 < length <= MOST_BYTES for length in lengths):
        raise ValueError(f"ranks state {lengths} bytes; allowed: 1 to {MOST_BYTES} each")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = padded.new_empty(ranks * padded.numel())
    _gather(texts, padded, group, timeout)
    rows = texts.view(ranks, -1).cpu()
    return [
        parse_json(rows[rank, :length], f"what rank {rank} of the group stated is not JSON")
        for rank, length in enumerate(lengths)
    ]


def gather_tensor(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return all ranks' tensors, of one shape and dtype, as (ranks, *x.shape) on the CPU; every rank calls this."""
    group = unwrapped_group(group)
    ranks, x = group.size(), x.to(_device(group))
    out = x.new_empty(ranks * x.numel())
    pytorch.gather(out, x.flatten(), group)
    return out.view(ranks, *x.shape).cpu()


def _gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, timeout: float | None) -> None:
    note_sent(AGREEING, out.nbytes - x.nbytes)  # in a ring each rank forwards the texts of the others
    work = pytorch.gather(out, x, group, async_op=timeout is not None)
    if timeout is not None:
        pytorch.wait_within(work, group, timeout, out.device)


def _device(group: dist.ProcessGroup) -> torch.device:
    devices = dist.get_backend_config(group) if is_known(group) else str(group._device_types)
    if "gloo" in devices or "cpu" in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def parse_json(text: Tensor, problem: str) -> Any:
    """Parse the bytes of a text on the CPU; `problem` begins the ValueError for a text that is not JSON."""
    try:
        return json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from None


_NUMBER_BYTES = 8


class Messages:
    """Messages for one purpose; all ranks of the group must create these objects in the same order.

    `group`: over Gloo; None: the default group. `purpose`: such as "evaluation", for errors and for the count of sent
    bytes (`lowbit.wire.traffic`). `timeout`: seconds after which a peer that does not answer is an error.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, purpose: str, *, timeout: float, checksums: bool = True
    ) -> None:
        group, self._purpose = group or default_group(), purpose
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        topic = f"messages/{purpose}/{next_round(group, f'messages/{purpose}')}"
        self._names = rank_names(group)
        board = FailureBoard(group, topic, self._names, timeout)
        self._mailbox = Mailbox(group, Checksums(topic, enabled=checksums), board)
        # Own channels: a receive may be posted long before its message, and messages of other purposes arrive first.
        self._channels = tags.CONVERSATIONS.channels(next_round(group, "messages"))
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def send(self, payload: Tensor, to: int, *, expected: int | None = None) -> Sent:
        """Start to send a copy of a tensor; `expected`: payload bytes that the receiver expects, by default its own."""
        nbytes, room = payload.nbytes, self._mailbox.checksums.room
        message = torch.empty(nbytes + room, dtype=torch.uint8, device="cpu")
        message[:nbytes].view(payload.dtype).view(payload.shape).copy_(payload.detach())
        number, whole = self._sent[to], None if expected is None else expected + room
        self._sent[to] += 1
        route = self._route(to, number, "message", self.rank)
        (sent,) = self._mailbox.send(message, (self.rank, to, number), route, expected=whole)
        note_sent(self._purpose, message.numel())
        return sent

    def expect(self, nbytes: int, source: int, about: str = "") -> Expected:
        """Post the receive of a rank's next message, of `nbytes` of payload; if late, it takes another round trip."""
        number = self._expected[source]
        self._expected[source] += 1
        route = self._route(source, number, about or "message", source)
        return self._mailbox.expect(route, nbytes, (source, self.rank, number))

    def _route(self, peer: int, number: int, about: str, sender: int) -> Route:
        name = f"{self._purpose}, {about}, number {number}: the message from {self._names[sender]}"
        return Route(peer, self._channels[number % len(self._channels)], name)

    def receive(self, nbytes: int, source: int, about: str = "") -> Tensor:
        return self.expect(nbytes, source, about).wait()

    def send_json(self, value: Any, to: int) -> None:
        """Send JSON of up to 64 MiB in two messages, its length and the text, and wait until the peer has both."""
        text = json.dumps(value).encode()
        if len(text) > MOST_BYTES:
            raise ValueError(f"value has {len(text)} bytes of JSON; allowed: at most {MOST_BYTES}")
        # Both leave before the first wait: one trip instead of two.
        size = self.send(torch.tensor([len(text)]), to)
        body = self.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to)
        size.wait()
        body.wait()

    def receive_json(self, source: int, about: str = "") -> Any:
        """Receive a value that a rank sent with `send_json`; as `receive`, or ValueError: its length, or not JSON."""
        size = int(self.receive(_NUMBER_BYTES, source, about).view(torch.int64))
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"{self._names[source]} announces {size} bytes of JSON; allowed: 1 to {MOST_BYTES}")
        return parse_json(self.receive(size, source, about), f"{self._names[source]} sent text that is not JSON")


_FIRST = 0
SUMS = "sums"


class Sums:
    """Add up the same `count` numbers of every rank, in the order of the ranks, over Gloo.

    `sent_to`: bytes that this rank sends to each other rank for a sum.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int, *, timeout: float, checksums: bool) -> None:
        self._messages = Messages(group, SUMS, timeout=timeout, checksums=checksums)
        self._nbytes = count * torch.float64.itemsize
        self._others = [_FIRST] if self._messages.rank != _FIRST else range(1, self._messages.ranks)
        self.sent_to = dict.fromkeys(self._others, sealed_bytes(self._nbytes, checksums))
        self._sent: list[Sent] = []
        self._expected: list[Expected] = []
        self._expect()

    def of(self, values: Tensor) -> Tensor:
        """Return the sums over all ranks, the same on every rank. values: float64 (count,)."""
        while self._sent:  # sent in the previous step
            self._sent.pop().wait()
        if self._messages.rank != _FIRST:
            self._sent = [self._messages.send(values, _FIRST)]
            return self._received()[0]
        sums = values.clone()
        for others in self._received():
            sums += others
        self._sent = [self._messages.send(sums, rank) for rank in self._others]
        return sums

    def _received(self) -> list[Tensor]:
        payloads = [message.wait() for message in self._expected]
        self._expect()
        return [payload.clone().view(torch.float64) for payload in payloads]

    def _expect(self) -> None:
        """Post the next receives: a message that is not expected takes another round trip."""
        self._expected = [self._messages.expect(self._nbytes, rank) for rank in self._others]


_PINGS = 9
_SIZES = tuple(1 << n for n in range(18, 25))
_ENOUGH_SECONDS = 0.15  # a message must take as long as this for its rate to count
_ENOUGH_TRIPS = 8  # and this many round trips: TCP needs several before it uses the whole link
_MOST_MESSAGES = 1 << 16  # in one probe, so that it ends whatever the sender does


class Trip(NamedTuple):
    """Outcome of `round_trip`, the same on both ranks: the median round trip, and the clocks' offset.

    `offset`: nanoseconds to add to the higher rank's clock to get the lower rank's, within `error`.
    """

    seconds: float
    offset: int
    error: int


def neighbours(ranks: int) -> list[tuple[int, int]]:
    """Return pairs of each rank and the next (rank 0 after the last), ordered so that many can measure at a time."""
    pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks if ranks > 2 else ranks - 1)]
    return sorted(pairs, key=lambda pair: pair[0] % 2)


def round_trip(messages: Messages, peer: int, clock: Callable[[], int] = time.perf_counter_ns) -> Trip:
    """Exchange nine 8-byte messages with another rank. clock: in nanoseconds; its offset is measured."""
    # One extra for warm-up, which does not count: the peer may not have posted its receives yet.
    arriving = [messages.expect(_NUMBER_BYTES, peer, "ping") for _ in range(_PINGS + 1)]
    if messages.rank > peer:
        outcome = messages.expect(3 * _NUMBER_BYTES, peer, "round trip")
        for message in arriving:
            message.wait()
            messages.send(torch.tensor([clock()]), peer).wait()
        trip, offset, error = outcome.wait().view(torch.int64).tolist()
        return Trip(trip / 1e9, offset, error)
    trips: list[tuple[int, int]] = []
    for message in arriving:
        begin = clock()
        sent = messages.send(torch.tensor([0]), peer)
        theirs = int(message.wait().view(torch.int64))
        trip = clock() - begin
        sent.wait()
        trips.append((trip, begin + trip // 2 - theirs))
    median = int(statistics.median(trip for trip, _ in trips[1:]))
    # The shortest trip bounds the offset best: by half of itself, however unequal its two ways were.
    shortest, offset = min(trips)
    messages.send(torch.tensor([median, offset, shortest // 2]), peer).wait()
    return Trip(median / 1e9, offset, shortest // 2)


def send_rate(messages: Messages, peer: int, *, trip: float = 0.0, seconds: float = 0.0) -> float:
    """Measure Mbit/s to another rank, which calls `take_rate`.

    Messages grow until one takes 0.15 s and eight round trips, or has 16 MiB. That size is repeated for `seconds`. A
    message's time is measured from its start until the peer's answer arrives, minus one round trip (`trip` seconds).
    """
    step, nbytes, elapsed = 0, 0, 0.0
    while nbytes == 0 or elapsed < seconds:
        ready = messages.expect(_NUMBER_BYTES, peer, "probe")
        answer = messages.expect(_NUMBER_BYTES, peer, "probe")
        messages.send(torch.tensor([_SIZES[step]]), peer).wait()
        payload = torch.zeros(_SIZES[step], dtype=torch.uint8, device="cpu")
        ready.wait()  # the peer has posted its receive
        begin = time.perf_counter()
        sent = messages.send(payload, peer)
        answer.wait()
        took = time.perf_counter() - begin
        sent.wait()
        enough = max(_ENOUGH_SECONDS, _ENOUGH_TRIPS * trip)
        if took < enough and step < len(_SIZES) - 1:
            wanted = bisect.bisect_left(_SIZES, _SIZES[step] * enough / max(took, 1e-9))
            step = min(max(step + 1, wanted), len(_SIZES) - 1)
        else:
            # This message may have been faster than the round trip measured before: take off at most half.
            nbytes, elapsed = nbytes + _SIZES[step], elapsed + max(took - trip, took / 2)
    messages.send(torch.tensor([0]), peer).wait()
    return 8 * nbytes / elapsed / 1e6


def take_rate(messages: Messages, peer: int) -> None:
    """Receive what another rank sends in `send_rate`; ValueError for a size that probes do not use, or too many."""
    for _ in range(_MOST_MESSAGES):
        nbytes = int(messages.receive(_NUMBER_BYTES, peer, "probe").view(torch.int64))
        if not nbytes:
            return
        if nbytes not in _SIZES:
            raise ValueError(f"rank {peer} announces a probe of {nbytes} bytes; allowed: {_SIZES}")
        arriving = messages.expect(nbytes, peer, "probe")
        messages.send(torch.tensor([1]), peer).wait()
        arriving.wait()
        messages.send(torch.tensor([1]), peer).wait()
    raise ValueError(f"rank {peer} sends a probe of more than {_MOST_MESSAGES} messages")
