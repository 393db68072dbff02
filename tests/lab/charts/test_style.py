from itertools import combinations
from typing import Any

import pytest

from lowbit_lab.charts.style import LIGHT, THEMES, Palette, family, mixed, recommended, row_name, title_of

FAMILIES = {
    "TransformQuant(bits=4)": "transform", "tah-quant": "tah-quant",
    "TAH-Quant as published": "tah-quant-published", "tah-quant-published-token": "tah-quant-published",
    "stock-fp32": "stock-fp32", "PyTorch's stage, FP32": "stock-fp32", "engine-bf16": "stock-bf16", "fp32": "fp32",
    "int8 / int4": "int8", "GroupInt(bits=6, group=32, symmetric=True)": "int6", "low-bit+8bit": "low-bit",
    "feature-int4 one_shot": "feature-int", "feature-int4-static two_shot": "feature-int-static",
    "saved activations": "saved", "gradients": "gradients", "code": None,
}  # fmt: skip
TITLES = {
    "fp32": "FP32", "stock-bf16": "PyTorch's stage, BF16",
    "int8 / int8": "INT8 both ways", "tah-quant / int8": "TAH-Quant by range (ours) / INT8",
    "tah-quant-published-token": "TAH-Quant as published, by token",
    "feature-int4 one_shot": "FeatureInt, 4 bits, one-shot", "low-bit+8bit": "low-bit+8bit",
    "feature-int4-static two_shot": "static ranges, as published, two-shot",
}  # fmt: skip


def test_families_and_names_of_series():
    assert {name: family(name) for name in FAMILIES} == FAMILIES
    assert all(wanted is None or wanted in theme.formats for wanted in FAMILIES.values() for theme in THEMES.values())
    assert {name: title_of(name) for name in TITLES} == TITLES


def test_no_row_of_a_table_passes_our_setting_off_as_the_published_format():
    assert row_name("tah-quant") == "tah-quant (ours, by range)"
    assert row_name("int4 / TAHQuant()") == "int4 / TAHQuant() (ours, by range)"
    for name in ("tah-quant-published", "tah-quant-published-token", "tah-quant-token", "TAHQuant(tile=32)", "int4"):
        assert row_name(name) == name
    assert title_of("TAHQuant()") == title_of("tah-quant") != title_of("tah-quant-published")


def test_members_of_a_family_are_paler_and_only_the_first_stands_out():
    palette = Palette(LIGHT)
    names = ["TransformQuant(bits=3.1)", "TransformQuant(bits=2.0)", "int4"]
    colours = [palette[name] for name in names]
    assert colours[0] == LIGHT.formats["transform"]
    assert len(set(colours)) == 3
    assert [palette.stands_out(name) for name in names] == [True, False, False]
    assert palette.ink(names[1]) == LIGHT.formats["transform"], "pale text cannot be read"
    assert palette.marker(names[0]) not in (palette.marker(names[1]), palette.marker(names[2]))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_and_recommended_formats_can_be_read(theme: Any):
    assert all(contrast(colour, theme.surface) > 4.5 for colour in (theme.ink, theme.muted))
    assert all(contrast(theme.formats[name], theme.surface) > 4.5 for name in ("transform", "feature-int"))
    assert all(contrast(colour, theme.surface) > 1.5 for colour in theme.formats.values())
    baselines = [theme.formats[name] for name in ("stock-fp32", "stock-bf16", "fp32", "bf16", "fp16")]
    assert all(contrast(one, other) > 1.15 for one, other in combinations(baselines, 2))


def test_mixed_and_recommended():
    assert mixed("#000000", "#ffffff", 0.5) == "#808080"
    rows = [{"format": "fp32"}, {"format": "TransformQuant()"}]
    assert recommended(rows, "format") == rows[1]
    assert recommended(rows[:1], "format") is None
