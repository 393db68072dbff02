from __future__ import annotations

import pytest
import torch

from lowbit.codecs import AQSGD, Cast, GroupInt, parse
from lowbit.train.boundaries import compile_kernels, make_codecs
from lowbit.train.config import PipelineConfig
from lowbit.train.section import ConfigError

BF16 = Cast(dtype=torch.bfloat16)


def test_one_codec_serves_all_boundaries_and_a_list_each_its_own():
    codecs = make_codecs(PipelineConfig(forward=("int4",), backward=("int6", "bf16", "fp32")), 3)
    assert codecs.forward == (parse("int4"),) * 3
    assert codecs.backward == (parse("int6"), BF16, Cast(dtype=torch.float32))


def test_stock_boundaries_have_their_dtype_whatever_the_codecs():
    codecs = make_codecs(PipelineConfig(boundary="stock-bf16", forward=("int2",)), 2)
    assert codecs.forward == codecs.backward == (BF16, BF16)


@pytest.mark.parametrize("text", ["int1", "GroupInt(bits=6", "GroupInt(bit=6)", "GroupInt(bits=9)"])
def test_an_unknown_codec_is_one_line_that_names_the_setting(text: str):
    with pytest.raises(ConfigError, match=r"^pipeline\.backward: [^\n]+$"):
        make_codecs(PipelineConfig(backward=(text,)), 1)


def test_trying_the_codecs_leaves_no_state(monkeypatch: pytest.MonkeyPatch):
    used = []
    monkeypatch.setattr(GroupInt, "_encode", lambda self, x, payload: used.append(self.bits))
    monkeypatch.setattr(GroupInt, "_decode", lambda self, payload, out, accumulate: out.zero_())
    codecs = make_codecs(PipelineConfig(forward=("int4",), backward=("aq-sgd",)), 1)
    assert isinstance(codecs.backward[0], AQSGD)
    compile_kernels(codecs, (2, 4, 64), torch.device("cpu"))
    assert set(used) == {4}
    assert len(used) >= 2 + 2  # AQ-SGD codes differences only when a sample comes back
