"""Write the golden payloads that are missing."""

from __future__ import annotations

from lowbit.codecs import BlockFloat8, GroupInt, TAHQuant

from . import feature_int4, write_golden, write_golden_subspace

for codec in (
    GroupInt(bits=4, group=64),
    GroupInt(bits=6, group=32, symmetric=True),
    GroupInt(bits=3, group=32),
    GroupInt(bits=7, group=16, symmetric=True),
    feature_int4(),
    BlockFloat8(),
    BlockFloat8(format="e5m2", block=32),
    TAHQuant(),
    TAHQuant.published(),
    TAHQuant(allocation="token", tile=32),
):
    write_golden(codec)
for bits in (2, 3, 4, 6):
    write_golden_subspace(bits)
