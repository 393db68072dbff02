"""Wrong settings are refused by an error that names the setting, its value and what is allowed."""

from __future__ import annotations

import math
import re

import torch
from torch import ones, tensor, zeros

from lowbit import codecs

REFUSED = {
    "AQSGD(inner=AQSGD())": "inner is AQSGD",
    "BlockFloat8(format='e3m4')": "format is 'e3m4'; allowed: 'e4m3', 'e5m2'",
    "BlockFloat8(block=16)": "block is 16; allowed: 32 to 65536",
    "BlockFloat8(block=48)": "block is 48; allowed: 32 to 65536, multiples of 32",
    "BlockFloat8(block=64.0)": r"block is 64\.0; allowed: an integer",
    "BlockFloat8(rounding='up')": "rounding is 'up'; allowed: 'nearest', 'stochastic'",
    "Cast(dtype=torch.int8)": r"dtype is torch\.int8; allowed: torch\.float32",
    "GroupInt(bits=1)": "bits is 1; allowed: 2 to 8",
    "GroupInt(bits=9)": "bits is 9; allowed: 2 to 8",
    "GroupInt(bits=4.0)": r"bits is 4\.0; allowed: an integer",
    "GroupInt(bits=True)": "bits is True",
    "GroupInt(group=12)": "group is 12; allowed: 8 to 65536, multiples of 8",
    "GroupInt(group=0)": "group is 0; allowed: 8 to 65536",
    "GroupInt(symmetric=2)": "symmetric is 2",
    "GroupInt(rounding='up')": "rounding is 'up'; allowed: 'nearest', 'stochastic'",
    "TAHQuant(tile=48)": "tile is 48; allowed: powers of two from 8 to 128",
    "TAHQuant(tile=256)": "tile is 256; allowed: 8 to 128",
    "TAHQuant(high_bits=9)": "high_bits is 9; allowed: 2 to 8",
    "TAHQuant(high_bits=3, low_bits=4)": "low_bits is 4; allowed: 2 to 3",
    "TAHQuant(high_fraction=1.5)": r"high_fraction is 1\.5; allowed: 0 to 1",
    "TAHQuant(high_fraction=nan)": "high_fraction is nan",
    "TAHQuant(high_fraction='all')": "high_fraction is 'all'",
    "TAHQuant(pivot_ratio=1.0)": r"pivot_ratio is 1\.0; allowed: more than 1",
    "TAHQuant(allocation='row')": "allocation is 'row'; allowed: 'range'",
    "TAHQuant.published(allocation='range')": "allocation is 'range'; allowed: 'tile', 'token'",
    **{f"TransformQuant(bits={bad})": f"bits is {bad}; allowed: " for bad in ("0", "-1", "17", "True", "'much'")},
    "TransformQuant(step='channel')": "step is 'channel'; allowed: 'token', 'message'",
    **{
        f"TransformQuant(bits='auto', nats={bad})": "nats is .*; allowed: a number above 0"
        for bad in ("0", "0.0", "-1", "nan", "inf", "'0.1'", "True")
    },
    "TransformQuant(nats=0.01)": "nats is 0.01, and bits is None; allowed with nats: bits='auto'",
    "TransformQuant(bits=3.0, nats=0.01)": "nats is 0.01, and bits is 3.0; allowed with nats: bits='auto'",
    "TransformQuant(bits='auto', nats=0.01, decibels=34)": "nats is 0.01, and decibels is 34; allowed: one of them",
}  # fmt: skip
FEATURES = {"ranges": ones(2, 4), "total": ones(4), "features": ()}
REFUSED_FEATURES = {
    "ranges=ones(4)": r"ranges is \(4,\); allowed: a tensor of \(ranks, features\)",
    "ranges=ones(2, 4).double()": r"ranges is torch\.float64; allowed: a float32 tensor",
    "ranges=tensor([[1.0, 1], [1, 0]]), total=ones(2)":
        r"ranges\[1, 1\], the range of feature 1, is 0; allowed: finite and above 0",
    "ranges=tensor([[1, nan, 1, 1]])": "feature 1, is nan; allowed: finite",
    "total=ones(3)": r"total has shape \(3,\); allowed: \(4,\)",
    "total=tensor([1, 1, 1, inf])": r"total\[3\], the range of feature 3, is inf",
    "features=[1]": r"features is \[1\]; allowed: a tuple of integers",
    "features=(2, 1)": r"features is \(2, 1\); allowed: ascending, from 0 to 3",
    "features=(1, 4)": r"features is \(1, 4\); allowed: ascending",
    "features=(0, 1, 2, 3)": "features are 4; allowed: fewer than the 4 there are",
    "bits=2": "bits is 2; allowed: 3 to 8",
    "gain='row'": "gain is 'row'; allowed: 'token', 'static'",
    "clip=0": "clip is 0; allowed: a number above 0 and at most 2, or None",
    "offsets=zeros(2, 4)": "one of offsets and total_offset is None; allowed: both or neither",
    "offsets=torch.full((2, 4), inf), total_offset=zeros(4)":
        r"offsets\[0, 0\], the mean of feature 0, is inf; allowed: finite",
    "rank=2": "rank is 2; allowed: 0 to 1",
    "artifact=3": "artifact is 3",
}  # fmt: skip


def test_wrong_settings_are_refused() -> None:
    names = vars(codecs) | {"torch": torch, "nan": math.nan, "inf": math.inf}
    names |= {"ones": ones, "zeros": zeros, "tensor": tensor, "FEATURES": FEATURES}
    features = {f"FeatureInt(**FEATURES | dict({change}))": text for change, text in REFUSED_FEATURES.items()}
    taken = []
    for call, expected in (REFUSED | features).items():
        try:
            taken.append(f"{call}: {eval(call, names)!r}")
        except (TypeError, ValueError) as error:
            if not re.search(expected, str(error)):
                taken.append(f"{call}: {error}")
    assert not taken
