"""The ranks of a run: they agree on what they train before the first byte, and then know each other's place."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

import lowbit
from lowbit.collectives import agree
from lowbit.wire.checksum import secret_facts
from lowbit.wire.messages import SUMS, Messages, gather_json
from lowbit.wire.pytorch import new_group
from lowbit.wire.traffic import sent_so_far
from lowbit_run.train.checkpoints.save import together
from lowbit_run.train.config import is_day
from lowbit_run.train.dates import recorded
from lowbit_run.train.gradients import ReplicaGroups
from lowbit_run.train.identity import compared
from lowbit_run.train.links import Links, link_name
from lowbit_run.train.metrics import COORDINATION, EVALUATION, TIED
from lowbit_run.train.prepare import Prepared, on_date
from lowbit_run.train.progress import machine_name

_OUTSIDE_STEPS = {  # parts of the traffic outside of steps, by purpose of messages; all others are coordination
    "saving": "saving the model", "probe": "link probes", "distance": "link probes", "checkpoints": "checkpoints",
    "replicas": "weights for replicas",
}  # fmt: skip


class Members:
    """All ranks of a run, as one of them sees it; every rank makes one.

    Attributes:
        prepared: with the date that all ranks have. rank, ranks: this one, and their number.
        side: group of all ranks for all messages except the training traffic.
        replicas: this rank's place among the pipelines. links: between the machines.

    Raises:
        AgreementError: ranks have different configurations, texts or versions.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._sent_before = sent_so_far()
        self.prepared, self.config, self.layout = prepared, prepared.config, prepared.layout
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if prepared.device.type == "cuda":
            torch.cuda.set_device(prepared.device)  # NCCL and kernels use the current device
        self._agree()
        self.side = new_group(timeout=self.config.run.timeout_seconds)
        self._take_one_date()
        self.replicas = ReplicaGroups(self.config, self.layout.ranks, prepared.all_reduce, self.side)
        names, elastic = gather_json(machine_name(), self.side), bool(self.config.elastic.lighthouse)
        self.links = Links(self.layout, self.replicas.count, names, elastic=elastic)

    def messages(self, purpose: str) -> Messages:
        """Open messages between the ranks of this pipeline; all of them must do so in the same order."""
        run = self.config.run
        return Messages(self.replicas.side, purpose, timeout=run.timeout_seconds, checksums=run.checksums)

    def sent_outside_steps(self) -> dict[str, int]:
        """Count bytes that this rank has sent outside of steps and evaluations, by part, since it became a member."""
        parts = Counter[str]()
        for purpose, nbytes in (sent_so_far() - self._sent_before).items():
            if purpose not in (EVALUATION, SUMS, TIED):
                parts[_OUTSIDE_STEPS.get(purpose, COORDINATION)] += nbytes
        return dict(parts)

    def describe_machines(self, machines: list[dict[str, Any]], round_trip: float | None) -> dict[str, Any]:
        """Describe the machines of a run: `lowbit_run.report.machine` of each rank, Mbit/s by link, and seconds."""
        machine_of, rates, autocast = self.links.machine_of, self.links.rates, self.prepared.autocast
        return {
            "machines": [
                {"machine": first, "ranks": [r for r, m in enumerate(machine_of) if m == first], **machines[first]}
                for first in self.links.machines
            ],
            "links": [{"link": link_name(*pair), "mbit": rates.get(link_name(*pair))} for pair in self.links.pairs],
            "round_trip_seconds": round_trip,
            "backend": self.prepared.backend,
            "device": self.prepared.device.type,
            "precision": "fp32" if autocast is None else str(autocast).removeprefix("torch."),
        }

    def _agree(self) -> None:
        """Compare configuration, text and versions of all ranks before the first byte."""
        bits = ("bits", "norm", "mlp", "linear", "group", "layers")  # from the configuration or a plan file
        data = self.prepared.data
        facts = {
            # Texts with different dates differ, and `_take_one_date` compares them once all have the same.
            f"text with the date {data.date}" if data.date else "text": data.fingerprint(),
            "lowbit": lowbit.__version__, "torch": torch.__version__,
            "backend": self.prepared.backend, **secret_facts(), **compared(self.config),
            "saved activations": str({key: self.prepared.identity[f"activations.{key}"] for key in bits}),
        }  # fmt: skip
        agree(None, facts, self.config.run.timeout_seconds, topic="training run")

    def _take_one_date(self) -> None:
        """Let all ranks have the date of the checkpoints, or rank 0's: clocks differ, and so do time zones.

        A rank without a checkpoint on its disk, or on the other side of midnight, reads its text again.
        """
        stated = gather_json([self.prepared.data.date, recorded(self.config.run)[1]], self.side)
        dates = [date if is_day(date) else "" for date, _ in stated]
        if len(set(dates)) == 1:
            return
        chosen = next((date for date, (_, kept) in zip(dates, stated, strict=True) if date and kept), dates[0])

        def read_again() -> None:
            if self.prepared.data.date not in ("", chosen):
                self.prepared = on_date(self.prepared, chosen)

        together(read_again, self.side)
        agree(None, {"text": self.prepared.data.fingerprint()}, self.config.run.timeout_seconds, topic="text")


def evaluation_bytes() -> int:
    """Count bytes that this rank sent; between two calls without a step, the difference is an evaluation's."""
    sent = sent_so_far()
    return sent[EVALUATION] + sent[TIED]
