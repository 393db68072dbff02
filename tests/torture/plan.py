"""The faults, the shapes of a run, and the trials of a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit_run.train import TrainConfig
from tests.lowbit_run.train.runs import tiny

FAULTS = {
    "kill": "SIGKILL of a rank; supervised, of the process that trains",
    "stop20": "SIGSTOP of a rank for 20 s",
    "stop": "SIGSTOP of a rank for ever",
    "cut5": "the link cut for 5 s",
    "cut": "the link cut for ever; supervised, for 40 s",
    "disk": "the disk of a machine full; supervised, for 8 s",
    "nan": "NaN in one forward pass of a rank",
    "machine": "supervised only: SIGKILL of all processes of a rank, whose machine starts the command again",
    "gone": "supervised only: a machine dead and its cable cut, both for good",
    "late": "none, except that a rank starts some seconds after the others; only if asked for",
}
USUAL = tuple(name for name in FAULTS if name != "late")
PLAIN = tuple(name for name in FAULTS if name not in ("machine", "gone"))

TIMEOUT = 12.0  # run.timeout_seconds
GRACE = 5.0  # what an end may take beyond that
LIMIT = TIMEOUT + GRACE
REJOIN, REJOIN_GONE = 60.0, 15.0  # run.rejoin_seconds
STEPS, EVERY, MICROBATCHES = 24, 4, 4
HOSTS = 2
connections = 1
"""For each pair of ranks of all runs; the command line sets it."""
_AT_START = 0.15  # of all faults: those that come before the first step


@dataclass(frozen=True)
class Shape:
    """So many pipelines side by side, of so many ranks each, spread over two hosts."""

    name: str
    pipelines: int
    stages: int

    @property
    def ranks(self) -> int:
        return self.pipelines * self.stages

    @property
    def on_host(self) -> int:
        return self.ranks // HOSTS

    def host(self, rank: int) -> int:
        return rank // self.on_host

    def on(self, host: int) -> set[int]:
        """The ranks of a host."""
        return {rank for rank in range(self.ranks) if self.host(rank) == host}

    def config(self, folder: Path) -> TrainConfig:
        """A run of about ten seconds whose codecs remember, with checkpoints and evaluations on the way."""
        remembers = "TransformQuant(step='{}')"
        return tiny(
            folder,
            model={"layers": self.stages},
            pipeline={
                "ranks": self.stages, "data_parallel": self.pipelines, "microbatches": MICROBATCHES,
                "forward": remembers.format("token"), "backward": remembers.format("message"), "warmup_steps": 3,
            },
            data={"batch": 2 * MICROBATCHES * self.pipelines},
            run={
                "steps": STEPS, "checkpoint_every": EVERY, "eval_every": 2 * EVERY, "timeout_seconds": TIMEOUT,
                "overwrite": False, "save_model": True, "connections": connections,
            },
        )  # fmt: skip


SHAPES = {shape.name: shape for shape in (Shape("2", 1, 2), Shape("4", 1, 4), Shape("2x2", 2, 2))}
SHAPES_OF = {2: ("2",), 4: ("4", "2x2")}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault in one run, which hits a rank (`victim`) or its host.

    Attributes:
        step: the fault comes after so many steps; None: before the first. share: of the time that the next step takes
            undisturbed, or all before the first, or all after the last, which passes until then, too.
        pause: seconds until a machine that died is back, or a late rank starts.
    """

    number: int
    seed: int
    fault: str
    shape: str
    supervised: bool
    step: int | None
    share: float
    victim: int
    pause: float

    @property
    def words(self) -> tuple[str, ...]:
        """More of the command line."""
        seconds = REJOIN_GONE if self.fault == "gone" else REJOIN
        return ("--supervise", f"--run.rejoin-seconds={seconds}") if self.supervised else ()

    @property
    def mode(self) -> str:
        return "supervised" if self.supervised else "plain"

    @property
    def name(self) -> str:
        return f"{self.number:03d}-{self.mode}-{self.fault}-{self.shape}"


def plan(*, seed: int, trials: int, faults: Sequence[str], ranks: Sequence[int], supervised: bool) -> list[Trial]:
    """So many trials, shared evenly among faults and shapes; a trial depends on its number and the seed only."""
    kinds = [(fault, count) for count in ranks for fault in faults if supervised or fault in PLAIN]
    return [_trial(i, seed, *kinds[i % len(kinds)], i // len(kinds), supervised) for i in range(trials)]


def _trial(number: int, seed: int, fault: str, ranks: int, turn: int, supervised: bool) -> Trial:
    draw = random.Random(f"{seed}/{number}/{supervised}")
    at_start = draw.random() < _AT_START
    return Trial(
        number=number, seed=seed, fault=fault, shape=SHAPES_OF[ranks][turn % len(SHAPES_OF[ranks])],
        supervised=supervised, step=None if at_start else draw.randint(0, STEPS), share=draw.random(),
        victim=draw.randrange(ranks), pause=draw.uniform(2, 8),
    )  # fmt: skip
