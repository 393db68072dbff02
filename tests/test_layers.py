"""Nothing imports upward: each package may use the ones below it, whether at import or later.

And nothing that a peer sends or a file holds can run code: what would unpickle or evaluate it is used nowhere.
"""

import ast
import graphlib
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
_BOUNDARY = {"lowbit.collectives", "lowbit.wire", "lowbit.codecs", "lowbit.escape", "lowbit.files"}
_LIBRARY = _BOUNDARY | {"lowbit.pipeline", "lowbit.gradients", "lowbit.activations"}
_PROGRAM = {"lowbit_run.config", "lowbit_run.job", "lowbit_run.terminal", "lowbit_run.train"}
MAY_IMPORT: dict[str, set[str]] = {
    "lowbit": set(),
    "lowbit.__main__": set(),
    "lowbit.escape": set(),
    "lowbit.files": set(),
    "lowbit.kernels": set(),
    "lowbit.codecs": {"lowbit.kernels", "lowbit.escape"},
    "lowbit.wire": {"lowbit.escape"},
    "lowbit.collectives": {"lowbit.wire", "lowbit.codecs", "lowbit.escape"},
    "lowbit.pipeline": _BOUNDARY,
    "lowbit.gradients": _BOUNDARY,
    "lowbit.tensor_parallel": _BOUNDARY,
    "lowbit.activations": {"lowbit.codecs", "lowbit.kernels", "lowbit.escape", "lowbit.files"},
    "lowbit.integrations": _LIBRARY | {"lowbit.tensor_parallel"},
    "lowbit_run": set(),
    "lowbit_run.cores": set(),
    "lowbit_run.terminal": {"lowbit.escape"},
    "lowbit_run.config": {"lowbit.escape", "lowbit.files", "lowbit_run.terminal"},
    "lowbit_run.report": {
        "lowbit.escape",
        "lowbit.files",
        "lowbit_run.config",
        "lowbit_run.cores",
        "lowbit_run.terminal",
    },
    "lowbit_run.job": {"lowbit.escape", "lowbit.wire", "lowbit_run.config", "lowbit_run.terminal"},
    "lowbit_run.simulate": {"lowbit.codecs", "lowbit.escape", "lowbit.kernels"},
    "lowbit_run.train": _LIBRARY
    | {"lowbit.integrations", "lowbit_run.config", "lowbit_run.cores", "lowbit_run.job", "lowbit_run.report"}
    | {"lowbit_run.simulate", "lowbit_run.terminal"},
    "lowbit_run.plan": _LIBRARY | _PROGRAM | {"lowbit_run.report", "lowbit_run.simulate"},
    "lowbit_run.generate": {"lowbit.codecs", "lowbit.escape", "lowbit.integrations", "lowbit.wire"} | _PROGRAM,
    "lowbit_run.doctor": {"lowbit.codecs", "lowbit.escape", "lowbit.wire"}
    | _PROGRAM
    | {"lowbit_run.cores", "lowbit_run.plan", "lowbit_run.report"},
    "lowbit_run.cli": _LIBRARY
    | _PROGRAM
    | {"lowbit_run.doctor", "lowbit_run.generate", "lowbit_run.plan", "lowbit_run.report"},
    "lowbit_run.__main__": {"lowbit_run.cli"},
}
MOST_LINES = 600
PACKAGES = ("lowbit", "lowbit_run", "lowbit_lab")
"""Each may use those before it."""
FILES = sorted(file for package in PACKAGES for file in (SOURCE / package).rglob("*.py"))
INSTALLED = [file for file in FILES if not file.is_relative_to(SOURCE / "lowbit_lab")]


def package_of(module: str) -> str:
    """`lowbit.codecs` for lowbit.codecs.cast, `lowbit_lab` for all of the laboratory; `lowbit` for its own names."""
    parts = module.split(".")
    return parts[0] if parts[0] not in PACKAGES[:2] else ".".join(parts[:2])


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
    return {module for module in modules if module.split(".")[0] in (*PACKAGES, "benchmarks")}


def test_nothing_imports_upward():
    upward = {}
    for file in INSTALLED:
        module = list(file.relative_to(SOURCE).with_suffix("").parts)
        own = package_of(".".join(module).removesuffix(".__init__"))
        used = {package_of(each) for each in modules_of(file.read_text(), module[:-1])}
        upward[str(file)] = used - MAY_IMPORT[own] - {own, *PACKAGES[:2], "lowbit.__version__"}
    assert not {file: names for file, names in upward.items() if names}


def test_the_library_knows_nothing_of_the_program():
    assert not {
        name for own, used in MAY_IMPORT.items() if own.startswith("lowbit.") for name in used if "_run" in name
    }
    for file in (SOURCE / "lowbit").rglob("*.py"):
        package = list(file.relative_to(SOURCE).parent.parts)
        assert {name.split(".")[0] for name in modules_of(file.read_text(), package)} <= {"lowbit"}, file


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
    "lowbit/wire/threads.py": "joined when the process ends",
    "lowbit/wire/mailbox.py": "joined when the process ends, after its connections are closed",
    "lowbit/collectives/calls.py": "joined when the process ends",
    "lowbit_run/job/peers.py": "joined by `close`",
    **dict.fromkeys(
        [
            f"lowbit_run/{name}.py"
            for name in ("job/launch", "job/output", "job/stop", "doctor/survey", "train/progress", "report/command")
        ],
        "never inside PyTorch",
    ),
}
"""Files that start threads, and why none aborts the process when its interpreter ends (`wire.threads`)."""


def test_no_other_file_starts_threads():
    starting = [file for file in INSTALLED if re.search(r"\b(Thread|Timer)\(", file.read_text())]
    assert {str(file.relative_to(SOURCE)) for file in starting} == THREADS.keys()


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
    found = {str(file): unsafe(file.read_text()) for file in INSTALLED}
    assert {file: names for file, names in found.items() if names} == {}
