from __future__ import annotations

from typing import Any

import pytest

from lowbit.activations import LayerAware
from lowbit.codecs import AQSGD, BlockFloat8, GroupInt


def test_bits_by_layer_type_and_by_layer():
    policy = LayerAware(bits=4, norm=8, mlp=16, layers={"layers.3": 3, "*.mlp.down": 6})
    assert policy.bits_of("linear") == 4
    assert policy.bits_of("norm", "layers.1.norm") == 8
    assert policy.bits_of("mlp", "layers.1.mlp") == 16
    assert policy.bits_of("norm", "layers.3.norm") == 3
    assert policy.bits_of("norm", "layers.33.norm") == 8
    assert policy.bits_of("linear", "layers.3.mlp.down") == 6
    assert policy.bits_of("attention", "layers.3.attention") == 8
    assert LayerAware(attention=16).bits_of("attention") == LayerAware(bits=16).bits_of("attention") == 16
    assert policy.codec(16) is None
    assert [LayerAware(bits=bits).bits_of("norm") for bits in (2, 4, 8, 16)] == [8, 8, 8, 16]
    assert LayerAware(norm=4).bits_of("norm") == 4
    assert LayerAware().bits_of("mlp") == LayerAware().bits_of("linear") == 6
    assert policy.codec(3) == GroupInt(bits=3, group=64)


@pytest.mark.parametrize(("pattern", "bits", "expected"), [
    ("layers.3", 6, 8), ("layers.3", 16, 16), ("layers.3*", 4, 8), ("layers.3.*", 4, 8), ("*", 4, 8),
    ("layers.3.norm", 6, 6), ("*.norm", 4, 4), ("*norm*", 3, 3),
])  # fmt: skip
def test_bits_of_a_layer_do_not_lower_its_norms(pattern: str, bits: int, expected: int):
    assert LayerAware(layers={pattern: bits}).bits_of("norm", "layers.3.norm") == expected
    assert LayerAware(norm=5, layers={pattern: bits}).bits_of("norm", "layers.3.norm") == bits
    assert LayerAware(layers={pattern: bits}).bits_of("mlp", "layers.3.norm") == bits


@pytest.mark.parametrize(("wrong", "says"), [
    ({"bits": 1}, "bits is 1; allowed: 2 to 8, or 16"),
    ({"mlp": 9}, "mlp is 9"),
    ({"norm": True}, "norm is True"),
    ({"linear": 4.0}, "linear is 4.0"),
    ({"bits": None}, "bits is None"),
    ({"layers": {"a": 1}}, r"layers\['a'\] is 1"),
    ({"layers": [4]}, r"layers is \[4\]"),
    ({"layers": {3: 4}}, "layers has 3"),
    ({"group": 12}, "group is 12"),
    ({"rounding": "up"}, "rounding is 'up'"),
    ({"norm": AQSGD()}, r"norm is AQSGD.*allowed: bits, or a codec without state"),
    ({"layers": {"a": "fp8"}}, r"layers\['a'\] is 'fp8'"),
    ({"outliers": 1}, "outliers is 1; allowed: True or False"),
    ({"smallest": -1}, "smallest is -1"),
])  # fmt: skip
def test_what_can_not_be_is_refused(wrong: dict[str, Any], says: str):
    with pytest.raises((TypeError, ValueError), match=says):
        LayerAware(**wrong)


def test_codecs_in_place_of_bits():
    fine, fp8 = GroupInt(bits=8, group=16), BlockFloat8()
    policy = LayerAware(bits=fp8, mlp=4, layers={"layers.3": fine, "*.norm": 5})
    assert policy.bits_of("linear") == policy.bits_of("norm") == fp8
    assert policy.bits_of("mlp") == 4
    assert policy.bits_of("mlp", "layers.3.mlp") == policy.bits_of("linear", "layers.3.q") == fine
    assert policy.bits_of("norm", "layers.3.norm") == 5
    assert policy.codec(fine) is fine
