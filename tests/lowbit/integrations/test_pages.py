"""Pages about other people's engines and trainers run, where the packages that a block names are installed.

A block names them behind its language: ```py torchft torchrun=2.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.test_docs import ROOT, Block, blocks, joined, name, run

PAGES = sorted((ROOT / "docs" / "engines").glob("*.md"))
TRAINERS = ROOT / "docs" / "how-to" / "data-parallel.md"
BLOCKS = [
    pytest.param(block, 2 if page == TRAINERS else block.ranks, id=f"{name(page)}:{block.line}")
    for page in (*PAGES, TRAINERS)
    for block in blocks(page.read_text())
    if block.language == "py"
]


NOT_RUN = {"index": "a table", "vllm": "commands; `test_vllm_engine.py` runs the plug-in in its engine and server"}


def test_each_engine_and_trainer_has_a_block_that_runs():
    with_blocks = {page.stem for page in PAGES if any(b.language == "py" for b in blocks(page.read_text()))}
    assert with_blocks | NOT_RUN.keys() == {page.stem for page in PAGES}
    trainers = [block.words for block in blocks(TRAINERS.read_text()) if block.language == "py"]
    assert trainers == [("accelerate",), ("transformers", "accelerate"), ("lightning",)]


@pytest.mark.docs
@pytest.mark.parametrize(("block", "ranks"), BLOCKS)
def test_block_runs(block: Block, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in block.words:
        if "=" not in package and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    script = tmp_path / "block.py"
    script.write_text(joined([block]))
    output = run(script, ranks)
    if block.words in (("ray",), ("torchft",)):  # whole programs
        assert re.search(r"loss \d\.\d{3}, \d\.\d\d bits per element, [\d,]+ bytes sent by each", output), output
