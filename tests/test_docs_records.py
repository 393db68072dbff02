"""Pages of results with speeds say when the code that they measure has changed since they were recorded.

The history of the repository tells; without one, as in a source distribution or a shallow clone, nothing is checked.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEASURED = {
    "codecs": ("lowbit.codecs", "lowbit.kernels"),
    "distance": ("lowbit.pipeline", "lowbit.wire"),
    "engines": ("lowbit.integrations",),
    "gradients": ("lowbit.collectives", "lowbit.gradients"),
    "memory": ("lowbit.activations",),
    "pipeline": ("lowbit.codecs", "lowbit.pipeline"),
    "predictions": ("lowbit_run.simulate", "lowbit_run.plan"),
    "saved-operators": ("lowbit.activations", "lowbit.kernels"),
    "tensor-parallel": ("lowbit.collectives", "lowbit.tensor_parallel"),
}
"""Packages that each page of results measures."""
OLDER = re.compile(r"The earliest record here is older than the last changes of (.+); speeds may differ today\.")


def git(*words: str) -> str:
    """Return what git says about this repository; empty if it fails."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def changed(package: str) -> str:
    """Return the day of the last commit that changed a package."""
    return git("log", "-1", "--format=%as", "--", f"src/{package.replace('.', '/')}")


@pytest.mark.parametrize("page", MEASURED)
def test_a_page_that_is_older_than_its_code_says_so(page: str):
    if git("rev-parse", "--show-toplevel") != str(ROOT) or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no whole history of this repository")
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text("utf-8")
    recorded = min(re.findall(r"\b20\d\d-\d\d-\d\d\b", text))
    sentence = OLDER.search(text)
    said = set(re.findall(r"`([\w.]+)`", sentence[1])) if sentence else set()
    since = {package for package in MEASURED[page] if changed(package) > recorded}
    assert said == since, f"docs/results/{page}.md has records of {recorded}: say which code has changed since"
