"""Memory of the devices of a pipeline, and the bits of saved activations that fit into it."""

from lowbit.plan.budget import MemoryPlan, StageCost, plan_bits
from lowbit.plan.in_flight import InFlight, actions_of, in_flight, order_of

COMMANDS = {"memory": "lowbit.plan.memory"}
"""The module of each command of `lowbit plan`, which has its `COMMAND`."""

__all__ = ["COMMANDS", "InFlight", "MemoryPlan", "StageCost", "actions_of", "in_flight", "order_of", "plan_bits"]
