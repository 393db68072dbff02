import math
import re
from functools import partial

import pytest

from lowbit_lab.network import Link, SlowLink
from tests.refused import refused

NUMBERS = ["rate_mbit", "back_mbit", "rtt_ms", "jitter_ms", "loss", "queue_ms", "burst", "reorder", "others"]
LINKS = [
    ("25mbit", Link(25.0), "25 Mbit/s"),
    ("1000mbit", Link(1000.0), "1 Gbit/s"),
    ("2.5mbit", Link(2.5), "2.5 Mbit/s"),
    ("unlimited", Link(None), "unlimited"),
    ("unlimited/40ms", Link(None, rtt_ms=40), "unlimited, 40 ms"),
    ("100mbit/40ms", Link(100.0, rtt_ms=40), "100 Mbit/s, 40 ms"),
    ("20mbit-5mbit/30ms", Link(20.0, back_mbit=5.0, rtt_ms=30), "20 Mbit/s - 5 Mbit/s, 30 ms"),
    ("100mbit/40ms/5ms/0.1%", Link(100.0, rtt_ms=40, jitter_ms=5, loss=0.001), "100 Mbit/s, 40 ± 5 ms, 0.1 % lost"),
    (
        "100mbit/40ms/0ms/200ms/0.1%",
        Link(100.0, rtt_ms=40, queue_ms=200, loss=0.001),
        "100 Mbit/s, 40 ms, 0.1 % lost, queue 200 ms",
    ),
    ("100mbit/0ms/0ms/200ms", Link(100.0, queue_ms=200), "100 Mbit/s, queue 200 ms"),
    ("100mbit/0.1%", Link(100.0, loss=0.001), "100 Mbit/s, 0.1 % lost"),
    (
        "100mbit/40ms/1%x2.5/~2%/bbr",
        Link(100.0, rtt_ms=40, loss=0.01, burst=2.5, reorder=0.02, congestion="bbr"),
        "100 Mbit/s, 40 ms, 1 % lost, 2.5 in a row, 2 % late, BBR",
    ),
    ("1000mbit/reno", Link(1000.0, congestion="reno"), "1 Gbit/s, RENO"),
    ("100mbit/+1", Link(100.0, others=1), "100 Mbit/s, 1 other connection each way"),
    (
        "100mbit/40ms/bbr/+3",
        Link(100.0, rtt_ms=40, congestion="bbr", others=3),
        "100 Mbit/s, 40 ms, BBR, 3 other connections each way",
    ),
    (
        "100mbit@30s:10mbit@60s:100mbit",
        Link(100.0, changes=((30, Link(10.0)), (60, Link(100.0)))),
        "100 Mbit/s; from 30 s: 10 Mbit/s; from 60 s: 100 Mbit/s",
    ),
    (
        "100mbit@0.5s:100mbit/+1@60s:5mbit/40ms",
        Link(100.0, changes=((0.5, Link(100.0, others=1)), (60, Link(5.0, rtt_ms=40)))),
        "100 Mbit/s; from 0.5 s: 100 Mbit/s, 1 other connection each way; from 60 s: 5 Mbit/s, 40 ms",
    ),
]


@pytest.mark.parametrize(("text", "link", "title"), LINKS)
def test_a_text_describes_a_link_and_the_link_writes_it(text: str, link: Link, title: str) -> None:
    assert Link.parse(text) == link
    assert str(link) == text
    assert link.title == title


def test_other_ways_to_write_the_same() -> None:
    assert Link.parse(" 1gbit ") == Link(1000.0)
    assert Link.parse("2.5Gbit/40MS") == Link(2500.0, rtt_ms=40)
    assert Link.parse("20mbit/CUBIC") == Link(20.0)
    assert Link.parse("20mbit @ 30s: 1gbit / +2") == Link(20.0, changes=((30, Link(1000.0, others=2)),))
    assert Link.parse("20mbit-20mbit") == Link(20.0) == Link(20.0, back_mbit=20.0)


