"""The page on models for two PCs: its tables are those of the recorded rows, which the planner still gives."""

from itertools import islice

import pytest

from benchmarks.which_model import LINKS, MODELS, PAGE, SEQUENCE, recorded, rows_of, with_tables


def test_the_page_has_the_tables_of_the_recorded_rows():
    rows, page = recorded(), PAGE.read_text("utf-8")
    assert {row["model"] for row in rows} == set(MODELS)
    assert with_tables(page, rows) == page, "write it: python -m benchmarks.which_model"


def test_the_page_states_what_was_assumed():
    from benchmarks import which_model as assumed

    page = " ".join(PAGE.read_text("utf-8").split())
    for text in (
        f"sustains {assumed.TFLOPS:.0f} TFLOP/s", f"decodes {assumed.CODING_GB_S:.0f} GB/s",
        f"keeps {assumed.RESERVED_GB} GB", f"{assumed.BATCH * SEQUENCE:,} tokens", f"{assumed.STEPS} steps",
        f"rank {assumed.LORA_RANK} ", f"round trips of {LINKS[10]} ms, at 1,000 Mbit/s {LINKS[1000]} ms",
    ):  # fmt: skip
        assert text in page


def test_the_planner_still_gives_the_recorded_rows():
    name = next(iter(MODELS))
    planned = list(islice(rows_of(name), 3))
    kept = [row for row in recorded() if row["model"] == name][:3]
    for new, old in zip(planned, kept, strict=True):
        numbers = {key for key, value in old.items() if isinstance(value, float)}
        assert {key: new[key] for key in numbers} == pytest.approx({key: old[key] for key in numbers}, rel=1e-3)
        assert {key: new[key] for key in old.keys() - numbers} == {key: old[key] for key in old.keys() - numbers}
