"""`Link` describes the rates and the distance of a link, with a text form."""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

# A geostationary satellite takes 600; connecting has to fit into a probe's time limit.
_MOST_RTT_MS = 2000.0
_MOST_QUEUE_MS = 10_000.0
_MOST_BURST = 1000.0
_MOST_OTHERS = 32
_EXAMPLES = (
    "25mbit, 1gbit, unlimited, 100mbit/40ms, 20mbit-5mbit/30ms, 100mbit/40ms/5ms/0.1%, 100mbit/40ms/0.1%/bbr, "
    "100mbit/40ms/+1, 100mbit/40ms@30s:10mbit/40ms"
)
CONGESTION = (
    "bbr", "bbr1", "bbr2", "bbr3", "bic", "cdg", "cubic", "dctcp", "highspeed", "htcp", "hybla", "illinois", "lp", "nv",
    "reno", "scalable", "vegas", "veno", "westwood", "yeah",
)  # fmt: skip
"""TCP congestion control in Linux; which of them a machine has depends on its kernel modules."""
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_RATE = rf"{_NUMBER}([mg])bit"
_TEXT = re.compile(
    rf"(?:unlimited|{_RATE}(?:-{_RATE})?)"
    + rf"(?:/{_NUMBER}ms)?" * 3
    + rf"(?:/{_NUMBER}%(?:x{_NUMBER})?)?(?:/~{_NUMBER}%)?(?:/({'|'.join(CONGESTION)}))?"
    + r"(?:/\+([0-9]+))?"
)
_AT = re.compile(rf"\s*@\s*{_NUMBER}s\s*:\s*")
_USUAL = "cubic"
_UNITS = {"m": 1.0, "g": 1000.0}


