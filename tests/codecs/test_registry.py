"""Formats of lowbit's own folders, and those that installed packages bring along."""

from __future__ import annotations

import ast
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit.codecs import Codec, GroupInt, names, parse, parse_pair
from tests.command_line import invoke

PACKAGE = Path(__file__).parent / "outside"


def install(folder: Path, name: str, entry_points: dict[str, str]) -> None:
    """What an installer leaves of a package without files: its name and its entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{short} = {value}" for short, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lowbit.codecs]", *lines]))
    names.outside.cache_clear()


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package of the example, installed in a folder on the path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "site-packages"
    folder.mkdir()
    shutil.copy(PACKAGE / "sign_codec.py", folder)
    install(folder, project["name"], project["entry-points"]["lowbit.codecs"])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "sign_codec", raising=False)
    yield folder
    names.outside.cache_clear()


def test_a_format_is_a_folder() -> None:
    folders = {path.parent.name for path in Path(names.__file__).parent.glob("*/codec.py")}
    assert set(names.formats()) == folders
    assert all(issubclass(codec, Codec) for codec in names.formats().values())


def test_an_installed_codec_is_named_like_ours(sign: Path) -> None:
    codec = parse("sign")
    assert repr(codec) == "Sign(scale=1.0)"
    assert parse("Sign(scale=2.0)") != codec
    assert parse(repr(codec)) == codec
    assert parse("AQSGD(inner=Sign(scale=0.5))").inner == parse("Sign(scale=0.5)")  # pyright: ignore
    assert parse_pair("sign") == (codec, GroupInt(bits=6, group=32, symmetric=True))
    assert len({codec.fingerprint(), parse("Sign(scale=2.0)").fingerprint(), GroupInt().fingerprint()}) == 3
    x = torch.tensor([3.0, -0.1])
    assert codec.round_trip(x.repeat(2, 4)).tolist() == [[1.0, -1.0] * 4] * 2
    with pytest.raises(ValueError, match="allowed: .*int4.*, sign, .*, TransformQuant, Sign with its arguments"):
        parse("nothing")


def test_in_benchmarks(sign: Path) -> None:
    arguments = ("--data", "gaussian", "--dtype", "float32", "--shape", "1,4,64", "--thread", "1", "--rounds", "1")
    result = invoke("bench", "codecs", "--codec", "Sign(scale=0.5)", *arguments, "--no-reference")
    assert result.exit_code == 0, result.output
    assert "Sign" in result.stdout


@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        ({"gone": "no_such_package:Gone"}, "gone", "gone = no_such_package:Gone of other cannot be loaded: ModuleNot"),
        ({"gone": "math:gone"}, "gone", "of other cannot be loaded: AttributeError"),
        ({"pi": "math:pi"}, "pi", r"pi = math:pi of other is 3\.14.*; allowed: a codec class"),
        ({"dict": "builtins:dict"}, "dict", r"codec is 'dict', which gives \{\}; allowed: names of codecs"),
        ({"int4": "sign_codec:Sign"}, "int4", "'int4' is ambiguous: .* of lowbit and of the entry point int4"),
        ({"theirs": "theirs:GroupInt"}, "GroupInt(bits=4)", "'GroupInt' is ambiguous: .* of lowbit and of the entry"),
        ({"sign": "theirs:Sign"}, "sign", "'sign' is ambiguous: .* sign_codec:Sign of sign-codec|theirs:Sign of other"),
    ],
)
def test_what_is_wrong_with_an_entry_point_is_one_line(
    sign: Path, points: dict[str, str], name: str, message: str
) -> None:
    install(sign, "other", points)
    with pytest.raises(ValueError, match=message) as error:
        parse(name)
    assert "\n" not in str(error.value)
    assert parse("int3") == GroupInt(bits=3, group=64), "ours go on working"


def test_what_peers_send_names_no_codec() -> None:
    """Entry points are code: only what the user names is looked up. Peers compare fingerprints."""
    for package in ("collectives", "pipeline", "gradients", "tensor_parallel"):
        for file in (Path(lowbit.__path__[0]) / package).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowbit.codecs"):
                    assert not {"parse", "parse_pair", "names"} & {alias.name for alias in node.names}, file
                    assert node.module != "lowbit.codecs.names", file
