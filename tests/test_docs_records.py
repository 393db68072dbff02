"""Pages of results with speeds say when the code that they measure has changed since they were recorded.

The history of the repository tells; without one, as in a source distribution or a shallow clone, nothing is checked.
"""

import json
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
RECORDS = {"codecs": ("codecs", "codecs-layer"), "pipeline": ("pipeline", "race", "width-1024", "width-4096")}
"""Records of `make speeds`, which know their commit, by page."""
OLDER = re.compile(r"The earliest record here is older than the last changes of (.+); speeds may differ today\.")


def git(*words: str) -> str:
    """Return what git says about this repository; empty if it fails."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def source(package: str) -> str:
    """Return the folder of a package."""
    return f"src/{package.replace('.', '/')}"


def changed(package: str) -> str:
    """Return the day of the last commit that changed a package."""
    return git("log", "-1", "--format=%as", "--", source(package))


def commits(page: str) -> set[str]:
    """Return the commits of which a page's records are, as far as this repository has them."""
    data = ROOT / "docs/results/data"
    files = [file for name in RECORDS.get(page, ()) for file in data.rglob(f"{name}.json")]
    of = {json.loads(file.read_text("utf-8"))["machine"].get("commit", "").removesuffix("-dirty") for file in files}
    return {commit for commit in of if commit and git("cat-file", "-t", commit) == "commit"}


@pytest.mark.parametrize("page", MEASURED)
def test_a_page_that_is_older_than_its_code_says_so(page: str):
    if git("rev-parse", "--show-toplevel") != str(ROOT) or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no whole history of this repository")
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text("utf-8")
    recorded = min(re.findall(r"\b20\d\d-\d\d-\d\d\b", text))
    sentence = OLDER.search(text)
    said = set(re.findall(r"`([\w.]+)`", sentence[1])) if sentence else set()
    since = {package for package in MEASURED[page] if changed(package) > recorded}
    for commit in commits(page):  # of the same day, too
        since |= {p for p in MEASURED[page] if git("log", "--format=%h", f"{commit}..HEAD", "--", source(p))}
    assert said == since, f"docs/results/{page}.md has records of {recorded}: say which code has changed since"
