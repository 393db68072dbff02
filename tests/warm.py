"""Run kernels in the process that is forked: numba takes half a second of each new process to load the first one."""

import torch

from lowbit.codecs import BlockFloat8, GroupInt

torch.set_num_threads(1)
for codec in (GroupInt(bits=8), GroupInt(bits=4), BlockFloat8()):
    codec.round_trip(torch.ones(2, 8, 64))
