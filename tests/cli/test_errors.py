"""What a user can fix is one line; a fault in lowbit keeps its traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.cli import one_line_errors
from lowbit.cli.app import COMMANDS as APP
from lowbit.pipeline import PeerError
from lowbit_lab.bench import COMMANDS
from tests.command_line import invoke


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("bits is 9;\n  allowed: 2 to 8"), 2, "error: bits is 9; allowed: 2 to 8"),
        (TypeError("x has dtype torch.int64"), 2, "error: x has dtype torch.int64"),
        (FileNotFoundError(2, "No such file", "text.txt"), 2, "error: text.txt: No such file"),
        (ConnectionError("no rank 1 at 127.0.0.1:1"), 1, "error: no rank 1 at 127.0.0.1:1"),
        (PeerError("rank 1 (stage 1) closed its connection", 1), 1, "error: rank 1 (stage 1) closed its connection"),
        (KeyboardInterrupt(), 130, "interrupted"),
        *(
            (
                ModuleNotFoundError(name=f"{name}.x"),
                2,
                f'error: {name}.x is missing; install it with: pip install "{of}"',
            )
            for name, of in (("datasets", "lowbit[datasets]"), ("transformers", "lowbit[train]"))
        ),
    ],
)
def test_errors_of_the_user_are_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended, one_line_errors(traceback=False):
        raise error
    assert (ended.value.code, capsys.readouterr().err) == (code, f"{line}\n")
    with pytest.raises(type(error)), one_line_errors(traceback=True):
        raise error


@pytest.mark.parametrize(
    "fault",
    [KeyError("fault"), RuntimeError("of PyTorch"), ModuleNotFoundError("No 'lowbit.fault'", name="lowbit.fault")],
)
def test_a_fault_keeps_its_traceback(fault: Exception):
    with pytest.raises(type(fault)), one_line_errors(traceback=False):
        raise fault


def codes(lines: list[str], beginning: str = "") -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """How each line ends in one new process, and whether it imported `torch._dynamo`."""
    script = f"""import sys
from lowbit.cli import EXTRAS, main
{beginning}
for line in sys.argv[1:]:
    code = 0
    try:
        main(line.split())
    except SystemExit as end:
        code = end.code
    print("code", code, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, *lines], text=True, capture_output=True, check=True)
    return [line[5:] for line in done.stdout.splitlines() if line.startswith("code ")], done


def test_a_base_install_says_what_to_install():
    needs = [
        "train", "train run.toml", "train --help", "train --dry-run", "config", "config --help", "demo", "demo --help",
        "calibrate model", "evaluate model", "plan memory", *(f"bench {name}" for name in COMMANDS),
        "bench codecs --help",
    ]  # fmt: skip
    needs_not = ["", "--help", "--version", "bench", "bench --help", "plan"]
    found, done = codes([*needs, *needs_not, "nonsense"], "sys.modules |= dict.fromkeys(EXTRAS)")
    assert found == ["2 False"] * len(needs) + ["0 False"] * len(needs_not) + ["2 False"], done.stderr
    missing = 'error: pydantic is missing; install it with: pip install "lowbit[train]"'
    unknown = f"error: lowbit has no 'nonsense'; known: {', '.join(APP.commands())}"
    assert done.stderr.splitlines() == [missing] * len(needs) + [unknown]
    assert done.stdout.count("where to begin:") == 2


def test_slips_are_refused_before_the_slow_imports():
    """`torch._dynamo`, which lowbit's stages and activations import, takes as long as PyTorch itself."""
    early = [
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
    found, done = codes(early)
    assert found == ["2 False"] * len(early), done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in {"list": [], "odd": {"model_type": "llama", "hidden_size": "x"}}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    Path("folder").mkdir()
    Path("cluster.toml").write_text('[[machine]]\nname = "desk"\ntflops = -1\n')
    Path("text.txt").write_text("no tensor")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train --run.output.x 1", "unknown option --run.output.x; did you mean --run.output?; see lowbit train "),
        ("train missing.toml", "error: configuration file missing.toml: No such file or directory"),
        ("train --steps 3", "error: unknown option --steps; did you mean --run.steps?; see lowbit train --help"),
        ("train --resume --overwrite", "run.resume and run.overwrite are both true; allowed: one of the two"),
        ("train --data.text folder", "data.text has 'folder', where there is no file; allowed: a folder with a file"),
        ("bench pipeline --link -25mbit", "link is '-25mbit': cannot read '-25mbit'; allowed:"),
        ("plan pipeline cluster.toml", "machine 'desk': machine.tflops is -1; allowed: at least 0"),
        ("plan memory --budget 24", "budget is '24', less than a megabyte; allowed: more, such as 24gb or 800mb"),
        ("train --allow-change run.steps", "run.allow_change is ['run.steps'] and run.resume is false"),
        ("train a.toml b.toml", "unexpected argument 'b.toml'; see lowbit train --help"),
        ("report nowhere", "error: nowhere does not exist; allowed: the folder of a run or a file of results"),
        ("trian", "lowbit has no 'trian'; did you mean train?"),
        ("bench nonsense", "lowbit bench has no 'nonsense'; known: pipeline, codecs,"),
        ("train folder", "configuration file folder: Is a directory"),
        ("train --model.pretrained list", "list/config.json does not hold a JSON object"),
        ("train --model.pretrained text.txt", "text.txt/config.json: Not a directory"),
        ("bench codecs --data real --activations text.txt", "activations are 'text.txt'; allowed: a folder with a "),
        ("bench spectrum list text.txt", "list/config.json does not hold a JSON object"),
        ("bench codecs --json folder", "folder cannot be written: it is a folder or a device"),
        ("evaluate odd", "model is 'odd'; odd/config.json cannot be read: Validation error"),
        ("evaluate list", "model is 'list'; list/config.json cannot be read: Unrecognized model"),
    ],
)
def test_bad_input_is_one_line(command: str, line: str):
    result = invoke(*command.split(), columns=200)
    assert result.exit_code == 2, (result.output, result.exception)
    assert line in result.stderr
    assert result.stderr.strip().startswith("error: ")  # after a bar of progress, where there was one
    assert result.stderr.strip().count("\n") == 0
