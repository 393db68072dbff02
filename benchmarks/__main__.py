"""`python -m benchmarks NAME ...`."""

from benchmarks.figures import Figures
from lowbit_run.cli import main
from lowbit_run.cli.app import Group
from lowbit_run.cli.commands import MakeReport, measurements


class ReportOfBenchmark(MakeReport):
    """`lowbit report`, which also knows the benchmarks of this folder."""

    examples = ("python -m benchmarks report race.json",)


BENCHMARKS = Group(
    "Measurements that only developers of lowbit need, and the figures of the documentation.",
    lambda: {**measurements("benchmarks"), "figures": Figures(), "report": ReportOfBenchmark()},
    examples=("python -m benchmarks race --boundary fp32,tah-quant-published", "python -m benchmarks figures"),
)

if __name__ == "__main__":
    main(program="python -m benchmarks", command=BENCHMARKS)
