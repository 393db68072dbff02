"""The picture of two terminals is what was recorded, and loads nothing from other servers."""

import json

from benchmarks.terminals import RECORDED, START, THEMES, drawn


def test_the_picture_is_up_to_date():
    runs = json.loads(RECORDED.read_text("utf-8"))
    speed = {name: run["tokens_per_second"] for name, run in runs.items()}
    for name, theme in THEMES.items():
        svg = drawn(runs, theme)
        assert svg == (START / f"figures/terminals-{name}.svg").read_text("utf-8"), "python -m benchmarks.terminals"
        assert f"{speed['transform'] / speed['fp32']:.1f}&#160;times" in svg
        assert "url(http" not in svg
