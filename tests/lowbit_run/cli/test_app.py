"""`lowbit` and `lowbit train`: options reach the configuration, and what a user can fix is one line."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lowbit
import lowbit_run.train
from lowbit.pipeline import PeerError
from lowbit_lab.bench import COMMANDS
from lowbit_run.cli import one_line_errors
from lowbit_run.cli.app import COMMANDS as APP
from lowbit_run.job import launch
from lowbit_run.train import Summary, TrainConfig, from_mapping, load
from tests.command_line import invoke

SUMMARY = Summary(
    steps=7, steps_here=7, loss=1.3, held_out_loss=1.25, held_out_loss_codecs=1.26, tokens_per_second=900.0,
    seconds_per_step=1.0, bits_forward=4.4, bits_backward=6.5, bits_gradients=None, bytes_per_step=10.0,
    compute_seconds=0.1, codec_seconds=0.1, wait_seconds=0.1, bytes_activations=None, bytes_sent=70, bytes_saved=400,
    seconds=7.0, forward=("tah-quant",), backward=("int6",), ranks=2, stages=2, schedule="1F1B",
    model=None,
)  # fmt: skip


def test_version_and_help_need_no_pytorch():
    assert invoke("--version").stdout == f"lowbit {lowbit.__version__}\n"
    program = "import sys, lowbit_run.cli; lowbit_run.cli.main([]); print({'torch', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    assert done.stdout.endswith("\nset()\n")


ENDING = """
import atexit, sys, lowbit_run.cli

class Last:
    def __del__(self, write=sys.stderr.write):
        write("the interpreter has ended")

