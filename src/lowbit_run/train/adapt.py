"""What a run adapts between its steps: connections to losses, formats to the links, and rates to their goal."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lowbit import escape
from lowbit_run.train.auto import Auto
from lowbit_run.train.identity import CHOSEN, RATES
from lowbit_run.train.links import Connections, Probes
from lowbit_run.train.members import evaluation_bytes
from lowbit_run.train.metrics import StepMetrics
from lowbit_run.train.observe import Observers
from lowbit_run.train.trainer import Trainer

log = escape.logger(__name__)


class Adaptation:
    """Adapts a run between its steps; every rank makes one, which measures the links, and calls the same methods.

    Attributes:
        auto: chooses formats; None unless they are "auto". checked_bytes: sent by this rank for checks of the goal.
    """

    def __init__(self, trainer: Trainer, observers: Observers) -> None:
        members = trainer.members
        self._trainer, self._observers, self.checked_bytes = trainer, observers, 0
        self.probes = Probes(members)
        self.connections = Connections(members, self.probes.slowest_rate, observers.warn)
        self.probes.update_rates()
        self._look()
        is_auto = members.config.pipeline.is_auto and members.layout.ranks > 1
        self.auto = Auto(members, trainer.pipeline) if is_auto else None

    def describe(self, machines: list[dict[str, Any]]) -> dict[str, Any]:
        """Describe machines, links and connections; `machines`: as for `Members.describe_machines`."""
        described = self._trainer.members.describe_machines(machines, self.probes.round_trip)
        return described | self.connections.facts

    def chosen(self) -> dict[str, Any]:
        """Return what the run has chosen, for a checkpoint."""
        formats = {CHOSEN: asdict(self.auto.choice)} if self.auto is not None and self.auto.choice is not None else {}
        rates = self._trainer.rates.record()
        return formats | ({RATES: rates} if rates else {})

    def take_over(self, done: int, recorded: Mapping[str, Any]) -> str:
        """Take over what the run chose before a checkpoint after `done` steps; return what is missing."""
        if self.auto is not None and CHOSEN in recorded:
            self.auto.restore(recorded[CHOSEN])
        return self._trainer.rates.restore(done, recorded.get(RATES, ()))

    def end_step(self, metrics: StepMetrics, *, last: bool) -> None:
        """Do what is due after a step."""
        trainer, pipeline, done = self._trainer, self._trainer.pipeline, metrics.step
        if self.connections.due(done):
            if self._look(done):
                self._observers.write_about(**self.connections.facts)
            pipeline.look_ahead(True)
        if self.auto is not None and not last and self.auto.due(metrics, trainer.work):
            self._choose_formats(self.auto, metrics)
        if done == trainer.members.config.codec_warmup_steps:
            self._show_rates()
        if trainer.rates.due(done):
            self._check(done)
        if self.connections.due(done + 1):  # no receive may be posted when the number of connections changes
            pipeline.look_ahead(False)

    def _look(self, done: int = 0) -> bool:
        """Look at the connections after `done` steps; returns whether they changed, and with them the rates."""
        rates = self.probes.rates
        if acted := self.connections.look(done):
            self.probes.publish()
        else:
            self.probes.rates = rates  # not those of what was tried and left
        return acted

    def _choose_formats(self, auto: Auto, metrics: StepMetrics) -> None:
        """Choose the formats; unless it is the first choice, measure the links before, and choose if that is due."""
        before, probes, mbit = auto.choice, self.probes, self._trainer.members.links.rates
        if before is not None:
            begin = time.perf_counter()
            probes.update_rates()
            if not auto.looked(mbit, time.perf_counter() - begin):
                return
            probes.trips = probes.measure_distance()
        choice = auto.adopt(metrics.step, probes.trips, probes.rates, dict(mbit))
        if self._trainer.members.rank == 0:
            log.info("%s", choice)
        if before is None or before.formats != choice.formats:
            self._observers.note_formats(choice, metrics)

    def _check(self, done: int) -> None:
        """Compare the cost of the formats with the goal, and show the result."""
        sent = evaluation_bytes()
        check = self._trainer.rates.check(done)
        self.checked_bytes += evaluation_bytes() - sent
        if self._trainer.members.rank == 0 and not check.reached:
            log.warning("%s", check)
        else:
            self._observers.say(str(check))
        if check.bits:
            self._show_rates()

    def _show_rates(self) -> None:
        for place, codec in self._trainer.rates.chosen().items():
            self._observers.say(f"{place}: {codec}")
