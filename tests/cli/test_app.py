"""`lowbit`, its help and `lowbit train`: options reach the configuration, bad input is one line."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lowbit
import lowbit.train
from lowbit.train import Summary, TrainConfig, from_mapping, load
from tests.command_line import invoke

SUMMARY = Summary(
    steps=7, steps_here=7, loss=1.3, held_out_loss=1.25, held_out_loss_codecs=1.26, tokens_per_second=900.0,
    seconds_per_step=1.0, bits_forward=4.4, bits_backward=6.5, bits_gradients=None, bytes_per_step=10.0,
    compute_seconds=0.1, codec_seconds=0.1, wait_seconds=0.1, bytes_activations=None, bytes_sent=70, bytes_saved=400,
    seconds=7.0, boundary="lowbit", forward=("tah-quant",), backward=("int6",), ranks=2, stages=2, schedule="1F1B",
    model=None,
)  # fmt: skip


def test_version_and_help_need_no_pytorch():
    assert invoke("--version").stdout == f"lowbit {lowbit.__version__}\n"
    program = "import sys, lowbit.cli; lowbit.cli.main([]); print({'torch', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    assert done.stdout.endswith("\nset()\n")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """What is trained, but in name only."""
    configs: list[TrainConfig] = []
    monkeypatch.setattr(lowbit.train, "run", lambda config: configs.append(config) or SUMMARY)
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
    missing = invoke("train", "missing.toml", "--traceback")
    assert isinstance(missing.exception, lowbit.train.ConfigError), "with its origin"


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
    monkeypatch.setattr(subprocess, "Popen", None)
    text = tmp_path / "text.txt"
    text.write_text("some text. " * 1000)
    words = ["train", "--dry-run", "--run.output", str(tmp_path / "run"), "--data.text", str(text)]
    words += ["--data.sequence", "32", "--ranks", "4", "--activations.bits", "4,4,4,16", "--model.tied"]
    result = invoke(*words, columns=200)
    assert result.exit_code == 0, result.output
    assert from_mapping(tomllib.loads(result.stdout.partition("\n\nranks ")[0])).pipeline.ranks == 4
    shown = " ".join(result.stdout.split())
    for part in (
        "ranks 4 on cpu, messages over gloo",
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
    chosen = " ".join(invoke(*words, "--pipeline.forward", "auto", columns=200).stdout.split())
    assert "each boundary the most exact of these that does not make its link the bottleneck" in chosen
    assert "format 0 forward Cast(dtype=torch.bfloat16), 16.00 bits per element" in chosen
    assert "format 3 forward TransformQuant(step='token'), 3.48 bits per element" in chosen
    refused = invoke(*words, "--pipeline.stages_per_rank", "2")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "pipeline.stages_per_rank is 2; allowed with 1F1B: 1" in refused.stderr


def test_the_demo_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[Path] = []
    monkeypatch.setattr("lowbit_lab.bench.demo.run", told.append)
    assert invoke("demo", "--output", str(tmp_path)).exit_code == 0
    assert invoke("demo").exit_code == 0
    assert told == [tmp_path, Path("runs/demo")]


@pytest.mark.usefixtures("ran")
def test_a_rank_that_somebody_started_ends_with_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    assert invoke("train", "--ranks", "2").stdout == "finished; the results are on rank 0's machine\n"
    monkeypatch.setenv("LOCAL_RANK", "1")  # torchrun, whose first rank says it
    assert not invoke("train", "--ranks", "2").stdout
