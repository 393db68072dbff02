"""The event loop of the simulator: ranks that run their actions in order, cores that they share, links with queues.

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
def run(  # noqa: C901, PLR0915 - compiled as a whole
    first,
    awaited,
    seconds,
    emitted,
    host,
    cores,
    link,
    wire,
    receiver,
    latency,
    burst,
    begin,
    end,
    entered,
    left,
    busy,
) -> int:
    """Simulate all actions; return how many have ended: fewer than all if ranks wait for each other forever.

    An action waits for a message, holds a core of its host, and emits a message. A link carries one message at a time,
    in the order in which they were emitted; each arrives one latency after it has left.

    Args:
        first: int64 (R + 1,): the actions of rank r are first[r] to first[r + 1], in this order.
        awaited, emitted: int32 (A,): the message that an action needs, and the one that it makes, or `NONE`.
        seconds: float64 (A,): duration on a core. host: int32 (R,). cores: int32 (H,): number on each host.
        link: int32 (M,): link of each message. wire: float64 (M,): seconds that the message occupies the link.
        receiver: int32 (M,): rank. latency: float64 (M,): seconds from leaving the link to the receiver.
        burst: float64 (L,): most seconds that a pause of the link can save for later messages.
        begin, end: float64 (A,), to fill: when an action got its core, and when it was done.
        entered, left: float64 (M,), to fill: when a message began to occupy the link, and had left it.
        busy: float64 (L,), to fill: seconds that a link was occupied.
    """
    ranks, links = len(first) - 1, len(burst)
    at, arrived = first[:-1].copy(), np.zeros(len(link), np.bool_)
    free, idle = cores.copy(), np.ones(links, np.bool_)
    credit, since = burst.copy(), np.zeros(links)  # seconds earned, and when a link became idle
    next_rank, next_message = np.full(ranks, NONE, np.int32), np.full(len(link), NONE, np.int32)
    host_head, host_tail = np.full(len(cores), NONE, np.int32), np.full(len(cores), NONE, np.int32)
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
            h = host[r]
            if free[h] == 0:
                next_rank[r] = NONE
                if host_head[h] < 0:
                    host_head[h] = r
                else:
                    next_rank[host_tail[h]] = r
                host_tail[h] = r
                continue
            free[h] -= 1
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
            h = host[i]
            free[h] += 1
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
            if host_head[h] >= 0:  # ranks that already wait for a core come before this rank's next action
                ready.append(int(host_head[h]))
                host_head[h] = next_rank[host_head[h]]
        elif kind == _SENT:
            sender = link[i]
            idle[sender] = True
            since[sender] = now
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
            earned = min(burst[sender], credit[sender] + now - since[sender])
            saved = min(earned, wire[m])
            credit[sender] = earned - saved
            entered[m] = now
            busy[sender] += wire[m] - saved
            made += 1
            heapq.heappush(events, (now + (wire[m] - saved), made, _SENT, np.int64(m)))
