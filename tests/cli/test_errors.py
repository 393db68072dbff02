"""What a user can fix is one line; a fault in lowbit keeps its traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.cli import describe, exit_code, one_line_errors
from lowbit.cli.app import COMMANDS as APP
from lowbit.pipeline import PeerError
from lowbit_lab.bench import COMMANDS
from tests.command_line import invoke


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("bits is 9;\n  allowed: 2 to 8"), 2, "bits is 9; allowed: 2 to 8"),
        (TypeError("x has dtype torch.int64"), 2, "x has dtype torch.int64"),
        (FileNotFoundError(2, "No such file", "text.txt"), 2, "text.txt: No such file"),
        (ConnectionError("no rank 1 at 127.0.0.1:1"), 1, "no rank 1 at 127.0.0.1:1"),
        (PeerError("rank 1 (stage 1) closed its connection", 1), 1, "rank 1 (stage 1) closed its connection"),
        *(
            (ModuleNotFoundError(name=name), 2, f'{name} is missing; install it with: pip install "lowbit[{extra}]"')
            for name, extra in (("datasets.arrow", "datasets"), ("rich", "train"))
        ),
    ],
)
def test_errors_of_the_user_are_one_line(error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, one_line_errors(traceback=False):
        raise error
    assert ended.value.code == code == exit_code(error)
    assert capsys.readouterr().err == f"error: {line}\n" == f"error: {describe(error)}\n"


def test_ctrl_c_is_a_word_and_a_code(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended, one_line_errors(traceback=False):
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (ValueError("bits is 9"), True),
        (PeerError("gone", 1), True),
        (KeyError("fault"), False),
        (RuntimeError("of PyTorch"), False),
        (ModuleNotFoundError("No module named 'lowbit.fault'", name="lowbit.fault"), False),
    ],
)
def test_the_traceback_of_a_fault_is_shown_and_that_of_others_if_requested(error: Exception, traceback: bool):
    with pytest.raises(type(error)), one_line_errors(traceback):
        raise error


BASE = """
import sys
from lowbit.cli import main
from lowbit_lab.bench import COMMANDS
from lowbit.cli.app import COMMANDS as APP
from lowbit.cli import EXTRAS

sys.modules |= dict.fromkeys(EXTRAS)
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
        print("code 0")
    except SystemExit as end:
        print("code", end.code)
"""
NEEDS = [
    "train", "train run.toml", "train --help", "train --dry-run", "config", "config --help", "demo", "demo --help",
    "calibrate model", "evaluate model", "plan memory", *(f"bench {name}" for name in COMMANDS), "bench codecs --help",
]  # fmt: skip
NEEDS_NOT = ["", "--help", "--version", "bench", "bench --help", "plan"]


def test_a_base_install_says_what_to_install():
    words = [*NEEDS, *NEEDS_NOT, "nonsense"]
    done = subprocess.run(
        [sys.executable, "-c", BASE], input="\n".join(words), text=True, capture_output=True, check=True
    )  # fmt: skip
    codes = [line for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == ["code 2"] * len(NEEDS) + ["code 0"] * len(NEEDS_NOT) + ["code 2"], done.stderr
    told = done.stderr.splitlines()
    assert told[: len(NEEDS)] == ['error: pydantic is missing; install it with: pip install "lowbit[train]"'] * len(
        NEEDS
    )
    assert told[len(NEEDS) :] == [f"error: lowbit has no 'nonsense'; known: {', '.join(APP.commands())}"]
    assert done.stdout.count("where to begin:") == 2


def test_ctrl_c_ends_a_command_without_a_traceback():
    with pytest.raises(SystemExit) as ended, one_line_errors(False):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    with pytest.raises(KeyboardInterrupt), one_line_errors(True):
        raise KeyboardInterrupt


LINES = [
    ("train --a.b.c=1", "unknown option --a.b.c; "),
    ("train --run.output.x 1", "unknown option --run.output.x; did you mean --run.output?; see lowbit train --help"),
    ("train missing.toml", "error: configuration file missing.toml: No such file or directory"),
    ("train --steps 3", "error: unknown option --steps; did you mean --run.steps?; see lowbit train --help"),
    ("train --resume --overwrite", "run.resume and run.overwrite are both true; allowed: one of the two"),
    ("train --data.text folder", "data.text has 'folder', where there is no file; allowed: a folder with a file"),
    ("train --data.text text.txt", "data.text text.txt has 9 tokens to train on; allowed: at least 2049"),
    ("bench pipeline --link -25mbit", "link is '-25mbit': cannot read '-25mbit'; allowed:"),
    ("plan pipeline cluster.toml", "machine 'desk': machine.tflops is -1; allowed: at least 0"),
    ("plan memory --budget 24", "budget is '24', less than a megabyte; allowed: more, such as 24gb or 800mb"),
    ("train --allow-change run.steps", "run.allow_change is ['run.steps'] and run.resume is false"),
    ("bench convergence --seed a", "seeds is ['a']; allowed: an integer or a list of integers"),
    ("train a.toml b.toml", "unexpected argument 'b.toml'; see lowbit train --help"),
    ("demo --steps 10", "error: unknown option --steps; see lowbit demo --help"),
    ("report nowhere", "error: nowhere does not exist; allowed: the folder of a run or a file of results"),
    ("trian", "lowbit has no 'trian'; did you mean train?"),
    ("bench nonsense", "lowbit bench has no 'nonsense'; known: pipeline, codecs,"),
    ("evaluate", "the following arguments are required: MODEL; see lowbit evaluate --help"),
    ("train folder", "configuration file folder: Is a directory"),
    ("train --model.pretrained list", "list/config.json does not hold a JSON object"),
    ("train --model.pretrained text.txt", "text.txt/config.json: Not a directory"),
    ("bench codecs --data real --activations text.txt", "activations are 'text.txt'; allowed: a folder with a model"),
    ("bench spectrum list text.txt", "list/config.json does not hold a JSON object"),
    ("bench codecs --json folder", "folder cannot be written: it is a folder or a device"),
    ("evaluate odd", "model is 'odd'; odd/config.json cannot be read: Validation error"),
    ("evaluate list", "model is 'list'; list/config.json cannot be read: Unrecognized model"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in {"list": [], "odd": {"model_type": "llama", "hidden_size": "x"}}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    Path("folder").mkdir()
    Path("cluster.toml").write_text('[[machine]]\nname = "desk"\ntflops = -1\n')
    Path("text.txt").write_text("no tensor")
    Path("text.pt").write_text("no tensor")


@pytest.mark.parametrize(("command", "line"), LINES)
def test_bad_input_is_one_line(command: str, line: str):
    result = invoke(*command.split(), columns=200)
    assert result.exit_code == 2, (result.output, result.exception)
    assert line in result.stderr
    assert result.stderr.strip().startswith("error: ")  # after a bar of progress, where there was one
    assert result.stderr.strip().count("\n") == 0


def test_a_package_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("train")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith('error: transformers is missing; install it with: pip install "lowbit[train]"')


EARLY = [
    "train --ranks 9",
    "train --pipeline.forward transfrom",
    "train --data.text nowhere",
    "train --data.held_out nowhere",
    "train --model.pretrained Qwen/Qwen2.5-0.5B",
    "train --run.device cuda:7",
    "train --resume",
    "doctor",
    "doctor --meet nosuchhost.invalid:29400",
]


def test_slips_are_refused_before_the_slow_imports():
    """`torch._dynamo`, which lowbit's stages and activations import, takes as long as PyTorch itself."""
    script = """import sys
from lowbit.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        print(end.code, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, *EARLY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 False"] * len(EARLY), done.stderr
