"""Nothing that a peer sends or a file holds can run code: what would unpickle or evaluate it is used nowhere."""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "lowbit"
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
    found = {str(file.relative_to(SOURCE)): unsafe(file.read_text()) for file in SOURCE.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}
