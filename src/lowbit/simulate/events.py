"""The event loop of the simulator: ranks that run their actions in order, and links with queues.

It is one compiled function, for millions of events. Times are in seconds; simultaneous events come in order.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from lowbit.kernels.cpu.jit import kernel

NONE = -1
_ENDED, _SENT, _ARRIVED = 0, 1, 2  # an action of a rank; a message, from its link; a message, at its receiver


@kernel
def run(  # noqa: PLR0915 - compiled as a whole
    first, awaited, seconds, emitted, link, wire, receiver, latency, begin, end, entered, left, busy
) -> int:  # fmt: skip
    """Simulate all actions; return how many have ended: fewer than all if ranks wait for each other forever.

    An action waits for a message, takes its seconds, and emits a message. A link carries one message at a time,
    in the order in which they were emitted; each arrives one latency after it has left.

    Args:
        first: int64 (R + 1,): the actions of rank r are first[r] to first[r + 1], in this order.
        awaited, emitted: int32 (A,): the message that an action needs, and the one that it makes, or `NONE`.
        seconds: float64 (A,): duration.
        link: int32 (M,): link of each message. wire: float64 (M,): seconds that the message occupies the link.
        receiver: int32 (M,): rank. latency: float64 (M,): seconds from leaving the link to the receiver.
        begin, end: float64 (A,), to fill: when an action began, and when it was done.
        entered, left: float64 (M,), to fill: when a message began to occupy the link, and had left it.
        busy: float64 (L,), to fill: seconds that a link was occupied.
    """
    ranks, links = len(first) - 1, len(busy)
    at, arrived = first[:-1].copy(), np.zeros(len(link), np.bool_)
    idle, next_message = np.ones(links, np.bool_), np.full(len(link), NONE, np.int32)
    link_head, link_tail = np.full(links, NONE, np.int32), np.full(links, NONE, np.int32)
    now, made, done = 0.0, 0, 0
    events: Any = [(0.0, 0, 0, 0)]
    events.pop()
    ready = list(range(ranks - 1, -1, -1))
    while True:
        while ready:
            r = ready.pop()
            a = at[r]
            if a == first[r + 1] or (awaited[a] >= 0 and not arrived[awaited[a]]):
                continue
            begin[a] = now
            made += 1
            heapq.heappush(events, (now + seconds[a], made, _ENDED, r))
        if not events:
            return done
        now, _, kind, i = heapq.heappop(events)
        sender = NONE  # a link that may take its next message
        if kind == _ENDED:
            a = at[i]
            end[a] = now
            at[i] += 1
            done += 1
            m = emitted[a]
            if m >= 0:
                sender = link[m]
                next_message[m] = NONE
                if link_head[sender] < 0:
                    link_head[sender] = m
                else:
                    next_message[link_tail[sender]] = m
                link_tail[sender] = m
            ready.append(i)
        elif kind == _SENT:
            sender = link[i]
            idle[sender] = True
            left[i] = now
            made += 1
            heapq.heappush(events, (now + latency[i], made, _ARRIVED, i))
        else:
            arrived[i] = True
            r = int(receiver[i])
            if at[r] < first[r + 1] and awaited[at[r]] == i:
                ready.append(r)
        if sender >= 0 and idle[sender] and link_head[sender] >= 0:
            m = link_head[sender]
            link_head[sender] = next_message[m]
            idle[sender] = False
            entered[m] = now
            busy[sender] += wire[m]
            made += 1
            heapq.heappush(events, (now + wire[m], made, _SENT, np.int64(m)))
