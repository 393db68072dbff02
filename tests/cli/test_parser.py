"""A command's options are the fields of a section, with what they mean, what is allowed and their defaults."""

import re
import shlex
from dataclasses import dataclass
from typing import Literal

import pytest

from lowbit.cli.parser import Parser
from lowbit.config import ConfigError, NonNegative, Positive, section


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


@section("model")
class Model:
    """What is trained, 100 % of it."""

    dim: Positive = 256
    """Width: of the model. steps: are none of its settings."""
    kv_heads: NonNegative = 0
    """Of keys."""
    layers: Positive = 4
    """Decoder layers."""


@section()
class Course:
    """What to measure."""

    folder: str
    """Where it lies."""
    boundaries: tuple[str, ...] = ("fp32", "int4")
    """Formats, by name or in full."""
    links: tuple[Rate, ...] = (Rate(1.5), Rate(None))
    """Rates, or unlimited."""
    widths: tuple[int, ...] = ()
    """Of each stage; None: as usual."""
    warmup_steps: NonNegative | None = None
    """Of them at first; absent: a quarter."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute."""
    continue_: bool = False
    """Go on."""
    checked: bool = True
    """Look twice."""
    resume: bool | Literal["auto"] = False
    """Go on, or begin."""
    model: Model = Model(dim=64)


def read(*words: str) -> Course:
    return Parser("measure", "Measure 5 % of it.", Course, short={"model.dim": "--dim"}).resolve(words)[0]


SEVERAL = Course(folder="here", warmup_steps=2, model=Model(dim=8, kv_heads=3), checked=False, resume=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("here", Course(folder="here")),
        (
            "--boundary 'int4,GroupInt(bits=6, group=32)' --link unlimited,2 --width 1 --width 2,3 --device cuda "
            "--continue --no-checked --resume=auto here",
            Course(
                folder="here",
                boundaries=("int4", "GroupInt(bits=6, group=32)"),
                links=(Rate(None), Rate(2.0)),
                widths=(1, 2, 3),
                device="cuda",
                continue_=True,
                checked=False,
                resume="auto",
            ),
        ),
        ("--warmup_steps 2 --model.kv-heads 3 --dim 8 --checked false --resume here", SEVERAL),
        ("here --warmup-steps=2 --model.kv_heads=3 --model.dim=8 --checked=false --resume=true", SEVERAL),
        ("""here --boundary "['a,b', 'c']" """, Course(folder="here", boundaries=("a,b", "c"))),
        ("here --boundary ''", Course(folder="here", boundaries=())),
    ],
    ids=["nothing", "every kind", "one spelling", "another spelling", "a TOML list", "an empty list"],
)
def test_options_arrive(words: str, expected: Course):
    assert read(*shlex.split(words)) == expected


def test_help_says_all_of_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "150")
    with pytest.raises(SystemExit):
        read("--help-all")
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "usage: measure FOLDER [options] Measure 5 % of it.",
        "FOLDER Where it lies.",
        "--boundary TEXT,... Formats, by name or in full. [default: fp32,int4]",
        "--link RATE,... Rates, or unlimited. [default: 1.5,unlimited]",
        "--width INTEGER,... Of each stage; None: as usual. --",
        "--warmup-steps INTEGER Of them at first; absent: a quarter. [at least 0]",
        "--device TEXT Where to compute. [cpu, cuda; default: cpu]",
        "--continue Go on. [default: false]",
        "--checked Look twice. [default: true; off: --no-checked]",
        "--resume[=auto] Go on, or begin. [default: false]",
        "--dim, --model.dim INTEGER Width: of the model. steps: are none of its settings. ",
        "of its settings. [at least 1; default: 64]",
        "model: What is trained, 100 % of it.",
        "--model.kv_heads INTEGER Of keys. [at least 0; default: 0]",
    ):
        assert text in shown
    with pytest.raises(SystemExit):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith("such as --model.kv_heads; --help-all explains them: --model. kv_heads, layers")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: FOLDER; see measure --help"),
        ("a --lnik 2", "unknown option --lnik; did you mean --link?; see measure --help"),
        ("a --no-device", "unknown option --no-device; did you mean --device?; see measure --help"),
        ("a --zzz", "unknown option --zzz; see measure --help"),
        ("a --device", "argument --device: expected one argument; see measure --help"),
        ("a --link 2,fast", "rate is 'fast'; allowed: numbers"),
        ("a --width 1,x", "widths is [1, 'x']; allowed: an integer or a list of integers"),
        ("a --resume=perhaps", "resume is 'perhaps'; allowed: true, false or auto"),
    ],
)
def test_a_wrong_line_is_one_clear_line(words: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        read(*words.split())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ConfigError) or "rate" in message
