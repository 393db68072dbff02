"""What a link is like: its rates and its distance, in one small object with a text form."""

import math
import re
from dataclasses import KW_ONLY, dataclass
from typing import Any

# A geostationary satellite takes 600; connecting has to fit into a probe's time limit.
_MOST_RTT_MS = 2000.0
_EXAMPLES = "25mbit, 1gbit, unlimited, 100mbit/40ms, 20mbit-5mbit/30ms, 100mbit/40ms/5ms/0.1%"
_UNITS = {"mbit": 1.0, "gbit": 1000.0}
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"


@dataclass(frozen=True)
class Link:
    """A link between hosts.

    Args:
        rate_mbit: Mbit/s of Ethernet in each direction at each host, of which TCP carries 95.6 %. None: no limit.
        back_mbit: Mbit/s from the other hosts towards the first, where that differs: `rate_mbit` is then what the first
            host sends at, and what each of the others receives at; among each other they send at `back_mbit`.
            None: `rate_mbit`.
        rtt_ms: milliseconds from any host to any other and back, half of it each way, 0 to 2000.
        jitter_ms: each way takes up to so much more or less, uniformly; at most half of `rtt_ms`. Packets do not
            overtake each other, so dense traffic sees the upper end.
        loss: share of packets that vanish on their way, each by itself, at least 0 and below 1.
        queue_ms: milliseconds that a packet may wait for its turn at each host; those that would wait longer are
            dropped. None: 50 and one and a half round trips, with which TCP reaches the rate: at 100 Mbit/s and 100 ms
            it carried 36 to 64 Mbit/s with a queue of 50 ms, 86 to 94 with 100, and 94 to 96 with 200.

    Raises:
        TypeError, ValueError: a value that makes no sense.
    """

    rate_mbit: float | None = 100.0
    _: KW_ONLY
    back_mbit: float | None = None
    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float | None = None

    def __post_init__(self) -> None:
        _check_rate("rate_mbit", self.rate_mbit)
        _check_rate("back_mbit", self.back_mbit)
        if self.back_mbit is not None and self.rate_mbit is None:
            raise ValueError(f"back_mbit must be None where rate_mbit is unlimited, got {self.back_mbit!r}")
        if self.back_mbit == self.rate_mbit:
            object.__setattr__(self, "back_mbit", None)
        _check_number("rtt_ms", self.rtt_ms, most=_MOST_RTT_MS)
        _check_number("jitter_ms", self.jitter_ms, most=self.rtt_ms / 2, why=" (half of rtt_ms)")
        _check_number("loss", self.loss, below=1.0)
        if self.queue_ms is not None:
            _check_number("queue_ms", self.queue_ms, above=0.0, most=10_000.0)

    @property
    def far(self) -> bool:
        """Whether it takes a delay line: it has a distance, loses packets or is faster in one direction."""
        return bool(self.rtt_ms or self.loss or self.back_mbit)

    @property
    def most_waiting_ms(self) -> float:
        """Milliseconds that a packet may wait for its turn, with the default in its place."""
        return 50.0 + 1.5 * self.rtt_ms if self.queue_ms is None else self.queue_ms

    def __str__(self) -> str:
        """The text that `parse` takes."""
        rates = [rate for rate in (self.rate_mbit, self.back_mbit) if rate is not None]
        milliseconds = [self.rtt_ms, self.jitter_ms]
        if self.queue_ms is not None:
            milliseconds.append(self.queue_ms)
        while milliseconds and not milliseconds[-1]:
            milliseconds.pop()
        parts = ["-".join(f"{rate:.10g}mbit" for rate in rates) or "unlimited"]
        parts += [f"{value:.10g}ms" for value in milliseconds]
        if self.loss:
            parts.append(f"{100 * self.loss:.10g}%")
        return "/".join(parts)

    @property
    def title(self) -> str:
        """For tables and pictures: "100 Mbit/s, 40 ms", "1 Gbit/s" or "unlimited"."""
        rates = [rate for rate in (self.rate_mbit, self.back_mbit) if rate is not None]
        parts = [" - ".join(map(_rate_title, rates)) or "unlimited"]
        if self.rtt_ms:
            jitter = f" ± {self.jitter_ms:g}" if self.jitter_ms else ""
            parts.append(f"{self.rtt_ms:g}{jitter} ms")
        if self.loss:
            parts.append(f"{100 * self.loss:g} % lost")
        if self.queue_ms is not None:
            parts.append(f"queue {self.queue_ms:g} ms")
        return ", ".join(parts)

    @classmethod
    def parse(cls, text: str) -> "Link":
        """The link of a text: rates, then optionally the round trip, jitter and queue, then the loss, between slashes.

        "25mbit", "1gbit", "unlimited", "100mbit/40ms", "20mbit-5mbit/30ms" (20 from the first host to the others, 5
        back), "100mbit/40ms/5ms/0.1%" (jitter, loss), "100mbit/40ms/0ms/100ms" (queue).

        Raises:
            ValueError: anything else, or a link that makes no sense.
        """
        rates, *parts = text.strip().lower().split("/")
        loss = parts.pop() if parts and parts[-1].endswith("%") else "0%"
        try:
            values: dict[str, Any] = {
                name: _measure(part, {"ms": 1.0})
                for name, part in zip(("rtt_ms", "jitter_ms", "queue_ms"), parts, strict=False)
            }
            if len(parts) > 3:
                raise _NotALink
            if rates == "unlimited":
                values["rate_mbit"] = None
            else:
                both = [_measure(rate, _UNITS) for rate in rates.split("-", 1)]
                values |= dict(zip(("rate_mbit", "back_mbit"), both, strict=False))
            values["loss"] = _measure(loss, {"%": 1.0}) / 100
        except _NotALink:
            raise ValueError(f"link is {text!r}; allowed: such as {_EXAMPLES}") from None
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"link is {text!r}: {error}; allowed: such as {_EXAMPLES}") from None


class _NotALink(Exception):
    """A text describes no link."""


def _measure(text: str, units: dict[str, float]) -> float:
    """The value of a number with one of the units."""
    match = re.fullmatch(_NUMBER + f"({'|'.join(units)})", text.strip())
    if not match:
        raise _NotALink
    return float(match[1]) * units[match[2]]


def _rate_title(rate: float) -> str:
    return f"{rate:g} Mbit/s" if rate < 1000 else f"{rate / 1000:g} Gbit/s"


def _check_rate(name: str, rate: object) -> None:
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise TypeError(f"{name} must be a number of Mbit/s or None, got {rate!r}")
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"{name} must be positive and finite, or None, got {rate!r}")


def _check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    most: float = math.inf,
    below: float = math.inf,
    why: str = "",
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    low = value > above if above is not None else value >= 0
    if not (low and value <= most and value < below):  # NaN is none of it
        least = "at least 0" if above is None else f"above {above:g}"
        limit = f"below {below:g}" if below < math.inf else f"at most {most:g}{why}"
        raise ValueError(f"{name} must be {least} and {limit}, got {value!r}")
