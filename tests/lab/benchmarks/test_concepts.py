"""The pictures of docs/concepts: their arithmetic, and that they are drawn from what is recorded."""

import re

import pytest

from benchmarks.concepts import FIGURES, PAGES, PICTURES, TwoStageStep, figure_of, message_seconds, recorded, step
from lowbit_lab.charts.style import THEMES


def test_messages_follow_one_another_on_the_link():
    each = TwoStageStep(forward=1, backward=2, activations=5, gradients=3, micro_batches=3)
    spans = {(span.lane, span.pass_, span.micro_batch): (span.start, span.end) for span in each.spans()}
    assert [spans["activations", "forward", i] for i in range(3)] == [(1, 6), (6, 11), (11, 16)]
    assert [spans["stage 1", "forward", i] for i in range(3)] == [(6, 7), (11, 12), (16, 17)]
    assert [spans["stage 1", "backward", i] for i in range(3)] == [(17, 19), (19, 21), (21, 23)]
    assert [spans["gradients", "backward", i] for i in range(3)] == [(19, 22), (22, 25), (25, 28)]
    assert [spans["stage 0", "backward", i] for i in range(3)] == [(22, 24), (25, 27), (28, 30)]
    assert each.seconds() == 30


def test_late_receives_let_the_link_rest():
    each = TwoStageStep(forward=1, backward=2, activations=5, gradients=3, micro_batches=2, ahead=False)
    spans = {(span.lane, span.pass_, span.micro_batch): (span.start, span.end) for span in each.spans()}
    assert [spans["activations", "forward", i] for i in range(2)] == [(1, 6), (7, 12)]
    assert [spans["gradients", "backward", i] for i in range(2)] == [(15, 18), (20, 23)]
    assert each.seconds() == 25


@pytest.mark.parametrize(("ahead", "crossings"), [(True, 2), (False, 14)])
def test_distance_costs_two_crossings_or_a_round_trip_for_each_message(ahead: bool, crossings: int):
    near, far = (
        TwoStageStep(forward=1, backward=2, activations=5, gradients=5, micro_batches=4, ahead=ahead, one_way=one_way)
        for one_way in (0, 0.1)
    )
    # Of 8 messages posted late, the first each way is posted long before it is ready.
    assert far.seconds() - near.seconds() == pytest.approx(0.1 * crossings)


def test_the_page_shows_what_the_rules_give():
    """Next to measured seconds; see docs/results/distance.md."""
    page = (PAGES / "pipelines-and-links.md").read_text()
    computed = re.findall(r"^\|[^|]*\| (?:0|40|100) ms \| (\d\.\d\d) \| \d\.\d\d \|$", page, re.M)
    stages = [(32, 32, False), (5.35, 6.35, True)]
    expected = [
        step(forward, back, ahead=ahead, mbit=100, rtt=rtt).seconds()
        for forward, back, ahead in stages
        for rtt in (0, 0.04, 0.1)
    ]
    assert computed == [f"{seconds:.2f}" for seconds in expected]
    assert message_seconds(1024, 128, 32, 25) == pytest.approx(1024 * 128 * 32 / 23.9e6)  # what TCP leaves of the link


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_drawn_from_what_is_recorded(name: str):
    figure_of(name, THEMES["light"], recorded()).draw_without_rendering()
    assert all((FIGURES / f"{name}-{theme}.svg").exists() for theme in THEMES)
