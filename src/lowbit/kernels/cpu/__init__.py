"""Building blocks of CPU kernels, compiled by numba: the reference's bytes at the speed of memory.

- `jit`: compiles kernels (`kernel`) and what is inlined into them (`helper`). Kernels take addresses.
- `memory`: reads and writes single elements at an address. `lines`: converts elements of any dtype from and to float32.
- `operations`: formulas on one number, for loops in Python. `formulas`: the same on vectors, for LLVM code.
- `runs`: extremes of a group or tile, `pack` and `unpack` for codes of any meaning. Where codes are uniform steps,
  `encode_run` and `decode_run` compute and pack them as vectors, made by `words`.
- `threads`: hands out ranges of rows to threads. `vectors`: sums in any order.
"""
