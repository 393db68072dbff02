"""A command's options are its settings, explained by their docstring."""

import inspect
from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from lowbit.cli.options import build, explanations, parameters, split


@dataclass(frozen=True)
class Rate:
    mbit: float | None

    @classmethod
    def parse(cls, text: str) -> "Rate":
        if text == "fast":
            raise ValueError("rate is 'fast'; allowed: numbers")
        return cls(None if text == "unlimited" else float(text))

    def __str__(self) -> str:
        return "unlimited" if self.mbit is None else str(self.mbit)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Args:
        boundaries: formats, by name or in full: one for each run.
        links: rates, or unlimited.
        dim, heads: of the model. steps: how many;
            warmup_steps: of them at first, if any.
        fast: a first impression.

    Raises:
        ValueError: steps below 1.
    """

    boundaries: tuple[str, ...] = ("fp32", "int4")
    links: tuple[Rate, ...] = (Rate(1.5), Rate(None))
    dim: int = 256
    heads: int = 4
    steps: int = 3
    warmup_steps: int | None = None
    fast: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; allowed: at least 1")


def invoke(*arguments: str) -> tuple[Settings | None, str]:
    """The settings that a command line makes, and what the terminal shows."""
    made = []

    def command(**given: object) -> None:
        made.append(build(Settings, given))

    signature = inspect.Signature(parameters(Settings))
    command.__signature__ = signature
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120", "TERM": "dumb"})
    return (made[0] if made else None), result.output


def test_nothing_given_keeps_the_defaults():
    assert invoke()[0] == Settings()


def test_every_kind_of_value_arrives():
    made, _ = invoke(
        *("--boundary", "int4,GroupInt(bits=6, group=32)", "--link", "unlimited,2", "--dim", "64"),
        *("--warmup-steps", "2", "--fast"),
    )
    assert made == Settings(
        boundaries=("int4", "GroupInt(bits=6, group=32)"),
        links=(Rate(None), Rate(2.0)),
        dim=64,
        warmup_steps=2,
        fast=True,
    )


def test_help_explains_every_option_and_shows_its_default():
    shown = " ".join(invoke("--help")[1].replace("│", " ").split())
    for name in ("boundary", "link", "dim", "heads", "steps", "warmup-steps", "fast"):
        assert f"--{name}" in shown
    assert "formats, by name or in full: one for each run." in shown
    assert "[default: (fp32,int4)]" in shown
    assert "[default: (1.5,unlimited)]" in shown


def test_explanations_are_found_for_every_field():
    assert explanations(Settings) == {
        "boundaries": "formats, by name or in full: one for each run.",
        "links": "rates, or unlimited.",
        "dim": "of the model.",
        "heads": "of the model.",
        "steps": "how many.",
        "warmup_steps": "of them at first, if any.",
        "fast": "a first impression.",
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", ["a"]),
        ("a, b,", ["a", "b"]),
        ("AQSGD(inner=GroupInt(bits=4, group=64)),x", ["AQSGD(inner=GroupInt(bits=4, group=64))", "x"]),
        ("", []),
    ],
)
def test_commas_within_parentheses_do_not_split(text: str, parts: list[str]):
    assert split(text) == parts


def test_an_element_of_another_type_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Seeds:
        seeds: tuple[int, ...] = (0,)

    assert build(Seeds, {"seeds": "1,2"}).seeds == (1, 2)
    with pytest.raises(ValueError, match="seeds has 'x'; allowed: integers, between commas"):
        build(Seeds, {"seeds": "1,x"})
    with pytest.raises(ValueError, match="^rate is 'fast'; allowed: numbers$"):
        build(Settings, {"links": "1,fast"})
