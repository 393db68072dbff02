"""Nothing imports upward: each package may use the ones below it, whether at import or later.

And nothing that a peer sends or a file holds can run code: what would unpickle or evaluate it is used nowhere.
"""

import ast
import graphlib
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
_BOUNDARY = {"collectives", "wire", "codecs", "terminal"}
_RECIPE = _BOUNDARY | {"config", "pipeline", "gradients", "activations"}
MAY_IMPORT: dict[str, set[str]] = {
    "terminal": set(),
    "cores": set(),
    "kernels": set(),
    "config": {"terminal"},
    "report": {"terminal", "config", "cores"},
    "codecs": {"kernels", "terminal"},
    "wire": {"terminal"},
    "job": {"wire", "config", "terminal"},
    "collectives": {"wire", "codecs", "terminal"},
    "pipeline": _BOUNDARY,
    "gradients": _BOUNDARY,
    "tensor_parallel": _BOUNDARY,
    "activations": {"codecs", "kernels", "terminal"},
    "integrations": _RECIPE | {"tensor_parallel"},
    "train": _RECIPE | {"cores", "job", "integrations", "report", "simulate"},
    "simulate": {"codecs", "kernels", "terminal"},
    "plan": _RECIPE | {"report", "train", "simulate"},
    "generate": {"codecs", "config", "integrations", "job", "terminal", "train", "wire"},
    "doctor": {"codecs", "config", "cores", "job", "plan", "report", "terminal", "train", "wire"},
    "cli": _RECIPE | {"job", "report", "train", "plan", "doctor", "generate"},
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


def test_nothing_imports_upward_and_the_library_never_the_laboratory():
    upward = {}
    for file in LIBRARY:
        module = list(file.relative_to(SOURCE).with_suffix("").parts)
        own = package_of(".".join(module))
        allowed = set() if own == "__init__" else MAY_IMPORT[own] | {own}  # the root package loads nothing of its own
        used = {package_of(each) for each in modules_of(file.read_text(), module[:-1])} - {"", "__version__"}
        upward[str(file)] = used - allowed
    assert not {file: names for file, names in upward.items() if names}


def test_there_is_no_circle():
    parts = {file: list(file.relative_to(SOURCE).with_suffix("").parts) for file in FILES}
    names = {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}
    uses = {}
    for name, file in names.items():
        modules = modules_of(file.read_text(), parts[file][:-1], types=False)
        uses[name] = {m if m in names else m.rpartition(".")[0] for m in modules} & (names.keys() - {name})
    graphlib.TopologicalSorter(uses).prepare()  # raises a CycleError that names the modules


def test_every_package_is_in_the_map_and_no_file_is_too_long():
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (SOURCE.parent / "docs" / "design.md").read_text(), re.M)
    named = {name.strip("`") for row in table for name in row.split(", ")}
    packages = {file.parent.name for file in SOURCE.glob("lowbit*/*/__init__.py")}
    assert packages <= named, f"docs/design.md has no line for {sorted(packages - named)}"
    lines = {str(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {file: count for file, count in lines.items() if count > MOST_LINES}, "perhaps two rooms"


THREADS = {
    "wire/threads.py": "joined when the process ends",
    "wire/mailbox.py": "joined when the process ends, after its connections are closed",
    "collectives/calls.py": "joined when the process ends",
    "job/peers.py": "joined by `close`",
    **dict.fromkeys(
        ("job/launch.py", "job/output.py", "job/stop.py", "doctor/survey.py", "train/progress.py"),
        "never inside PyTorch",
    ),
}
"""Files that start threads, and why none aborts the process when its interpreter ends (`wire.threads`)."""


def test_no_other_file_starts_threads():
    starting = [file for file in LIBRARY if re.search(r"\b(Thread|Timer)\(", file.read_text())]
    assert {str(file.relative_to(SOURCE / "lowbit")) for file in starting} == THREADS.keys()


UNSAFE = re.compile(
    r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|_tensor_to_object|\w*[Pp]ickle\w*|dill|shelve|"
    r"marshal|joblib|yaml|multiprocessing|shell"
)


def unsafe(source: str) -> set[str]:
    """What a file uses of `UNSAFE`, and of calls that run code unless they are told not to."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = {part for alias in node.names for part in alias.name.split(".")}
            case ast.ImportFrom(module=str(module)):
                names = {*module.split("."), *(alias.name for alias in node.names)}
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                names = {name}
            case _:
                names = set()
        found |= {name for name in names if UNSAFE.fullmatch(name)} | unsafe_call(node)
    return found


def unsafe_call(node: ast.AST) -> set[str]:
    """eval, exec, `torch.load` without weights_only=True, and trust_remote_code other than False."""
    match node:
        case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
            return {name}
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            return set() if given.get("weights_only") is True else {"torch.load"}
        case ast.Call(func=ast.Attribute(value=owner, attr="from_pretrained" | "from_config")):
            automatic = ast.unparse(owner).lower().startswith("auto")  # Transformers' classes, which ask the user
            return {"trust_remote_code"} if automatic and "trust_remote_code" not in ast.unparse(node) else set()
        case ast.keyword(arg="trust_remote_code", value=value):
            return set() if getattr(value, "value", None) is False else {"trust_remote_code"}
    return set()


USES = {
    "dist.all_gather_object(parts, mine)": {"all_gather_object"},
    "from torch.distributed import recv_object_list as r": {"recv_object_list"},
    "import torch.multiprocessing as mp": {"multiprocessing"},
    "import pickle": {"pickle"},
    "x = eval(text); model.eval()": {"eval"},
    "torch.load(path)": {"torch.load"},
    "torch.load(path, weights_only=False)": {"torch.load"},
    "torch.load(path, weights_only=True); yaml_safe = json.load(f)": set(),
    "np.load(path, allow_pickle=True)": {"allow_pickle"},
    "load(folder, trust_remote_code=flag)": {"trust_remote_code"},
    "load(folder, trust_remote_code=False)": set(),
    "AutoConfig.from_pretrained(folder)": {"trust_remote_code"},
    "AutoConfig.from_pretrained(folder, trust_remote_code=False); Calibration.from_config(x)": set(),
    "subprocess.run(text, shell=True)": {"shell"},
}


def test_nothing_received_or_read_can_run_code():
    assert {source: unsafe(source) for source in USES} == USES
    found = {str(file): unsafe(file.read_text()) for file in LIBRARY}
    assert {file: names for file, names in found.items() if names} == {}
