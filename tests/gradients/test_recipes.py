"""The recipes of docs/how-to/data-parallel.md for other trainers run, where these are installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.test_docs import ROOT, Block, blocks, joined, run

PAGE = ROOT / "docs" / "how-to" / "data-parallel.md"
RECIPES = [block for block in blocks(PAGE.read_text()) if block.language == "py"]


def test_there_is_a_recipe_for_each():
    assert [block.words for block in RECIPES] == [("accelerate",), ("transformers", "accelerate"), ("lightning",)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda block: block.words[0])
def test_recipe_runs(recipe: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in recipe.words:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *_search_path()]))
    script = tmp_path / "recipe.py"
    script.write_text(joined([recipe]))
    run(script, ranks=2)


def _search_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
