"""Memory of the devices of a pipeline, and the bits of saved activations that fit into it."""

from lowbit_run.plan.budget import MemoryPlan, StageCost, plan_bits
from lowbit_run.plan.layers import choose_layers, measure_layers, plan_layers
from lowbit_run.simulate.held import InFlight, in_flight
from lowbit_run.simulate.step import actions_of, order_of

__all__ = [
    "InFlight",
    "MemoryPlan",
    "StageCost",
    "actions_of",
    "choose_layers",
    "in_flight",
    "measure_layers",
    "order_of",
    "plan_bits",
    "plan_layers",
]
