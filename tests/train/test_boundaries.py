from __future__ import annotations

import pytest
import torch

from lowbit.codecs import Cast, parse
from lowbit.config import ConfigError
from lowbit.train.boundaries import backward_formats, make_codecs
from lowbit.train.config import PipelineConfig

BF16 = Cast(dtype=torch.bfloat16)


def test_one_codec_serves_all_boundaries_and_a_list_each_its_own():
    codecs = make_codecs(PipelineConfig(forward=("int4",), backward=("int6", "bf16", "fp32")), 3)
    assert codecs.forward == (parse("int4"),) * 3
    assert codecs.backward == (parse("int6"), BF16, Cast(dtype=torch.float32))


def test_gradients_without_a_name_get_what_belongs_to_the_activations():
    mixed = PipelineConfig(forward=("tah-quant", "transform", "bf16"), backward="")  # pyright: ignore[reportArgumentType]
    codecs = make_codecs(mixed, 3)
    six = parse("GroupInt(bits=6, group=32, symmetric=True)")
    assert codecs.backward == (six, parse("transform-backward"), BF16)
    assert tuple(map(parse, backward_formats(mixed))) == codecs.backward, "what files tell"
    one = make_codecs(PipelineConfig(forward=("transform",)), 3)
    assert one.backward == (parse("transform-backward"),) * 3
    with pytest.raises(ConfigError, match=r"^pipeline\.forward: codec is 'int9'"):
        make_codecs(PipelineConfig(forward=("int9",)), 1)


def test_stock_boundaries_have_their_dtype_whatever_the_codecs():
    codecs = make_codecs(PipelineConfig(boundary="stock-bf16", forward=("int2",)), 2)
    assert codecs.forward == codecs.backward == (BF16, BF16)
