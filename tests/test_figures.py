"""A figure on several pages is one figure: pages have what the records have, written by `python -m benchmarks.speeds`.

After a new measurement `--write` changes the pages; these tests name what still differs.
"""

from datetime import date
from pathlib import Path

import pytest

from benchmarks.marks import replaced
from benchmarks.pages import BLOCKS, QUOTED, ROOT, filled, written
from benchmarks.speed_blocks import over_fp32, table
from benchmarks.speed_records import Missing, Records
from benchmarks.speeds import PARTS
from lowbit_run.report import Report

WRITE = "python -m benchmarks.speeds --write"


def test_pages_have_what_is_recorded():
    made = written(ROOT)
    assert [name for name, text in made.pages.items() if (ROOT / name).read_text("utf-8") != text] == [], WRITE
    assert len(made.left) < len(BLOCKS) + len(QUOTED)


def test_what_the_speeds_come_from_was_recorded_at_one_sitting():
    """On one machine, of one commit, within a day."""
    files = [ROOT / "docs/results/data" / part.file for part in PARTS]
    machines = [Report.read_json(file).machine for file in files if file.exists()]
    assert len({tuple(m.get(key) for key in ("cpu", "simd", "cores", "torch", "commit")) for m in machines}) == 1
    days = [date.fromisoformat(m["date"]) for m in machines]
    assert (max(days) - min(days)).days <= 1


def test_a_sentence_is_found_whatever_its_marks_and_lines():
    page = "It is **1.5x** as\nfast as [`FP32`](page.md#a), in a\nmedian of 1,234 turns of a machine. It is 2x better."
    phrase = "It is {:.1f}x as fast as FP32, in a median of {:,.0f} turns of {}."
    assert filled(page, phrase, [20.25, 5678.0, "two machines"]) == (
        "It is **20.2x** as\nfast as [`FP32`](page.md#a), in a\nmedian of 5,678 turns of two machines. It is 2x better."
    )
    assert filled(page, phrase, [1.5, 1234, "a machine"]) == page
    with pytest.raises(ValueError, match="no sentence 'It is {}x slower'"):
        filled(page, "It is {}x slower", ["3"])


def test_what_a_record_lacks_is_named_and_stays(tmp_path: Path):
    data = tmp_path / "docs/results/data"
    others = {f"docs/results/{name}.md" for name in ("tensor-parallel", "memory", "convergence")}
    for name in {page for page, *_ in (*BLOCKS, *QUOTED)} | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    data.mkdir()
    for name in ("memory", "gradients"):
        (data / f"{name}.json").write_bytes((ROOT / f"docs/results/data/{name}.json").read_bytes())
    made = written(tmp_path)
    assert {name: (tmp_path / name).read_text("utf-8") for name in made.pages} == made.pages
    assert "docs/results/pipeline.md, race: there is no record race.json" in made.left
    (tmp_path / "README.md").write_text("Nothing")
    with pytest.raises(ValueError, match=r"README\.md: no sentence"):
        written(tmp_path)


def test_figures_come_from_one_row_or_one_place():
    records = Records(ROOT)
    assert records.value("memory", "saved_vs_bf16", method="low-bit") < 1
    with pytest.raises(Missing, match="no row"):
        records.row("memory", method="none")
    with pytest.raises(Missing, match=r"no record none\.json"):
        records.report("none")
    with pytest.raises(ValueError, match="rows with"):
        records.row("memory")
    with pytest.raises(ValueError, match="states set"):
        records.stated("memory", "no (such) text")
    page = "docs/results/made.md"
    made = Records(ROOT, {page: "| **format** | `a` |\n|---|---|\n| int4 | 1,089.6 ± 0.2 |\n"})
    assert made.cell("made", "int4", 1) == 1089.6


def test_texts_of_blocks():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    assert (over_fp32(0.0104), over_fp32(-0.002)) == ("0.010 above", "0.002 below")
    with pytest.raises(ValueError, match="no <!-- a -->"):
        replaced("text", "a", "b")
