"""Building blocks of GPU kernels, in Triton: the reference's bytes at the speed of memory.

- `launch`: starts kernels, and computes their arguments for the start and end of sections.
- `numbers`: formulas, and conversions between dtypes.
- `eighths`: loads, packs, unpacks and stores runs of elements that share a scale; which tiles of whole tokens a program
  has. For groups of consecutive elements: `lanes` and `shape_of` of `lowbit.codecs.group_int.gpu`.

With TRITON_INTERPRET=1 in the environment, before Triton is first imported, kernels run on CPU tensors.
"""
