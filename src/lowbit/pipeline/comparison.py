"""Facts that the stages of one rank state one by one, and that all ranks compare at once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from lowbit.collectives.agreement import Agreement, Facts

_stated: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dict[int, Facts]]]
_stated = weakref.WeakKeyDictionary()


class Comparison:
    """An `Agreement` in two halves: every stage of a rank states its facts before the first of them checks."""

    def __init__(self, group: dist.ProcessGroup, topic: str, timeout: float) -> None:
        self._group, self._topic, self._timeout = group, topic, timeout

    def state(self, member: int, facts: Facts) -> None:
        _stated.setdefault(self._group, {}).setdefault(self._topic, {})[member] = facts

    def check(self, names: Sequence[str]) -> None:
        facts = _stated[self._group].pop(self._topic, None)
        if facts is not None:  # otherwise another stage of this rank has checked
            Agreement(self._group, self._topic, self._timeout).exchange(facts, names)
