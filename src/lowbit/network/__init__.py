"""Links between machines: slow and distant ones, made on this machine."""

from lowbit.network.goodput import goodput, round_trip
from lowbit.network.link import Link
from lowbit.network.namespaces import LinkUnavailable
from lowbit.network.shape import SlowLink

__all__ = ["Link", "LinkUnavailable", "SlowLink", "goodput", "round_trip"]
