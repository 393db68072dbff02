"""Nothing imports upward: each package may use the ones below it, whether at import or later."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MAY_IMPORT = {
    "ops": set(),
    "network": set(),
    "codecs": {"ops"},
    "ranks": {"config"},
    "collectives": {"ranks", "codecs", "ops"},
    "gradients": {"collectives", "ranks", "codecs"},
    "pipeline": {"collectives", "ranks", "codecs"},
    "activations": {"codecs", "ops"},
    "tensor_parallel": {"collectives", "ranks", "codecs"},
    "train": {"activations", "gradients", "pipeline", "collectives", "ranks", "codecs"},
    "bench": {
        "train",
        "tensor_parallel",
        "activations",
        "gradients",
        "pipeline",
        "collectives",
        "ranks",
        "codecs",
        "ops",
        "network",
    },
    "evaluate": {"bench", "train", "tensor_parallel", "collectives", "ranks", "codecs"},
    "cli": {"evaluate", "bench", "train", "activations", "codecs"},
    "__main__": {"cli"},
}
MOST_LINES = 400
FILES = sorted((SOURCE / "lowbit").rglob("*.py"))


def package_of(module: str) -> str:
    """`codecs` for lowbit.codecs.cast; an empty string for lowbit itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(source: str, package: list[str]) -> set[str]:
    """The packages of lowbit that a file of `package` (["lowbit", "codecs"]) imports anywhere."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules += [f"{base}.{alias.name}" for alias in node.names]
    inside = [module for module in modules if module.split(".")[0] == "lowbit"]
    return {package_of(module) for module in inside} - {"", "__version__"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, lowbit.train.loop", {"train"}),
        ("from lowbit import cli, __version__", {"cli"}),
        ("from ..pipeline import LowBitStage", {"pipeline"}),
        ("from .. import ops", {"ops"}),
        ("from . import base", {"codecs"}),
        ("def f():\n    from lowbit.bench import codecs", {"bench"}),
        ("from lowbitx import cli", set()),
    ],
)
def test_imports_are_seen_in_every_spelling(source: str, expected: set[str]):
    assert imported(source, ["lowbit", "codecs"]) == expected


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_imports_upward(file: Path):
    module = list(file.relative_to(SOURCE).with_suffix("").parts)
    own = package_of(".".join(module))
    if own == "__init__":  # the root package loads nothing of its own
        own, allowed = "", set()
    else:
        allowed = MAY_IMPORT[own] | {own}
    upward = imported(file.read_text(), module[:-1]) - allowed
    assert not upward, f"lowbit.{own} must not import {sorted(upward)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_is_one_room(file: Path):
    lines = len(file.read_text().splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: perhaps two rooms"
