"""A section checks itself when it is made, and says in one line what is wrong."""

import dataclasses
import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from lowbit_run.config import ConfigError, Positive, build, section, settings_of, to_toml
from lowbit_run.config.section import Text
from lowbit_run.train.config import TrainConfig, from_mapping, load
from tests.refused import refused


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
        ({"name": "x", "level": Text("5")}, "level is 5; allowed: 0, 4, 8"),
        ({"name": "x", "level": Text("four")}, "level is 'four'; allowed: 0, 4, 8"),
    ],
)
def test_the_first_error_is_one_line(values: dict, message: str):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        build(Outer, values)


def test_what_is_not_given_stays_as_in_the_default():
    assert build(Outer, {"name": "x", "level": Text("4")}).level == 4
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


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[pipeline]\nforward = "int4"\nbackward = ["int6"]\n[run]\nsteps = 7\n')
    config = load(path, ["pipeline.forward=int3", "optimizer.lr=2e-4", "run.output=runs/a=b"])
    assert config.pipeline.forward == ("int3",)
    assert config.pipeline.backward == ("int6",)
    assert (config.run.steps, config.optimizer.lr, config.run.output) == (7, 2e-4, "runs/a=b")
    assert config.data == TrainConfig().data


def test_overrides_may_be_toml_or_bare_strings():
    for text, expected in (
        ("['int4', 'int3']", ("int4", "int3")),
        ("'int4'", ("int4",)),
        ("GroupInt(bits=6, group=32)", ("GroupInt(bits=6, group=32)",)),
    ):
        assert load(overrides=[f"pipeline.forward={text}"]).pipeline.forward == expected
    config = load(overrides=["run.output=7", "data.text=8"])  # a string that looks like a number stays a string
    assert (config.run.output, config.data.text) == ("7", ("8",))
    for prompt in ('"To be" # or not', "'quoted'", '"A"\nb = 2', '"""a"""'):
        assert load(overrides=[f"run.prompt={prompt}"]).run.prompt == prompt, "text stays as it is"


WRONG_FILES = [
    ("[run\n", "bad.toml is not TOML"),
    ("run = 3", r"run is 3; allowed: a section, \[run\]"),
    ("[[run]]\nsteps = 1", r"run is \[\{'steps': 1\}\]; allowed: a section, \[run\]"),
    ("[run.output]\na = 1", r"run.output is \{'a': 1\}; allowed: a string"),
    ("[run]\nsteps = 2020-01-01", r"run.steps is datetime.date\(.*; allowed: an integer"),
    (f"[run]\nsteps = {'9' * 30}", "run.steps takes 101 bits; allowed: integers of 64 bits"),
    (f"[run]\nsteps = {'9' * 5000}", "bad.toml is not TOML: Exceeds the limit"),
    ('[run]\noutput = "a\\u0000b"', "run.output is .*; allowed: text without null bytes"),
    (f"a = {'[' * 20000}", "bad.toml is not TOML: maximum recursion depth exceeded"),
    ("\udcff", "bad.toml is not TOML: 'utf-8' codec can't decode byte 0xff in position 0"),
]
WRONG_OVERRIDES = [
    ("data.text=", "data.text is empty; allowed: one or more files, or no such option"),
    ("pipeline.forwrad=int4", r"unknown key pipeline.forwrad; did you mean pipeline.forward\?"),
    ("run.zzzzzz=1", "unknown key run.zzzzzz; known: output, method, steps,"),
    ("run.steps", "override is 'run.steps'; allowed: section.key=value"),
]


def test_what_is_wrong_in_a_file_or_an_override_is_one_clear_line(tmp_path):
    def of_file(text: str, *overrides: str):
        (tmp_path / "bad.toml").write_bytes(text.encode(errors="surrogateescape"))
        return load(tmp_path / "bad.toml", overrides)

    texts = refused(
        *((partial(of_file, text), ConfigError, message) for text, message in WRONG_FILES),
        *((partial(of_file, text, "run.seed=1"), ConfigError, message) for text, message in WRONG_FILES),
        *((partial(load, overrides=[text]), ConfigError, f"^{message}") for text, message in WRONG_OVERRIDES),
        (lambda: load(tmp_path / "absent.toml"), ConfigError, "absent.toml: No such file"),
    )
    assert not [text for text in texts if "\n" in text]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path):
    config = load(path)
    assert from_mapping(json.loads(config.to_json())) == config
