"""Links between machines: slow and distant ones, made on this machine."""

from lowbit_lab.network.goodput import goodput, round_trip
from lowbit_lab.network.link import Link
from lowbit_lab.network.namespaces import LinkUnavailable
from lowbit_lab.network.shape import SlowLink

__all__ = ["Link", "LinkUnavailable", "SlowLink", "goodput", "round_trip"]