UNREADABLE = [
    *("", "100", "mbit", "-1mbit", "1.2.3mbit", "1kbit", "25mbit/", "25mbit/40", "25mbit/40s"),
    *("/40ms", "40ms", "5mbit-", "5mbit-unlimited", "unlimited-5mbit", "1mbit-2mbit-3mbit"),
    *("25mbit/1%/40ms", "25mbit/1ms/0ms/1ms/1ms", "25mbit/-1ms", "25mbit/nanms", "٣mbit"),
    *("25mbit/+", "25mbit/+-1", "25mbit/+1/bbr", "25mbit/nat"),
    *("25mbit@", "25mbit@30s", "25mbit@30:1mbit", "@30s:1mbit", "25mbit@30s:", "25mbit@30s:1mbit@1mbit"),
]
SENSELESS = {
    "0mbit": "rate_mbit must be positive and finite, or None, got 0.0",
    "100mbit/40ms/30ms": "jitter_ms must be at least 0 and at most 20 (half of rtt_ms), got",
    "100mbit/100%": "loss must be at least 0 and below 1, got 1.0",
    "100mbit/9000ms": "rtt_ms must be at least 0 and at most 2000, got 9000.0",
    "100mbit/1%x0.5": "burst must be at least 1 and at most 1000, got 0.5",
    "100mbit/0%x2": "burst must be at least 1 and at most 1, got 2.0",
    "100mbit/40ms/~90%": "reorder must be at least 0 and at most 0.5, got 0.9",
    "100mbit/~1%": "reorder must be 0 where rtt_ms is 0, got 0.01",
    "100mbit/+99": "others must be an integer from 0 to 32, got 99",
    "100mbit@0s:1mbit": "changes must be at increasing times, here above 0, got 0.0",
    "100mbit@9s:1mbit@9s:2mbit": "changes must be at increasing times, here above 9, got 9.0",
    "100mbit@9s:1mbut": "cannot read '1mbut'; allowed",
    "100mbit@9s:0mbit": "rate_mbit must be positive and finite, or None, got 0.0",
    "100mbit/0ms/0ms/0ms": "queue_ms must be above 0 and at most 10000, got 0.0",
}
NO_AMOUNTS = (-1.0, math.nan, math.inf, -math.inf)


def test_bad_texts_and_fields_say_what_makes_no_sense() -> None:
    allowed = "link is .*; allowed: such as 25mbit, 1gbit, unlimited, "
    refused(
        *((partial(Link.parse, text), ValueError, allowed) for text in UNREADABLE),
        *(
            (partial(Link.parse, text), ValueError, re.escape(f"link is '{text}': {message}"))
            for text, message in SENSELESS.items()
        ),
        *(
            (partial(SlowLink, **{name: bad}), ValueError, f"{name} must be .* got {bad!r}")
            for name in NUMBERS
            for bad in NO_AMOUNTS
        ),
        *(
            (partial(SlowLink, **{name: bad}), TypeError, f"{name} must be a number.*, got {bad!r}")
            for name in NUMBERS
            for bad in ("1", True)
        ),
        *(
            (partial(Link, congestion=bad), ValueError, "congestion must be one of bbr, .*, yeah, got")
            for bad in (None, "", "BBR", "cubic ", 3)
        ),
        *(
            (partial(SlowLink, hosts=bad), ValueError, "hosts must be an integer from 2 to 64")
            for bad in (1, 65, True, 2.0)
        ),
        (partial(Link, None, back_mbit=5.0), ValueError, "back_mbit must be None where rate_mbit is unlimited"),
    )


def test_only_what_a_token_bucket_cannot_do_is_far() -> None:
    assert {text for text, link, _ in LINKS if not link.far} == {
        *("25mbit", "1000mbit", "2.5mbit", "unlimited", "100mbit/0ms/0ms/200ms", "1000mbit/reno", "100mbit/+1"),
        "100mbit@30s:10mbit@60s:100mbit",
    }
