"""No text of a file, a name, a variable or a peer reaches the terminal raw, whichever command shows it."""

import contextlib
import io
import json
import logging
import sys
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.live import Live

from lowbit.escape import MOST_CHARACTERS, lines, logger, one_line, printable
from lowbit.integrations.vllm import VllmError
from lowbit.tensor_parallel import CalibrationError
from lowbit.wire.errors import AgreementError, PeerError
from lowbit_run.config import ConfigError, to_toml
from lowbit_run.config.section import read_toml, resolve
from lowbit_run.doctor.facts import StatementError
from lowbit_run.doctor.meeting import DoctorError, FirstMachineError
from lowbit_run.job.launch import LaunchError
from lowbit_run.job.process_group import MeetingError
from lowbit_run.terminal import console, filtered, filtered_again
from lowbit_run.train import TrainConfig
from tests.command_line import invoke

EVIL = "x\x1b[31m\x1b]0;owned\x07\x9b2J\u202e[red][link=http://evil]y\rz\x08\u2028\u200b"
NAME = f"{EVIL}\n\udcff".replace("/", "")
"""Of a file: Linux takes all but a slash and zero."""


def raw(text: str) -> list[str]:
    """Characters that a terminal would act upon."""
    return [c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def toml(text: str) -> str:
    return write("run.toml", text)


def jsonl(**record: object) -> list[str]:
    write("samples.jsonl", json.dumps(record) + "\n")
    return ["train", "--dry-run", "--data.format", "jsonl", "--data.text", "samples.jsonl"]


def model(name: str = "model", **config: object) -> str:
    write(f"{name}/config.json", json.dumps(config))
    return name


def results(**values: object) -> str:
    return write("results.json", json.dumps(values))


def holder() -> list[str]:
    write("run/lowbit-run.jsonl", json.dumps({"made": []}) + "\n")
    write(f"run/model/tokenizer{NAME}", "")
    write("run/metrics.jsonl", "")
    return ["train", "--dry-run", "--run.output", "run"]


def run_of(name: str) -> str:
    write(f"{name}/config.json", json.dumps({"run": {"steps": 2, "output": EVIL}, EVIL: {EVIL: EVIL}}))
    write(f"{name}/metrics.jsonl", '{"step": 1, "loss": 2.0}\nxx\n')
    return name


ESCAPED = json.dumps(EVIL)  # as JSON and TOML hold it
SOURCES: dict[str, Callable[[], list[str]]] = {
    "a command": lambda: [EVIL],
    "an option": lambda: ["train", f"--{EVIL}"],
    "an option's value": lambda: ["train", "--run.steps", EVIL],
    "a key of TOML": lambda: ["train", toml(f"[run]\n{ESCAPED} = 1")],
    "a section of TOML": lambda: ["train", toml(f"[{ESCAPED}]\nx = 1")],
    "a value of TOML": lambda: ["train", toml(f"[pipeline]\nforward = {ESCAPED}")],
    "damaged TOML": lambda: ["train", toml(f"{EVIL} =")],
    "a name of TOML": lambda: ["train", NAME],
    "a text's name": lambda: ["train", "--data.text", NAME],
    "an empty text": lambda: ["train", "--data.text", write(NAME, "")],
    "fields of JSONL": lambda: jsonl(**{EVIL: 1, "prompt": "x"}),
    "a role of JSONL": lambda: jsonl(prompt="x", completion=[EVIL]),
    "damaged JSONL": lambda: ["train", "--data.format", "jsonl", "--data.text", write(NAME, f"{EVIL}\n")],
    "a data set": lambda: ["train", "--data.dataset", NAME],
    "a tokenizer": lambda: ["train", "--data.tokenizer", NAME],
    "a model": lambda: ["train", "--model.pretrained", NAME],
    "a type of model": lambda: ["train", "--model.pretrained", model(model_type=EVIL)],
    "a size of a model": lambda: ["train", "--model.pretrained", model(model_type="llama", hidden_size=EVIL)],
    "a quantization": lambda: [
        "train", "--model.pretrained", model(model_type="llama", quantization_config={"quant_method": EVIL})
    ],
    "a model to evaluate": lambda: ["evaluate", model(NAME, model_type=EVIL)],
    "a calibration": lambda: ["evaluate", model(model_type="llama"), "--calibration", NAME],
    "activations": lambda: ["bench", "codecs", "--data", "real", "--activations", NAME],
    "a link": lambda: ["bench", "pipeline", "--link", EVIL],
    "a file of results": lambda: ["bench", "codecs", "--json", f"{write(NAME, '')}/x"],
    "a picture": lambda: ["bench", "codecs", "--png", NAME],
    "files in the way": holder,
    "the run that is printed": lambda: ["train", "--dry-run", "--run.output", NAME.replace("\udcff", "")],
    "its settings": lambda: ["config", "--run.output", EVIL],
    "hosts of a cluster": lambda: [
        "plan", "pipeline", write("cluster.toml", f"[[machines]]\nname = {ESCAPED}\n{ESCAPED} = 3\n")
    ],
    "a cluster": lambda: ["plan", "pipeline", NAME],
    "a folder to report on": lambda: ["report", NAME],
    "a page's name": lambda: ["report", run_of(NAME.replace("\udcff", ""))],
    "rows of results": lambda: ["report", results(command=EVIL, rows=[{EVIL: EVIL}], settings={}, machine={})],
    "damaged results": lambda: ["report", results(command=EVIL, rows={EVIL: 1})],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("source", SOURCES)
def test_a_text_of_others_is_shown_without_what_a_terminal_acts_upon(source: str):
    result = invoke(*SOURCES[source]())
    assert result.exception is None
    assert result.output, "it is shown"
    assert raw(result.output) == []
    assert len(result.output) < 40_000
    if result.exit_code:
        assert result.stderr.count("\n") == result.stderr.count("error: ") == 1


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_is_shown_without_it_too(name: str, monkeypatch: pytest.MonkeyPatch):
    for each, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(each, EVIL.replace("\0", "") if each == name else value)
    monkeypatch.setattr("os._exit", lambda code: sys.exit(code))
    result = invoke("evaluate", "missing")
    assert raw(result.output) == []


def test_what_is_escaped_and_that_an_error_has_one_line_of_bounded_length():
    foreign = "Grüße 你好 👩\u200d💻 می\u200cخواهم e\u0301"
    escaped = {
        foreign: foreign,
        "a\tb\x1b[0m": "a\\tb\\x1b[0m",
        "\u202eevil\u2066": "\\u202eevil\\u2066",
        "\x85\x9b\x7f\0": "\\x85\\x9b\\x7f\\x00",
        "\udcff": "\\udcff",
    }
    assert {text: printable(text) for text in escaped} == escaped
    for text, shown in escaped.items():
        assert lines(f"{text}\n").rstrip("\n") == shown.replace("\\t", "\t")
        shown.encode("utf-8")
    assert one_line("a\n\n  b\r\nc") == "a b c"
    assert len(one_line("x" * 10**7)) < MOST_CHARACTERS + 10
    for error in (PeerError(f"rank 1: {EVIL}", 1), AgreementError(f"the ranks do not agree:\n  {EVIL}: 1 on rank 1")):
        assert raw(str(error)) == []
    assert str(AgreementError("a\n  b")) == "a\n  b"


def test_what_libraries_and_logs_write_is_filtered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = logging.getLogger("lowbit.test")
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output), filtered():
        log.warning("%s cannot be read: %s", Path(EVIL), "two\nlines")
        warnings.showwarning(EVIL, UserWarning, EVIL, 1)  # pyright: ignore[reportArgumentType]
        sys.stderr.writelines([EVIL, EVIL])
        sys.excepthook(KeyError, KeyError(EVIL), None)
        sys.stdout.write("\r 50%")
        assert sys.stdout.isatty() is False
    text = output.getvalue()
    assert "two lines\n" in text
    assert "KeyError" in text
    assert text.count("\r") == 1, "progress of other packages"
    assert raw(text.replace("\r", "")) == []


ERRORS = [
    ConfigError,
    MeetingError,
    LaunchError,
    CalibrationError,
    DoctorError,
    FirstMachineError,
    StatementError,
    VllmError,
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_and_logs_of_the_library_are_escaped_without_a_command(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
):
    assert raw(str(kind(EVIL))) == []
    assert str(kind("a\n\tb")) == "a\n\tb"
    assert isinstance(kind(EVIL), ConnectionError | ValueError | RuntimeError)
    logger("lowbit.test").warning("%s and %d", EVIL, 2)
    logger("lowbit.test").warning("plain %d", 2)
    assert raw("".join(caplog.messages)) == []
    assert caplog.messages[0].endswith("and 2")
    assert caplog.records[1].args == (2,)


def test_a_table_and_a_live_line_are_filtered_and_keep_their_own_colors():
    output = io.StringIO()
    with contextlib.redirect_stderr(output), filtered():
        screen = console(stderr=True)
        screen._force_terminal = True
        screen._color_system = screen._detect_color_system()
        with Live(console=screen, auto_refresh=False) as live, filtered_again():
            sys.stderr.write(f"a warning {EVIL}\n")
            live.update(EVIL, refresh=True)
        screen.print(EVIL, style="bold")
    text = output.getvalue()
    assert "[red][link=" in text, "no markup"
    assert "\x1b[1m" in text
    for sequence in ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert sequence not in text


def test_printed_settings_can_be_read_back_and_a_page_holds_nothing_raw():
    config = resolve(TrainConfig, None, [("run.output", f"a{EVIL}\x85\U000e0001")])
    assert raw(text := to_toml(config)) == []
    assert read_toml(Path(toml(text)))["run"]["output"] == config.run.output
    invoke("report", run_of("run"))
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "owned" in page
    assert raw(page) == []
