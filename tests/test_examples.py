"""The examples run as they are."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_pipeline_learns_in_few_bits():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLES / "pipeline.py"), "--steps", "40"]
    done = subprocess.run(
        [sys.executable, *command, *script],
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 3.2 < 5.6, done.stdout  # guessing costs log(256) = 5.5
    # A quarter of the steps at 32 bits, the rest at 4.4.
    assert re.search(r"rank 0 sent [\d.]+ MB, 11\.\d bits", done.stdout), done.stdout


def test_data_parallel_ranks_learn_the_same():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLES / "data_parallel.py"), "--steps", "40"]
    done = subprocess.run(
        [sys.executable, *command, *script],
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 3.2, done.stdout
    assert "bit for bit: yes" in done.stdout


def test_one_line_makes_autograd_keep_less():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fine_tune.py"), "--steps", "8", "--sequence", "64"],
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    after, before = re.findall(r"([\d.]+) MB", done.stdout)
    assert float(after) < 0.4 * float(before)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 4.5 < 5 < losses[0], done.stdout
