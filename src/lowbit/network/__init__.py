"""Links between machines: slow and distant ones, made on this machine."""

from lowbit.network.goodput import Goodput, goodput, measure, round_trip
from lowbit.network.link import Link
from lowbit.network.namespaces import LinkUnavailable
from lowbit.network.shape import SlowLink

__all__ = ["Goodput", "Link", "LinkUnavailable", "SlowLink", "goodput", "measure", "round_trip"]
