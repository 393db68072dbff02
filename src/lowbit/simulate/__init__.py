"""The time of a training step before it runs: a simulation of schedules, links, coding and unequal machines."""

from lowbit.simulate.orders import Actions, actions, actions_from
from lowbit.simulate.step import Channel, Network, StageTimes, Step, Timeline, simulate

__all__ = [
    "Actions",
    "Channel",
    "Network",
    "StageTimes",
    "Step",
    "Timeline",
    "actions",
    "actions_from",
    "simulate",
]
