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


def fine_tune(*options: str) -> tuple[list[float], float]:
    """Losses, and the MB that autograd keeps."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fine_tune.py"), *options],
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loss ([\d.]+), autograd keeps ([\d.]+) MB", done.stdout)
    return [float(loss) for loss, _ in found], float(found[0][1])


def test_one_line_keeps_less_and_learns_the_same():
    options = ("--steps", "8", "--sequence", "64")
    plain, before = fine_tune("--plain", *options)
    few, after = fine_tune(*options)
    assert after < 0.5 * before
    assert few[-1] < few[0]
    assert abs(few[-1] - plain[-1]) < 0.1
