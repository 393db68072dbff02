"""The time of a training step before it runs: a simulation of schedules, links, coding and unequal machines."""

from lowbit_run.simulate.step import (
    Actions,
    Channel,
    Network,
    StageTimes,
    Step,
    Timeline,
    actions,
    actions_from,
    simulate,
)

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
