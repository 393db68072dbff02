"""Options are the fields of sections; help says what every one means, what is allowed and its default."""

import dataclasses
import email.message
import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import pytest

import lowbit_run.cli.app
from benchmarks.__main__ import BENCHMARKS
from lowbit_run.cli.app import COMMANDS, Group
from lowbit_run.cli.parser import Parser, shown
from lowbit_run.config import ConfigError, NonNegative, Positive, Setting, section, settings_of
from tests.command_line import invoke


def every(command: Any, program: str) -> Iterator[tuple[str, Any]]:
    yield program, command
    if isinstance(command, Group):
        for name, each in command.commands().items():
            yield from every(each, f"{program} {name}")


COMMANDS_BY_NAME = {**dict(every(COMMANDS, "lowbit")), **dict(every(BENCHMARKS, "python -m benchmarks"))}
LEAVES = [name for name, command in COMMANDS_BY_NAME.items() if not isinstance(command, Group)]
ADDRESS = "https://lowbit.example/en/latest/"


def _settings(cls: Any, base: Any = dataclasses.MISSING) -> Iterator[Setting]:
    for setting in settings_of(cls, base).values():
        yield setting
        if setting.is_section:
            yield from _settings(setting.hint, setting.default)


def _in_one_line(text: str) -> str:
    """A text without its line breaks, which may come between words and after the commas of a list."""
    return " ".join(text.split()).replace(", ", ",")


def test_help_fits_a_screen_and_says_where_to_begin(monkeypatch: pytest.MonkeyPatch):
    installed = email.message.Message()
    installed["Project-URL"] = "Repository, https://lowbit.example/source"
    installed["Project-URL"] = f"Documentation, {ADDRESS}"
    monkeypatch.setattr(lowbit_run.cli.app, "metadata", {"lowbit": installed}.__getitem__)

    shown = invoke("--help", columns=80).stdout
    assert shown == invoke(columns=80).stdout == invoke("-h", columns=80).stdout == invoke("help", columns=80).stdout
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    beginning = shown.partition("where to begin:")[2]
    assert "lowbit demo " in beginning
    assert "lowbit train " in beginning
    assert ADDRESS in beginning


def test_a_plain_checkout_needs_no_installation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lowbit_run.cli.app, "metadata", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    monkeypatch.setattr(lowbit_run.cli.app, "extension", lambda name: None)
    shown = invoke("--help").stdout
    assert "where to begin:" in shown
    assert "bench      Not installed" in shown
    outcome = invoke("bench", "codecs")
    assert outcome.exit_code == 2
    assert outcome.stderr == 'error: lowbit bench is not installed; install it with: pip install "lowbit[lab]"\n'


def test_help_says_all_of_every_option(monkeypatch: pytest.MonkeyPatch):
    """In words of its own, and the short help names at least its key."""
    monkeypatch.setenv("COLUMNS", "80")
    wrong: list[str] = []
    for name in LEAVES:
        parser = COMMANDS_BY_NAME[name].parser(name)
        full, brief = parser.format_help(), parser.format_help(full=False)
        words, short = _in_one_line(full), set(brief.replace(",", " ").split())
        for text in (full, brief):
            if max(map(len, text.splitlines())) > 80 or not all(f"  {e}\n" in text for e in parser.examples):
                wrong.append(name)
        for setting in _settings(parser.settings):
            told = _in_one_line(setting.meaning) in words
            sentence = setting.meaning.endswith((".", ").")) and not setting.meaning.startswith(("Of ", "As "))
            if not setting.is_section:
                given = setting.default not in (None, (), "", dataclasses.MISSING)
                expected = setting.explained(f"default: {shown(setting.default)}" if given else "")
                told = told and _in_one_line(expected).removesuffix("]") in words
            if not (told and (sentence or setting.name == "codecs")):
                wrong.append(f"{name} {setting.name}")
        for action in parser._actions:
            names = [*action.option_strings, action.dest.rpartition(".")[2], str(action.metavar)]
            if not action.help or not short & {each for n in names for each in (n, f"{n}[=auto]")}:
                wrong.append(f"{name} {action.dest}")
    assert wrong == []


def test_help_of_train_is_short():
    short = invoke("train", "--help", columns=80).stdout
    assert short.count("\n") <= 80
    assert "--help-all" in short
    assert "--optimizer.beta2 NUMBER" in invoke("train", "--help-all", columns=80).stdout


@pytest.mark.parametrize("program", COMMANDS_BY_NAME)
def test_every_example_is_shown_and_understood(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    command = COMMANDS_BY_NAME[program]
    assert command.examples or program == "lowbit", "which says where to begin instead"
    if isinstance(command, Group):
        monkeypatch.setenv("COLUMNS", "80")
        command(program, ["--help"])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert {f"  {example}" for example in command.examples} <= {*lines}
    for example in command.examples:
        assert len(example) <= 76, "it fits a line of the help"
        words = shlex.split(example.removeprefix("torchrun --nproc-per-node 2 -m ").partition(" > ")[0])
        named = len(program.split())
        assert words[:named] == program.split()
        chosen, words = command, words[named:]
        while isinstance(chosen, Group):
            chosen, words = chosen.commands()[words[0]], words[1:]
        parser = chosen.parser(program)
        _, options = parser.read(words)
        if "config" not in options and "my_model" not in example:  # files of the reader's
            parser.resolve(words)


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


def test_help_of_every_kind_of_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
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