sys.modules["last"] = Last()
atexit.register(print, "exit functions have run")
sys.argv[1:] = [{word!r}]
lowbit_run.cli.main()
"""


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("nonsense", 2)])
def test_a_process_of_the_command_ends_without_ending_the_interpreter(word: str, code: int):
    """Threads of PyTorch that still release tensors would then abort a run that has succeeded."""
    done = subprocess.run([sys.executable, "-c", ENDING.format(word=word)], text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "exit functions have run")
    assert "the interpreter has ended" not in done.stderr


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """What is trained, but in name only."""
    configs: list[TrainConfig] = []
    monkeypatch.setattr(lowbit_run.train, "run", lambda config: configs.append(config) or SUMMARY)
    return configs


def test_options_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[TrainConfig]):
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text("[run]\nsteps = 7\nseed = 1\n[pipeline]\nranks = 4\n")
    for words, resume, allowed in [
        ("--run.seed 2 --ranks 3 train.toml", False, ()),
        ("--resume train.toml --run.seed 2 --ranks 3", True, ()),
        ("--resume=auto train.toml", "auto", ()),
        ("train.toml --resume=true --allow-change run.steps", True, ("run.steps",)),
        ("train.toml --allow-change run.steps --allow-change run.seed --resume", True, ("run.steps", "run.seed")),
    ]:
        result = invoke("train", *words.split())
        assert result.exit_code == 0, result.output
        run, pipeline = ran[-1].run, ran[-1].pipeline
        assert (run.steps, run.resume, run.allow_change) == (7, resume, allowed)
        assert (run.seed, pipeline.ranks) == ((2, 3) if "--ranks" in words else (1, 4))
        assert "held-out loss     1.2500" in result.stdout
        assert "4.40 forward, 6.50 backward" in result.stdout
        assert "lowbit report runs/train (writes a page about it)" in " ".join(result.stdout.split())
    missing = invoke("train", "missing.toml", "--traceback")
    assert isinstance(missing.exception, lowbit_run.train.ConfigError), "with its origin"


def test_a_configuration_is_printed_with_all_its_keys_and_read_back(tmp_path: Path):
    bare = invoke("config").stdout
    assert from_mapping(tomllib.loads(bare)) == TrainConfig()
    assert "\n# Steps between checkpoints. 0: no checkpoints. [at least 0]\ncheckpoint_every = 100\n" in bare
    assert "\n# warmup_steps = ...\n" in bare
    file = tmp_path / "train.toml"
    words = ["--model.dim", "64", "--pipeline.forward", "int4,GroupInt(bits=6, group=32)", "--ranks", "3"]
    file.write_text(invoke("config", *words, "--pipeline.warmup-steps", "7", "--run.no_checksums").stdout)
    config = load(file)
    assert config.pipeline.forward == ("int4", "GroupInt(bits=6, group=32)")
    assert (config.model.dim, config.pipeline.ranks, config.pipeline.warmup_steps) == (64, 3, 7)
    assert not config.run.checksums
    assert load(file, ["run.steps=9"]) == load(file, ["run.steps = 9"])
    assert invoke("config", str(file)).stdout == file.read_text()


def test_a_dry_run_checks_and_shows_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "subprocess", None)
    text = tmp_path / "text.txt"
    text.write_text("some text. " * 1000)
    words = ["train", "--dry-run", "--run.output", str(tmp_path / "run"), "--data.text", str(text)]
    words += ["--data.sequence", "32", "--ranks", "4", "--activations.bits", "4,4,4,16", "--model.tied"]
    result = invoke(*words, "--pipeline.forward", "transform", columns=200)
    assert result.exit_code == 0, result.output
    answer, _, settings = result.stdout.partition("\n\n# Settings that differ from the defaults")
    assert answer.startswith("ranks ")
    given = {
        "data": {"text": [str(text)], "sequence": 32},
        "model": {"tied": True},
        "activations": {"bits": [4, 4, 4, 16]},
    }
    given |= {"pipeline": {"ranks": 4, "forward": ["transform"]}, "run": {"output": str(tmp_path / "run")}}
    assert tomllib.loads(settings.partition("\n")[2]) == given
    shown = " ".join(result.stdout.split())
    for part in (
        "ranks 4 on cpu, messages over Gloo",
        "schedule 1F1B, 4 micro-batches of 2 windows",
        "stage 3 rank 3, layers 6 to 7",
        "boundary 0 to 2 forward TransformQuant(",
        "3.48 bits per element",
        "2.31 bits per element",
        "warm-up 50 of 200 steps at full precision",
        "saved by stage 0 to 2 LayerAware(bits=4",
        "saved by stage 3 as PyTorch does",
        "10,450 to train on, 550 held out, vocabulary of 256",
    ):
        assert part in shown
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name != "cache"]
    chosen = " ".join(invoke(*words, columns=200).stdout.split())
    assert "each boundary the most exact of these that does not make its link the bottleneck" in chosen
    assert "format 0 forward Cast(dtype=torch.bfloat16), 16.00 bits per element" in chosen
    assert "format 3 forward TransformQuant(step='token'), 3.48 bits per element" in chosen
    refused = invoke(*words, "--pipeline.stages_per_rank", "2")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "pipeline.stages_per_rank is 2; allowed with 1F1B: 1" in refused.stderr


def test_the_demo_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[Path] = []
    monkeypatch.setattr("lowbit_lab.bench.demo.run", told.append)
    monkeypatch.setattr("lowbit_lab.bench.big.run", lambda output: told.append(output / "big"))
    assert invoke("demo", "--output", str(tmp_path)).exit_code == 0
    assert invoke("demo").exit_code == 0
    assert invoke("demo", "--big").exit_code == 0
    assert told == [tmp_path, Path("runs/demo"), Path("runs/demo/big")]


@pytest.mark.usefixtures("ran")
def test_a_rank_that_somebody_started_ends_with_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    assert invoke("train", "--ranks", "2").stdout == "finished; the results are on rank 0's machine\n"
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun, whose first rank says it
    assert not invoke("train", "--ranks", "2").stdout


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
from lowbit_run.cli import EXTRAS, main
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
        "calibrate model", "evaluate model", "plan memory", "generate model", *(f"bench {name}" for name in COMMANDS),
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
        ("train --data.text text.txt", "data.text text.txt has 9 tokens to train on; allowed: at least 2049"),
        ("train --data.text folder", "data.text has 'folder', where there is no file; allowed: a folder with a file"),
        ("bench pipeline --link -25mbit", "link is '-25mbit': cannot read '-25mbit'; allowed:"),
        ("plan pipeline cluster.toml", "machine 'desk': machine.tflops is -1; allowed: at least 0"),
        ("plan memory --budget 24", "budget is '24', less than a megabyte; allowed: more, such as 24gb or 800mb"),
        (
            "train --allow-change run.steps",
            "run.allow_change is ['run.steps']; allowed: with run.resume or run.supervise only",
        ),
        ("train a.toml b.toml", "unexpected argument 'b.toml'; see lowbit train --help"),
        ("report nowhere", "error: nowhere does not exist; allowed: the folder of a run or a file of results"),
        ("generate folder --prompt a", "config.json: No such file or directory; allowed: a folder with a saved model"),
        ("generate nowhere --prompt a", "folder is 'nowhere'; allowed: a folder that exists, with a model, adapters"),
        ("generate list --prompt a --score b", "prompt and score are given; allowed: one of them"),
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
