"""Links between machines: a really slow one, made on this machine."""

from lowbit.network.goodput import Goodput, goodput, measure
from lowbit.network.shape import LinkUnavailable, SlowLink

__all__ = ["Goodput", "LinkUnavailable", "SlowLink", "goodput", "measure"]
