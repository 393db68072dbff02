"""What is shown and recorded of a run: on the terminal, in its metrics files, and in ranks.json."""

import json
from dataclasses import asdict
from typing import Any

from lowbit import escape, files
from lowbit_run.train.auto import FormatChoice, described, why
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.members import Members
from lowbit_run.train.metrics import Recorder, StepMetrics
from lowbit_run.train.progress import Progress
from lowbit_run.train.trackers import Trackers

log = escape.logger(__name__)


class Observers:
    """Shows and records a run; every rank makes one.

    Attributes:
        about: contents of ranks.json. choices: of formats, so far.
        recorder: on rank 0 only, once opened. progress: on the first rank of each machine only, once opened.
    """

    def __init__(self, members: Members, folder: RunFolder) -> None:
        self._members, self._folder = members, folder
        self.about: dict[str, Any] = {}
        self.choices: list[FormatChoice] = []
        self.recorder: Recorder | None = None
        self.progress: Progress | None = None

    def open(self, start: int) -> None:
        """Begin to record and show what follows `start` steps."""
        rank, run, links = self._members.rank, self._members.config.run, self._members.links
        if rank == 0:
            self.recorder = self._open_recorder(start)
        if run.progress and links.machine_of[rank] == rank:
            warmup = self._members.config.codec_warmup_steps
            self.progress = Progress(run.steps, warmup=warmup, machine=rank, rates=links.rates)

    def record(self, metrics: StepMetrics) -> None:
        """Record and show a step."""
        for observer in self._opened:
            observer.record(metrics)

    def record_evaluation(self, step: int, losses: dict[str, float], nbytes: int) -> None:
        """Record and show held-out losses after `step` steps, and the bytes that all ranks sent for them."""
        for observer in self._opened:
            observer.record_evaluation(step, losses, nbytes)

    def say(self, text: str) -> None:
        """Show a line where progress is shown."""
        if self.progress is not None:
            self.progress.say(text)

    def warn(self, text: str) -> None:
        """Show a line; where no progress is shown, rank 0 logs a warning."""
        if self.progress is None and self._members.rank == 0:
            log.warning("%s", text)
        self.say(text)

    def note_formats(self, choice: FormatChoice, metrics: StepMetrics | None = None) -> None:
        """Show a choice of formats after a step, or of a checkpoint, and record it for the report."""
        self.choices.append(choice)
        if self.progress is not None:
            reason = why(choice, metrics)
            self.say(f"formats from step {choice.step + 1} on: {described(choice.formats)}: {reason}")
        self.write_about(formats=[asdict(choice) for choice in self.choices])

    def write_about(self, **facts: Any) -> None:
        """Write ranks.json on rank 0, with new facts."""
        self.about |= facts
        if self._members.rank == 0:
            files.write(self._folder.path / "ranks.json", json.dumps(self.about, indent=1) + "\n")

    def close(self) -> None:
        """Flush and close everything."""
        for observer in self._opened:
            observer.close()

    @property
    def _opened(self) -> list[Recorder | Progress]:
        return [observer for observer in (self.recorder, self.progress) if observer is not None]

    def _open_recorder(self, start: int) -> Recorder:
        config, folder = self._members.config, self._folder
        board = folder.path / "tensorboard"
        if config.run.tensorboard and not board.exists():
            folder.note("tensorboard/")
        before = set(board.glob("*"))
        settings = {f"{name}.{key}": str(v) for name, part in vars(config).items() for key, v in vars(part).items()}
        trackers = Trackers(config.run.trackers, folder.path, settings)
        recorder = Recorder(folder.path, start=start, tensorboard=config.run.tensorboard, trackers=trackers)
        if curves := sorted(f"tensorboard/{path.name}" for path in set(board.glob("*")) - before):
            folder.note(*curves)
        return recorder
