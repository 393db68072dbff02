"""Every recipe runs: only paths, numbers of steps and sizes are replaced."""

import json
import tomllib
from pathlib import Path

import pytest

from lowbit_run.train import Summary, TrainConfig, load, train
from tests.lowbit_run.train.runs import LIMIT, TEXT, base, questions
from tests.processes import Ranks

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


def _trained(config: TrainConfig) -> Summary:
    return train(config)


@pytest.mark.docs
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(ranks: Ranks, tmp_path: Path, path: Path):
    given = tomllib.loads(path.read_text())
    for package in ("peft", "bitsandbytes") if "lora" in given else ():
        pytest.importorskip(package)
    text = tmp_path / "text.txt"
    text.write_text(8 * TEXT)
    small = {"data.sequence": 24, "run.steps": 2, "run.output": tmp_path / "run", "run.threads": 1, "run.keep": 2}
    small["data.text"] = questions(tmp_path) if given["data"].get("format") == "jsonl" else text
    small |= {
        "run.eval_batches": 2,
        "run.timeout_seconds": 60,
        "data.batch": given["pipeline"].get("microbatches", 4) * 2,
    }
    if "pretrained" in given["model"]:
        small["model.pretrained"] = base(tmp_path, dim=64)
    else:
        small |= {"model.dim": 32, "model.layers": 2, "model.heads": 2}
    if "warmup_steps" in given["pipeline"]:
        small["pipeline.warmup_steps"] = 1
    config = load(path, [f"{key}={value}" for key, value in small.items()])
    first, second = ranks.run(_trained, config, timeout=LIMIT)
    assert first == second
    assert first.steps == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model"]


def test_the_recipes_are_linked():
    assert len(RECIPES) == 6
    assert "](examples/recipes)" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "how-to" / "train.md").read_text()
    assert all(f"`{path.name}`" in page for path in RECIPES)
