"""A section checks itself when it is made, and says in one line what is wrong."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from lowbit.config import ConfigError, Positive, build, section, settings_of, to_toml
from lowbit.config.section import Text
from lowbit.train.config import TrainConfig, from_mapping, load


@section("inner")
class Inner:
    """What is inside.

    In two paragraphs.
    """

    size: Positive = 3
    """How large."""
    share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """How much."""


@section()
class Outer:
    """All of it."""

    name: str
    """Whose."""
    kinds: tuple[Literal["a", "b"], ...] = ("a",)
    """Which."""
    inner: Inner = Inner(size=5)
    sizes: tuple[Positive, ...] = ()
    """Some."""
    level: Literal[0, 4, 8] = 0
    """One of a few."""

    def __post_init__(self) -> None:
        if self.inner.size == 13:
            raise ConfigError("inner.size is 13; allowed: lucky numbers")


@section()
class Later(Outer):
    """With what it inherits."""

    more: bool = False
    """More of it."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "name is missing; allowed: a string"),
        ({"name": "x", "knids": "a"}, r"unknown key knids; did you mean kinds\?"),
        ({"name": "x", "kinds": ["a", "c"]}, r"kinds is \['a', 'c'\]; allowed: a, b or a list of them"),
        ({"name": "x", "sizes": (1, 0)}, r"sizes is \(1, 0\); allowed: at least 1"),
        ({"name": "x", "inner": 3}, r"inner is 3; allowed: a section, \[inner\]"),
        ({"name": "x", "inner": {"size": 0}}, "inner.size is 0; allowed: at least 1"),
        ({"name": "x", "inner": {"share": 1}}, "inner.share is 1; allowed: at least 0 and less than 1"),
        ({"name": "x", "inner": {"share": "1"}}, "inner.share is '1'; allowed: a finite number or nothing"),
        ({"name": "x", "inner.sise": 1}, r"unknown key inner.sise; did you mean inner.size\?"),
        ({"name": "x", "inner": {"size": 13}}, "inner.size is 13; allowed: lucky numbers"),
    ],
)
def test_the_first_error_is_one_line(values: dict, message: str):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        build(Outer, values)


def test_choices_that_are_integers_are_read_from_a_command_line():
    assert build(Outer, {"name": "x", "level": Text("4")}).level == 4
    for text, shown in (("5", "5"), ("four", "'four'")):
        with pytest.raises(ConfigError, match=f"^level is {shown}; allowed: 0, 4, 8$"):
            build(Outer, {"name": "x", "level": Text(text)})


def test_what_is_not_given_stays_as_in_the_default():
    assert build(Outer, {"name": "x", "inner": {"share": 0}}).inner == Inner(size=5, share=0.0)
    assert build(Outer, {"name": "x", "inner": {"share": 0}, "inner.size": 7}).inner == Inner(size=7, share=0.0)


def test_sections_are_frozen_and_checked_again_when_they_are_replaced():
    outer = Outer(name="x", kinds="b", sizes=[1, 2])
    assert (outer.kinds, outer.sizes) == (("b",), (1, 2))
    assert dataclasses.asdict(outer)["inner"] == {"size": 5, "share": None}
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer.name = "y"
    with pytest.raises(ConfigError, match="name is 3; allowed: a string"):
        dataclasses.replace(outer, name=3)


def test_settings_say_what_they_mean():
    settings = settings_of(Later)
    assert [setting.meaning for setting in settings.values()] == [
        *("Whose.", "Which.", "What is inside. In two paragraphs.", "Some.", "One of a few.", "More of it.")
    ]
    assert (settings["kinds"].limits, settings["sizes"].limits, settings["name"].limits) == ("a, b", "at least 1", "")


@pytest.mark.parametrize("meanings", [True, False])
def test_toml_is_read_back(meanings: bool):
    outer = Outer(name='a "b"\\\n\x7f\tü😀', kinds=("b", "a"), inner=Inner(share=1e-9))
    text = to_toml(outer, meanings=meanings)
    assert build(Outer, tomllib.loads(text)) == outer
    assert ("# How large. [at least 1; default: 5]\n" in text) == meanings
    assert ('# Which. [a, b; default: ["a"]]\n' in text) == meanings


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[pipeline]\nforward = "int4"\nbackward = ["int6"]\n[run]\nsteps = 7\n')
    config = load(path, ["pipeline.forward=int3", "optimizer.lr=2e-4", "run.output=runs/a=b"])
    assert config.pipeline.forward == ("int3",)
    assert config.pipeline.backward == ("int6",)
    assert (config.run.steps, config.optimizer.lr, config.run.output) == (7, 2e-4, "runs/a=b")
    assert config.data == TrainConfig().data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pipeline.forward=['int4', 'int3']", ("int4", "int3")),
        ("pipeline.forward='int4'", ("int4",)),
        ("pipeline.forward=GroupInt(bits=6, group=32)", ("GroupInt(bits=6, group=32)",)),
    ],
)
def test_overrides_may_be_toml_or_bare_strings(text, expected):
    assert load(overrides=[text]).pipeline.forward == expected


def test_a_string_that_looks_like_a_number_stays_a_string():
    assert load(overrides=["run.output=7", "data.text=8"]).run.output == "7"
    assert load(overrides=["data.text=8"]).data.text == ("8",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.forwrad=int4"], "unknown key pipeline.forwrad; did you mean pipeline.forward?"),
        (["run.zzzzzz=1"], "unknown key run.zzzzzz; known: output, method, steps,"),
        (["run.steps"], "override is 'run.steps'; allowed: section.key=value"),
    ],
)
def test_a_wrong_override_is_one_clear_line(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.toml: No such file"):
        load(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken.toml is not TOML"):
        load(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run = 3", r"run is 3; allowed: a section, \[run\]"),
        ("[[run]]\nsteps = 1", r"run is \[\{'steps': 1\}\]; allowed: a section, \[run\]"),
        ("[run.output]\na = 1", r"run.output is \{'a': 1\}; allowed: a string"),
        ("[run]\nsteps = 2020-01-01", r"run.steps is datetime.date\(.*; allowed: an integer"),
        (f"[run]\nsteps = {'9' * 30}", "run.steps takes 101 bits; allowed: integers of 64 bits"),
        (f"[run]\nsteps = {'9' * 5000}", "bad.toml is not TOML: Exceeds the limit"),
        ('[run]\noutput = "a\\u0000b"', "run.output is .*; allowed: text without null bytes"),
        (f"a = {'[' * 20000}", "bad.toml is not TOML: maximum recursion depth exceeded"),
        ("\udcff", "bad.toml is not TOML: 'utf-8' codec can't decode byte 0xff in position 0"),
    ],
)
def test_a_file_of_the_wrong_shape_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "bad.toml").write_bytes(text.encode(errors="surrogateescape"))
    for overrides in ((), ("run.seed=1",)):
        with pytest.raises(ConfigError, match=message) as caught:
            load(tmp_path / "bad.toml", overrides)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path):
    config = load(path)
    assert from_mapping(json.loads(config.to_json())) == config
