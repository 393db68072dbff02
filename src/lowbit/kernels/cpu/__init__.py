"""Building blocks of CPU kernels, compiled by numba: the reference's bytes at the speed of memory.

- `jit`: compiles kernels (`kernel`) and functions inlined into them (`helper`), and runs them on threads. Kernels take
  addresses.
- `memory`: reads and writes single elements at an address. `lines`: converts elements of any dtype from and to float32,
  and sums them in any order.
- `operations`: formulas on one number.
- `runs`: extremes of a group or tile, `pack` and `unpack` for codes of any meaning; for uniform quantization,
  `encode_run` and `decode_run`.

How to write a kernel, and the few operations that stay LLVM instructions: docs/how-to/cpu-kernels.md.
"""
