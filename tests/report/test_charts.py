from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle

from lowbit.bench import charts


def test_picture_has_its_panels(tmp_path: Path):
    figure = charts.new_figure(panels=2)
    left, right = figure.axes
    charts.bars(left, ["25", "100"], {"fp32": [10.0, 40.0], "int4": [60.0, None]}, label="tokens/s")
    charts.lines(right, {"fp32": [(0, 3.0), (1, 2.0)]}, x_label="seconds", label="loss", title="t")
    charts.save(figure, tmp_path / "new" / "p.png")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")
    bars = [bar for bar in left.patches if isinstance(bar, Rectangle)]
    assert sorted(bar.get_height() for bar in bars) == [10.0, 40.0, 60.0]
    assert [text.get_text() for text in left.get_xticklabels()] == ["25", "100"]
    assert np.array_equal(right.lines[0].get_xydata(), [[0.0, 3.0], [1.0, 2.0]])
