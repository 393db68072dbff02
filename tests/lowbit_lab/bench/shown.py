"""What every benchmark's report goes through in its tests."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lowbit_lab.charts.charts import draw
from lowbit_run.report import Command, Row


def shown(command: Command, rows: Sequence[Row], folder: Path, *, width: int = 80) -> str:
    """The text of all tables, none of which is cut off; draws the charts, too."""
    with (console := Console(width=width)).capture() as text:
        for table in command.tables:
            console.print(table.render(rows))
    assert "…" not in text.get(), f"fits on {width} columns"
    draw(command.charts, rows, folder / "charts.png")
    assert (folder / "charts.png").read_bytes().startswith(b"\x89PNG")
    return text.get()
