"""Progress of a run, shown by one rank of each machine.

It is written to standard error: one live line on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lowbit.escape import lines
from lowbit_run.terminal import console, filtered_again

if TYPE_CHECKING:
    from rich.live import Live

    from lowbit_run.train.metrics import StepMetrics

_LONG_SECONDS = 5.0  # that a phase takes before a line reports it
_RECENT = 50  # steps from which the time left is computed
_REFRESH_SECONDS = 0.1
_SHORTEST_PAUSE, _LONGEST_PAUSE = 10.0, 600.0
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


def machine_name() -> str:
    """Return text that identifies this machine, the same on all its ranks.

    Host names are not unique. A network namespace, such as a container's, counts as a machine.
    """
    if not (_BOOT.exists() and _NETWORK.exists()):
        return socket.gethostname()
    return f"{socket.gethostname()} {_BOOT.read_text().strip()} {_NETWORK.stat().st_ino}"


@contextlib.contextmanager
def phase(text: str, rank: int, *, show: bool = True) -> Iterator[None]:
    """Print what this rank is doing, such as "rank 1: loading the model", if the block takes long."""

    def say() -> None:
        sys.stderr.write(f"rank {rank}: {text}\n")
        sys.stderr.flush()

    timer = threading.Timer(_LONG_SECONDS, say)
    timer.daemon = True
    if show:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Rhythm:
    """Decides when a log gets its next line of progress.

    The first step, each tenth of the run and the last step get a line. In between, pauses grow with the duration of the
    run: 10 seconds at first, a minute after 20 minutes, never more than 10 minutes and a step.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock, self._began, self._last = steps, clock, clock(), float("-inf")

    def due(self, step: int) -> bool:
        """Whether this step gets a line."""
        now = self._clock()
        pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, (now - self._began) / 20))
        due = now - self._last >= pause or step % max(1, self._steps // 10) == 0 or step == self._steps
        self._last = now if due else self._last
        return due


class Progress:
    """Shows the steps of a run.

    Args:
        steps: of the whole run. warmup: number of its first steps, which are slower than the others.
        machine: the first rank of this machine. rates: measured Mbit/s of links, by name.
        clock: returns seconds.
    """

    def __init__(
        self,
        steps: int,
        *,
        warmup: int = 0,
        machine: int = 0,
        rates: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._warmup, self._clock = steps, warmup, clock
        self._machine, self._rates = str(machine), rates
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._before: float | None = None
        self._was_slow = False
        self._rhythm = Rhythm(steps, clock)
        self._live: Live | None = None
        self._display = contextlib.ExitStack()
        self._refreshed = float("-inf")
        if sys.stderr.isatty():
            from rich.live import Live

            # No refresh: its thread would slow down the steps.
            self._live = self._display.enter_context(Live(console=console(stderr=True), auto_refresh=False))
            self._display.enter_context(filtered_again())

    def record(self, metrics: StepMetrics) -> None:
        """Show a step."""
        self._time(metrics)
        if self._live is None:
            if self._rhythm.due(metrics.step):
                self.say(self._line(metrics, None))
        elif self._clock() - self._refreshed >= _REFRESH_SECONDS or metrics.step == self._steps:
            from rich.text import Text

            self._refreshed = self._clock()
            width = self._live.console.width
            lines = self._line(metrics, width)
            if traffic := describe_links(metrics, self._machine, self._rates):
                lines += f"\n{_fitting(traffic, width).strip()}"
            self._live.update(Text(lines, no_wrap=True, overflow="ellipsis"), refresh=True)

    def record_evaluation(self, step: int, losses: dict[str, float], nbytes: int = 0) -> None:
        """Show held-out losses after `step` steps, and the bytes that all ranks sent for them."""
        shown = ", ".join(f"{_LOSSES.get(name, name)} {value:.4f}" for name, value in losses.items())
        sent = f"  ({_megabytes(nbytes)} sent)" if nbytes else ""
        self.say(f"step {step}/{self._steps}  {shown}{sent}")

    def say(self, text: str) -> None:
        """Print a line; on a terminal, above the live one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            sys.stderr.write(f"{lines(text)}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the last line on the screen."""
        self._display.close()

    def _time(self, metrics: StepMetrics) -> None:
        """Note the time since the previous step, including work in between such as a checkpoint."""
        now = self._clock()
        slow = self._before is None or metrics.step == self._warmup + 1  # it compiles kernels, or sets up the codecs
        if slow or self._was_slow:
            self._recent.clear()
        self._recent.append(metrics.seconds if self._before is None else now - self._before)
        self._before, self._was_slow = now, slow

    def _line(self, metrics: StepMetrics, width: int | None) -> str:
        """Describe a step in one line; `width`: most characters, to which parts are left out."""
        left, start = self._steps - metrics.step, f"step {metrics.step}/{self._steps}"
        end = f"  {duration(left * sum(self._recent) / len(self._recent))} left" if left else ""
        room = None if width is None else width - len(start) - len(end)
        parts = describe(metrics, self._machine)
        if width is None:
            parts[3:3] = describe_links(metrics, self._machine, self._rates)
        return start + _fitting(parts, room) + end


_LOSSES = {
    "held_out_loss": "held-out loss", "held_out_loss_codecs": "with the codecs", "exact_match": "exact match",
    "exact_match_codecs": "with the codecs",
}  # fmt: skip


def describe(metrics: StepMetrics, machine: str = "") -> list[str]:
    """Describe a step; the share of waiting is that of the machine's ranks, of all ranks if it is unknown."""
    parts = [f"loss {metrics.loss:.4f}", f"{metrics.tokens_per_second:,.0f} tok/s"]
    if metrics.bits_forward is not None and metrics.bits_backward is not None:
        waited = metrics.waiting.get(machine, metrics.wait_seconds)
        parts.append(f"waiting {waited / metrics.seconds:.0%}")
        parts.append(f"bits {metrics.bits_forward:.2f}/{metrics.bits_backward:.2f}")
    if metrics.bits_gradients is not None:
        parts.append(f"gradients {metrics.bits_gradients:.2f}")
    if metrics.bytes_activations is not None:
        parts.append(f"activations {metrics.bytes_activations / 1e6:.1f} MB")
    return parts


def describe_links(metrics: StepMetrics, machine: str, rates: Mapping[str, float]) -> list[str]:
    """Describe a machine's traffic in a step, and the Mbit/s of its busiest link; empty on a single machine."""
    ends = {name: name.split(" to ") for name in metrics.links}
    here = {name: nbytes for name, nbytes in metrics.links.items() if machine in ends[name]}
    if not here:
        return []
    out, into = (sum(n for name, n in here.items() if ends[name][end] == machine) for end in (0, 1))
    used = {name: 8 * nbytes / metrics.seconds / 1e6 for name, nbytes in here.items()}
    busiest = max(used, key=lambda name: used[name] / rates.get(name, float("inf")) if rates else used[name])
    of = f" of {rates[busiest]:,.0f}" if rates.get(busiest) else ""
    return [f"out {_megabytes(out)}", f"in {_megabytes(into)}", f"link {busiest}: {used[busiest]:,.1f}{of} Mbit/s"]


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def _fitting(parts: Sequence[str], width: int | None) -> str:
    """Join as many parts as fit, each after two spaces."""
    text = ""
    for part in parts:
        if width is not None and len(text) + len(part) + 2 > width:
            break
        text += f"  {part}"
    return text


def duration(seconds: float) -> str:
    """Format seconds in the two largest units: "45s", "3m 20s", "2h 05m" or "3d 4h"."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d {whole // 3600 % 24}h"
    if whole >= 3600:
        return f"{whole // 3600}h {whole // 60 % 60:02}m"
    return f"{whole // 60}m {whole % 60:02}s" if whole >= 60 else f"{whole}s"
