"""Nothing imports upward: each package may use the ones below it, whether at import or later."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
_BOUNDARY = {"collectives", "ranks", "codecs"}
_RECIPE = _BOUNDARY | {"terminal", "config", "pipeline", "gradients", "activations"}
MAY_IMPORT: dict[str, set[str]] = {
    "terminal": set(),
    "kernels": set(),
    "config": {"terminal"},
    "report": {"terminal"},
    "network": set(),
    "codecs": {"kernels"},
    "ranks": {"config", "terminal"},
    "collectives": {"ranks", "codecs"},
    "pipeline": _BOUNDARY,
    "gradients": _BOUNDARY,
    "tensor_parallel": _BOUNDARY,
    "activations": {"codecs", "kernels"},
    "integrations": _RECIPE | {"tensor_parallel"},
    "train": _RECIPE | {"integrations", "report", "simulate"},
    "simulate": {"codecs", "kernels"},
    "plan": _RECIPE | {"report", "train", "simulate"},
    "doctor": {"codecs", "config", "plan", "ranks", "report", "terminal", "train"},
    "evaluate": _RECIPE | {"report", "train", "tensor_parallel"},
    "bench": _RECIPE | {"report", "train", "integrations", "tensor_parallel", "plan", "simulate", "kernels", "network"},
    "cli": _RECIPE | {"report", "train", "plan", "doctor", "evaluate", "bench"},
    "__main__": {"cli"},
}
MOST_LINES = 600
FILES = sorted((SOURCE / "lowbit").rglob("*.py"))


def package_of(module: str) -> str:
    """`codecs` for lowbit.codecs.cast; an empty string for lowbit itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def modules_of(source: str, package: list[str], *, types: bool = True) -> set[str]:
    """What of lowbit a file of `package` (["lowbit", "codecs"]) imports anywhere, names included.

    Args:
        types: whether imports that only type checkers see count.
    """
    modules = []
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules += [f"{base}.{alias.name}" for alias in node.names]
        elif types or not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            pending += ast.iter_child_nodes(node)
    return {module for module in modules if module.split(".")[0] == "lowbit"}


def imported(source: str, package: list[str]) -> set[str]:
    """The packages of lowbit that a file of `package` imports anywhere."""
    return {package_of(module) for module in modules_of(source, package)} - {"", "__version__"}


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


def test_there_is_no_circle():
    parts = {file: list(file.relative_to(SOURCE).with_suffix("").parts) for file in FILES}
    names = {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}
    uses = {}
    for name, file in names.items():
        modules = modules_of(file.read_text(), parts[file][:-1], types=False)
        uses[name] = {m if m in names else m.rpartition(".")[0] for m in modules} & (names.keys() - {name})
    graphlib.TopologicalSorter(uses).prepare()  # raises a CycleError that names the modules


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_every_package_has_a_line_in_the_maps_of_the_house(page: str):
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (SOURCE.parent / page).read_text(), re.M)
    named = {name.strip("`") for row in table for name in row.split(", ")}
    packages = {file.parent.name for file in (SOURCE / "lowbit").glob("*/__init__.py")}
    assert packages <= named, f"{page} has no line for {sorted(packages - named)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_is_one_room(file: Path):
    lines = len(file.read_text().splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: perhaps two rooms"