@dataclass(frozen=True)
class Link:
    """A link between hosts.

    Args:
        rate_mbit: Mbit/s of Ethernet in each direction at each host, of which TCP carries 95.6 %. None: no limit.
        back_mbit: Mbit/s from the other hosts towards the first, if different: the first host then sends, and each
            other host receives, at `rate_mbit`; the others send to each other at `back_mbit`. None: `rate_mbit`.
        rtt_ms: milliseconds from any host to any other and back, half of it each way, 0 to 2000.
        jitter_ms: largest deviation of each way's delay, uniformly distributed; at most half of `rtt_ms`. Packets do
            not overtake each other, so dense traffic sees the upper end.
        loss: share of packets that are lost, at least 0 and below 1.
        queue_ms: longest wait of a packet at each host, in milliseconds; those that would wait longer are dropped.
            None: 50 plus one and a half round trips, with which TCP reaches the rate: at 100 Mbit/s and 100 ms it
            carried 36 to 64 Mbit/s with a queue of 50 ms, 86 to 94 with 100, and 94 to 96 with 200.
        burst: mean number of packets lost in a row; 1: each packet is lost independently.
        reorder: share of packets that arrive late, overtaken by those that follow within an eighth of `rtt_ms`.
        congestion: TCP congestion control of all connections; CUBIC is what people's machines have.
        others: other CUBIC connections in each direction that send as fast as they can, such as a neighbour's
            download; 0 to 32. They go from each host to the next, and from the last to the first.
        changes: pairs of seconds, counted from when the link is set, and the link from then on, in order of time.

    Raises:
        TypeError, ValueError: a wrong value.
    """

    rate_mbit: float | None = 100.0
    _: KW_ONLY
    back_mbit: float | None = None
    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float | None = None
    burst: float = 1.0
    reorder: float = 0.0
    congestion: str = _USUAL
    others: int = 0
    changes: "tuple[tuple[float, Link], ...]" = ()

    def __post_init__(self) -> None:
        for name, rate in (("rate_mbit", self.rate_mbit), ("back_mbit", self.back_mbit)):
            if rate is not None:
                kind, allowed = "a number of Mbit/s or None", "positive and finite, or None"
                _check(name, rate, allowed, lambda x: 0 < x < math.inf, kind)
        if self.back_mbit is not None and self.rate_mbit is None:
            raise ValueError(f"back_mbit must be None where rate_mbit is unlimited, got {self.back_mbit!r}")
        if self.back_mbit == self.rate_mbit:
            object.__setattr__(self, "back_mbit", None)
        allowed = f"at least 0 and at most {_MOST_RTT_MS:g}"
        _check("rtt_ms", self.rtt_ms, allowed, lambda x: 0 <= x <= _MOST_RTT_MS)
        allowed = f"at least 0 and at most {self.rtt_ms / 2:g} (half of rtt_ms)"
        _check("jitter_ms", self.jitter_ms, allowed, lambda x: 0 <= x <= self.rtt_ms / 2)
        _check("loss", self.loss, "at least 0 and below 1", lambda x: 0 <= x < 1)
        if self.queue_ms is not None:
            allowed = f"above 0 and at most {_MOST_QUEUE_MS:g}"
            _check("queue_ms", self.queue_ms, allowed, lambda x: 0 < x <= _MOST_QUEUE_MS)
        most = _MOST_BURST if self.loss else 1.0
        _check("burst", self.burst, f"at least 1 and at most {most:g}", lambda x: 1 <= x <= most)
        _check("reorder", self.reorder, "at least 0 and at most 0.5", lambda x: 0 <= x <= 0.5)
        if self.reorder and not self.rtt_ms:
            raise ValueError(f"reorder must be 0 where rtt_ms is 0, got {self.reorder!r}")
        if self.congestion not in CONGESTION:
            raise ValueError(f"congestion must be one of {', '.join(CONGESTION)}, got {self.congestion!r}")
        allowed = f"an integer from 0 to {_MOST_OTHERS}"
        _check("others", self.others, allowed, lambda x: 0 <= x <= _MOST_OTHERS and x == int(x))
        for (before, _), (seconds, link) in itertools.pairwise(((0.0, self), *self.changes)):
            allowed = f"at increasing times, here above {before:g}"
            _check("changes", seconds, allowed, lambda x, before=before: before < x < math.inf)
            if link.changes:
                raise ValueError(f"changes must have no changes of their own, got {link}")

    @property
    def stages(self) -> "list[tuple[float, Link]]":
        """Pairs of seconds and the link from then on, without changes of its own; the first at 0."""
        return [(0.0, replace(self, changes=())), *self.changes]

    @property
    def far(self) -> bool:
        """Whether it ever needs a delay line: for distance, losses, or to be faster in one direction."""
        return any(link.rtt_ms or link.loss or link.back_mbit for _, link in self.stages)

    @property
    def most_waiting_ms(self) -> float:
        """Longest wait of a packet in milliseconds: `queue_ms`, or its default."""
        return 50.0 + 1.5 * self.rtt_ms if self.queue_ms is None else self.queue_ms

    @property
    def _rates(self) -> list[float]:
        return [rate for rate in (self.rate_mbit, self.back_mbit) if rate is not None]

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        milliseconds = [self.rtt_ms, self.jitter_ms, *([] if self.queue_ms is None else [self.queue_ms])]
        while milliseconds and not milliseconds[-1]:
            milliseconds.pop()
        parts = ["-".join(f"{rate:.10g}mbit" for rate in self._rates) or "unlimited"]
        parts += [f"{value:.10g}ms" for value in milliseconds]
        if self.loss:
            parts.append(f"{100 * self.loss:.10g}%" + (f"x{self.burst:.10g}" if self.burst > 1 else ""))
        if self.reorder:
            parts.append(f"~{100 * self.reorder:.10g}%")
        if self.congestion != _USUAL:
            parts.append(self.congestion)
        if self.others:
            parts.append(f"+{self.others}")
        return "/".join(parts) + "".join(f"@{seconds:.10g}s:{link}" for seconds, link in self.changes)

    @property
    def title(self) -> str:
        """Describe the link for tables and charts: "100 Mbit/s, 40 ms", "1 Gbit/s" or "unlimited"."""
        rates = [f"{rate:g} Mbit/s" if rate < 1000 else f"{rate / 1000:g} Gbit/s" for rate in self._rates]
        parts = [" - ".join(rates) or "unlimited"]
        if self.rtt_ms:
            jitter = f" ± {self.jitter_ms:g}" if self.jitter_ms else ""
            parts.append(f"{self.rtt_ms:g}{jitter} ms")
        if self.loss:
            in_a_row = f", {self.burst:g} in a row" if self.burst > 1 else ""
            parts.append(f"{100 * self.loss:g} % lost{in_a_row}")
        if self.reorder:
            parts.append(f"{100 * self.reorder:g} % late")
        if self.queue_ms is not None:
            parts.append(f"queue {self.queue_ms:g} ms")
        if self.congestion != _USUAL:
            parts.append(self.congestion.upper())
        if self.others:
            parts.append(f"{self.others} other connection{'s' * (self.others > 1)} each way")
        return ", ".join(parts) + "".join(f"; from {seconds:g} s: {link.title}" for seconds, link in self.changes)

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Parse a link: rates, then what is asked for of the rest, in the order of the examples.

        "25mbit", "1gbit", "unlimited", "100mbit/40ms", "20mbit-5mbit/30ms" (20 from the first host to the others, 5
        back), "100mbit/40ms/5ms/0.1%" (jitter, loss), "100mbit/40ms/1%x5" (loss of five packets in a row on average),
        "100mbit/40ms/~1%" (1 % late), "100mbit/40ms/0ms/100ms" (queue), "100mbit/40ms/0.1%/bbr", "100mbit/40ms/+1" (one
        other connection each way), "100mbit/40ms@30s:10mbit/40ms@60s:100mbit/40ms" (slower from 30 to 60 seconds).

        Raises:
            ValueError: anything else, or a wrong value.
        """
        first, *rest = _AT.split(text.strip().lower())
        try:
            changes = tuple((float(s), cls._parse_one(part)) for s, part in zip(rest[::2], rest[1::2], strict=True))
            return replace(cls._parse_one(first), changes=changes)
        except ValueError as error:
            raise ValueError(f"link is {text!r}: {error}; allowed: such as {_EXAMPLES}") from None

    @classmethod
    def _parse_one(cls, text: str) -> "Link":
        match = _TEXT.fullmatch(re.sub(r"\s*([/-])\s*", r"\1", text))
        if not match:
            raise ValueError(f"cannot read {text!r}")
        rate, unit, back, back_unit, rtt, jitter, queue, loss, burst, late, congestion, others = match.groups()
        return cls(
            float(rate) * _UNITS[unit] if rate else None,
            back_mbit=float(back) * _UNITS[back_unit] if back else None,
            rtt_ms=float(rtt or 0),
            jitter_ms=float(jitter or 0),
            loss=float(loss or 0) / 100,
            burst=float(burst or 1),
            reorder=float(late or 0) / 100,
            congestion=congestion or _USUAL,
            queue_ms=float(queue) if queue else None,
            others=int(others or 0),
        )


def _check(name: str, value: object, allowed: str, fits: Callable[[float], bool], kind: str = "a number") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    if not fits(value):  # NaN never fits
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
