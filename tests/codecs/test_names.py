from __future__ import annotations

import pytest
import torch

from lowbit.codecs import AQSGD, BlockFloat8, Cast, GroupInt, TAHQuant, TransformQuant, parse, parse_pair
from lowbit.codecs.names import pair_name


def test_short_names() -> None:
    assert parse("bf16") == Cast(dtype=torch.bfloat16)
    assert parse("int3") == GroupInt(bits=3, group=64)
    assert parse("fp8") == BlockFloat8()
    assert parse("fp8-e5m2") == BlockFloat8(format="e5m2")
    assert parse("tah-quant") == TAHQuant()
    assert parse("tah-quant-published") == TAHQuant.published()
    assert parse("tah-quant-published-token") == TAHQuant.published(allocation="token")
    assert parse("aq-sgd") == AQSGD()
    assert parse("transform-backward") == TransformQuant(step="message")
    assert parse(repr(TransformQuant(bits=5))) == TransformQuant(bits=5)


def test_full_forms() -> None:
    assert parse("GroupInt(bits=6, group=32, symmetric=True)") == GroupInt(bits=6, group=32, symmetric=True)
    assert parse("AQSGD(inner=GroupInt(bits=2))") == AQSGD(inner=GroupInt(bits=2))


SIX_BITS = GroupInt(bits=6, group=32, symmetric=True)
BF16 = Cast(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "backward", "pair"),
    [
        ("bf16", "", (BF16, BF16)),
        ("bf16", "int4", (BF16, BF16)),
        ("bf16 / int4", "", (BF16, parse("int4"))),
        ("int4", "", (parse("int4"), SIX_BITS)),
        ("int4", "int8", (parse("int4"), parse("int8"))),
        ("int4 / bf16", "int8", (parse("int4"), BF16)),
        ("aq-sgd", "", (AQSGD(), SIX_BITS)),
        ("tah-quant-published-token", "", (TAHQuant.published(allocation="token"), SIX_BITS)),
        ("transform", "", (parse("transform"), parse("transform-backward"))),
        ("transform", "int6", (TransformQuant(), parse("int6"))),
        ("TransformQuant(bits=5)", "", (TransformQuant(bits=5), TransformQuant(bits=5, step="message"))),
    ],
)
def test_both_formats_of_a_boundary(text: str, backward: str, pair: tuple) -> None:
    assert parse_pair(text, backward) == pair
    assert parse_pair(" / ".join(map(repr, pair))) == pair, "the full form says the same"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("TransformQuant(bits=8)", "TransformQuant(bits=8)"),
        ("int4 / int6", "int4 / int6"),
        ("int4 / GroupInt(bits=6, group=32)", "GroupInt(bits=4/6, group=64/32)"),
        ("int4 / GroupInt(bits=4, group=64)", "int4 / GroupInt(bits=4, group=64)"),
        ("int6 / GroupInt(group=32)", "GroupInt(bits=6/4, group=64/32)"),
        ("TAHQuant(tile=64) / TAHQuant(tile=64)", "TAHQuant(tile=64) / TAHQuant(tile=64)"),
        ("TransformQuant(bits=8) / tah-quant", "TransformQuant(bits=8) / tah-quant"),
        ("TransformQuant(bits=2) / TransformQuant(bits=4)", "TransformQuant(bits=2.0/4.0)"),
    ],
)
def test_what_two_formats_share_is_said_once(text: str, name: str) -> None:
    assert pair_name(text) == name


@pytest.mark.parametrize("text", ["int4 / ", "int4 / int9", " / int4", "int4 / int4 / int4"])
def test_half_a_pair_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="codec is"):
        parse_pair(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "codec is 'int9'; allowed: aq-sgd, fp8"),
        ("trasnform", "codec is 'trasnform'; did you mean transform?"),
        ("tah-quant-published-v1", "did you mean tah-quant-published or tah-quant-published-token?"),
        ("TAHQuant(allocation='entropy')", "allocation is 'entropy'; allowed: 'range', 'tile', 'token'"),
        ("subspace", "codec is 'subspace', which was removed; allowed: 'transform' for"),
        ("SubspaceQuant(bits=4)", "which was removed"),
        ("aq-sgd-8bit", "which was removed; allowed: 'aq-sgd'"),
        ("feature-int4-static", "codec is 'feature-int4-static', which needs calibrated ranges; allowed: a codec that"),
        ("FeatureInt(gain='static')", "codec is "),
        ("GroupInt(bits=9)", "bits is 9; allowed: 2 to 8"),
        ("GroupInt(6)", "keyword arguments"),
        ("GroupInt(bit=6)", "GroupInt has no argument 'bit'; did you mean bits[?]"),
        ("GroupInt(colour=6)", "GroupInt has no argument 'colour'; allowed: bits, "),
        ("__import__('os').system('true')", "allowed: AQSGD, BlockFloat8"),
        ("GroupInt(bits=open('x'))", "allowed"),
        ("GroupInt(bits=6+1)", "cannot read"),
        ("Cast(dtype=torch.float7)", "dtype is None"),
        ("", "codec is ''"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse(text)
