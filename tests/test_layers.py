"""Nothing imports upward: each package may use the ones below it, whether at import or later."""

import ast
import graphlib
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
_BOUNDARY = {"collectives", "wire", "codecs"}
_RECIPE = _BOUNDARY | {"terminal", "config", "pipeline", "gradients", "activations"}
MAY_IMPORT: dict[str, set[str]] = {
    "terminal": set(),
    "kernels": set(),
    "config": {"terminal"},
    "report": {"terminal", "config"},
    "codecs": {"kernels"},
    "wire": {"terminal"},
    "job": {"wire", "config", "terminal"},
    "collectives": {"wire", "codecs"},
    "pipeline": _BOUNDARY,
    "gradients": _BOUNDARY,
    "tensor_parallel": _BOUNDARY,
    "activations": {"codecs", "kernels"},
    "integrations": _RECIPE | {"tensor_parallel"},
    "train": _RECIPE | {"job", "integrations", "report", "simulate"},
    "simulate": {"codecs", "kernels"},
    "plan": _RECIPE | {"report", "train", "simulate"},
    "doctor": {"codecs", "config", "job", "plan", "report", "terminal", "train", "wire"},
    "cli": _RECIPE | {"job", "report", "train", "plan", "doctor"},
    "__main__": {"cli"},
}
MOST_LINES = 600
FILES = sorted([*(SOURCE / "lowbit").rglob("*.py"), *(SOURCE / "lowbit_lab").rglob("*.py")])
LIBRARY = [file for file in FILES if file.is_relative_to(SOURCE / "lowbit")]


def package_of(module: str) -> str:
    """`codecs` for lowbit.codecs.cast, `lowbit_lab` for all of the laboratory; an empty string for lowbit itself."""
    parts = module.split(".")
    if parts[0] != "lowbit":
        return parts[0]
    return parts[1] if len(parts) > 1 else ""


def modules_of(source: str, package: list[str], *, types: bool = True) -> set[str]:
    """What of lowbit and its laboratory a file of `package` (["lowbit", "codecs"]) imports anywhere, names included.

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
    return {module for module in modules if module.split(".")[0] in ("lowbit", "lowbit_lab", "benchmarks")}


def imported(source: str, package: list[str]) -> set[str]:
    """The packages of lowbit that a file of `package` imports anywhere."""
    return {package_of(module) for module in modules_of(source, package)} - {"", "__version__"}


def test_nothing_imports_upward_and_the_library_never_the_laboratory():
    upward = {}
    for file in LIBRARY:
        module = list(file.relative_to(SOURCE).with_suffix("").parts)
        own = package_of(".".join(module))
        allowed = set() if own == "__init__" else MAY_IMPORT[own] | {own}  # the root package loads nothing of its own
        upward[str(file)] = imported(file.read_text(), module[:-1]) - allowed
    assert not {file: names for file, names in upward.items() if names}


def test_there_is_no_circle():
    parts = {file: list(file.relative_to(SOURCE).with_suffix("").parts) for file in FILES}
    names = {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}
    uses = {}
    for name, file in names.items():
        modules = modules_of(file.read_text(), parts[file][:-1], types=False)
        uses[name] = {m if m in names else m.rpartition(".")[0] for m in modules} & (names.keys() - {name})
    graphlib.TopologicalSorter(uses).prepare()  # raises a CycleError that names the modules


def test_every_package_has_a_line_in_the_map_of_the_house():
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (SOURCE.parent / "docs" / "design.md").read_text(), re.M)
    named = {name.strip("`") for row in table for name in row.split(", ")}
    packages = {file.parent.name for file in SOURCE.glob("lowbit*/*/__init__.py")}
    assert packages <= named, f"docs/design.md has no line for {sorted(packages - named)}"


def test_a_file_has_one_reason_to_change():
    lines = {str(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {file: count for file, count in lines.items() if count > MOST_LINES}, "perhaps two rooms"
