"""`python -m benchmarks codecs`: `lowbit bench codecs` with the procedure of the TAH-Quant paper's research code."""

from __future__ import annotations

import dataclasses

from benchmarks.published import PublishedProcedure
from lowbit.config import section
from lowbit_lab.bench import codecs
from lowbit_lab.bench.codecs import FITTED, CodecsBenchmark

codecs.EXTRA_NAMES.update(
    {
        "published-procedure": PublishedProcedure(allocation="tile"),
        "published-procedure-token": PublishedProcedure(allocation="token"),
    }
)


@section()
class PublishedBenchmark(CodecsBenchmark):
    """As `lowbit bench codecs`."""

    codecs: tuple[str, ...] = (
        "bf16", "fp8", "int8", "GroupInt(bits=6, group=32, symmetric=True)", "int4", "subspace", "transform",
        "tah-quant", "tah-quant-published", "tah-quant-published-token", "published-procedure",
        "published-procedure-token", *FITTED,
    )  # fmt: skip
    """As in `lowbit bench codecs`. published-procedure and published-procedure-token (bits by token): errors and bits
    of the paper's research code, not its speed."""


COMMAND = dataclasses.replace(
    codecs.COMMAND,
    settings=PublishedBenchmark,
    examples=("python -m benchmarks codecs --codec published-procedure --data gaussian",),
)
