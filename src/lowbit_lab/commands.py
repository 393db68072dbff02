"""The laboratory's commands. A command's imports are delayed until it is chosen."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit_run.cli.app import Group
from lowbit_run.cli.commands import Measurement, measurements

if TYPE_CHECKING:
    from lowbit_run.cli.parser import Parser


class Demo:
    """`lowbit demo`."""

    summary = "Train over slow links in FP32 and in few bits."
    examples: tuple[str, ...] = ("lowbit demo", "lowbit demo --output runs/my-demo", "lowbit demo --big")

    def parser(self, program: str) -> "Parser":
        """Return the parser of its command line."""
        from lowbit_run.cli.parser import Parser
        from lowbit_run.config import section

        @section()
        class DemoConfig:
            """Output of the demo."""

            output: str = "runs/demo"
            """Folder for the report, the chart and the models."""
            big: bool = False
            """Train adapters on a Llama of 8 billion random weights in 4 bits instead, over 25 Mbit/s, and show the
            memory and the traffic of both ranks. It needs 16.1 GB of disk in `output`, where a second run finds the
            model, and network namespaces; it says so if memory is missing."""

        return Parser(program, self.summary, DemoConfig, examples=self.examples)

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Train and compare."""
        settings, _ = self.parser(program).resolve(words)
        if settings.big:
            from lowbit_lab.bench.big import run
        else:
            from lowbit_lab.bench.demo import run
        run(Path(settings.output))


def commands() -> dict[str, Any]:
    """Return the commands by name."""
    return {
        "demo": Demo(),
        "calibrate": Measurement(
            "lowbit_lab.evaluate.commands:CALIBRATE",
            "Calibrate a model for low-bit tensor-parallel inference.",
        ),
        "evaluate": Measurement(
            "lowbit_lab.evaluate.commands:EVALUATE",
            "Measure perplexity and task scores of low-bit inference.",
        ),
        "bench": Group(
            "Measure speed, traffic, loss and memory.",
            partial(measurements, "lowbit_lab.bench"),
            examples=("lowbit bench codecs", "lowbit bench pipeline --link 100mbit --png speed.png"),
        ),
    }
