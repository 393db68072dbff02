"""A short tour of the laboratory for `make test`: each of its commands is there, and one measures from end to end."""

import importlib
import json
from pathlib import Path

from lowbit.cli.commands import Measurement
from lowbit_lab.bench import COMMANDS
from tests.command_line import invoke


def test_its_commands_join_those_of_the_library():
    shown = invoke("--help").stdout
    assert all(f"\n  {name} " in shown for name in ("demo", "calibrate", "evaluate", "bench"))
    shown = invoke("bench", "--help").output
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    for name, place in COMMANDS.items():
        command = Measurement(place).command
        assert command.name == f"bench {name}"
        assert command.tables, f"{name} shows no table"


def test_its_packages_can_be_imported():
    for package in ("bench.demo", "bench.workers", "evaluate", "network", "charts.results"):
        importlib.import_module(f"lowbit_lab.{package}")


def test_a_benchmark_is_shown_written_drawn_and_put_on_a_page(tmp_path: Path):
    file, picture = tmp_path / "new" / "codecs.json", tmp_path / "codecs.png"
    result = invoke(
        *("bench", "codecs", "--codec", "bf16,GroupInt(bits=4, group=32)", "--data", "gaussian", "--dtype", "float32"),
        *("--shape", "1,4,64", "--thread", "1", "--rounds", "1", "--no-reference"),
        *("--json", str(file), "--png", str(picture)),
    )
    assert result.exit_code == 0, result.output
    assert "GroupInt(4, 32)" in result.stdout
    written = json.loads(file.read_text())
    assert written["command"] == "bench codecs"
    assert [row["codec"] for row in written["rows"]] == ["bf16", "GroupInt(bits=4, group=32)"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "GroupInt(bits=4, group=32)" in file.with_suffix(".html").read_text()
