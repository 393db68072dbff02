"""Emulated links between machines, slow and distant, on this machine alone."""

from lowbit_lab.network.link import Link
from lowbit_lab.network.namespaces import LinkUnavailable
from lowbit_lab.network.shape import SlowLink, goodput, round_trip

__all__ = ["Link", "LinkUnavailable", "SlowLink", "goodput", "round_trip"]
