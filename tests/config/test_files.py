from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowbit.config import ConfigError
from lowbit.train.config import TrainConfig, from_mapping, load

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
        (
            "pipeline.forward=GroupInt(bits=6, group=32, symmetric=True)",
            ("GroupInt(bits=6, group=32, symmetric=True)",),
        ),
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
