"""Run kernels in the process that is forked: numba takes half a second of each new process to load the first one."""

import gc

import torch

from lowbit.codecs import BlockFloat8, GroupInt

torch.set_num_threads(1)
for codec in (GroupInt(bits=8), GroupInt(bits=4), BlockFloat8()):
    codec.round_trip(torch.ones(2, 8, 64))

gc.collect()
gc.freeze()  # or each fork would look at all of this again and again, and copy it
