"""`python -m benchmarks NAME ...`."""

from __future__ import annotations

import sys

from benchmarks import COMMANDS
from lowbit.cli.reports import main

if __name__ == "__main__":
    main("python -m benchmarks", COMMANDS, sys.argv[1:])
