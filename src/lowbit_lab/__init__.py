"""The laboratory: benchmarks, emulated links, evaluation and their charts.

It uses the library `lowbit`, which never imports it.
Its commands join those of the library by entry points: `lowbit bench`, `lowbit calibrate`, `lowbit evaluate` and
`lowbit demo`.
"""

__all__: list[str] = []
