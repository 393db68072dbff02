"""`python -m benchmarks NAME ...`."""

from functools import partial

from lowbit.cli import main
from lowbit.cli.app import Group
from lowbit.cli.reports import measurements

BENCHMARKS = Group(
    "Measurements that only developers of lowbit need.",
    partial(measurements, "benchmarks"),
    examples=("python -m benchmarks race --boundary fp32,tah-quant",),
)

if __name__ == "__main__":
    main(program="python -m benchmarks", command=BENCHMARKS)
