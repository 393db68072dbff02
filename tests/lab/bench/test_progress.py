"""Progress of several runs: bars that fit a terminal, plain lines in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lowbit_lab.bench.progress import step_bars


def _shown(*, terminal: bool, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    with step_bars({"fp32": 20, "transform": 40}, console) as advance:
        for _ in range(20):
            advance("fp32", "loss 2.345  12,345 tokens/s  [32.0/32.0 bits]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_plain_lines():
    lines = _shown(terminal=False).splitlines()
    assert lines[0] == "fp32  1/20  loss 2.345  12,345 tokens/s  [32.0/32.0 bits]"
    assert [line.split()[1] for line in lines] == ["1/20", *(f"{step}/20" for step in range(2, 21, 2))]


@pytest.mark.parametrize("width", [80, 120])
def test_bars_leave_room_for_the_text(width: int):
    shown = _shown(terminal=True, width=width)
    assert "20/20" in shown
    assert "loss 2.345  12,345 tokens/s  [32.0/32.0 bits]" in shown
