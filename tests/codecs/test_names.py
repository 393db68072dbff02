from __future__ import annotations

import pytest
import torch

from lowbit.codecs import AQSGD, BlockFloat8, Cast, GroupInt, SubspaceQuant, TAHQuant, parse


def test_short_names() -> None:
    assert parse("bf16") == Cast(dtype=torch.bfloat16)
    assert parse("int3") == GroupInt(bits=3, group=64)
    assert parse("fp8") == BlockFloat8()
    assert parse("fp8-e5m2") == BlockFloat8(format="e5m2")
    assert parse("tah-quant") == TAHQuant()
    assert parse("tah-quant-published") == TAHQuant.published()
    assert parse("aq-sgd") == AQSGD()
    assert parse("subspace-backward") == SubspaceQuant(bits=4)
    assert parse(repr(SubspaceQuant(rank=5))) == SubspaceQuant(rank=5)


def test_full_forms() -> None:
    assert parse("GroupInt(bits=6, group=32, symmetric=True)") == GroupInt(
        bits=6, group=32, symmetric=True
    )
    assert parse("AQSGD(inner=GroupInt(bits=2))") == AQSGD(inner=GroupInt(bits=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "codec is 'int9'; allowed: fp32"),
        ("GroupInt(bits=9)", "bits is 9; allowed: 2 to 8"),
        ("GroupInt(6)", "keyword arguments"),
        ("GroupInt(bit=6)", "unexpected keyword argument 'bit'"),
        ("__import__('os').system('true')", "allowed: Cast, GroupInt"),
        ("GroupInt(bits=open('x'))", "allowed"),
        ("GroupInt(bits=6+1)", "cannot read"),
        ("Cast(dtype=torch.float7)", "dtype is None"),
        ("", "codec is ''"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse(text)
