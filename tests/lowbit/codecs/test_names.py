"""Formats by name: lowbit's own and those of installed packages; and settings that are refused by a name's codec."""

import ast
import inspect
import math
import sys
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import ones, tensor, zeros

import lowbit
from lowbit import codecs
from lowbit.codecs import AQSGD, BlockFloat8, Cast, Codec, GroupInt, TAHQuant, TransformQuant, names, parse, parse_pair
from lowbit.codecs.names import pair_name, parse_goal
from tests.command_line import invoke
from tests.refused import refused


def test_short_names() -> None:
    assert parse("int3") == GroupInt(bits=3, group=64)
    assert parse("fp8") == BlockFloat8()
    assert parse("fp8-e5m2") == BlockFloat8(format="e5m2")
    assert parse("tah-quant") == TAHQuant()
    assert parse("transform-backward") == TransformQuant(step="message")


SIX_BITS = GroupInt(bits=6, group=32, symmetric=True)
BF16 = Cast(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "backward", "pair"),
    [
        ("bf16", "", (BF16, BF16)),
        ("bf16", "int4", (BF16, BF16)),
        ("bf16 / int4", "", (BF16, parse("int4"))),
        ("int4", "", (parse("int4"), SIX_BITS)),
        ("int4", "int8", (parse("int4"), parse("int8"))),
        ("int4 / bf16", "int8", (parse("int4"), BF16)),
        ("aq-sgd", "", (AQSGD(), SIX_BITS)),
        ("tah-quant-published-token", "", (TAHQuant.published(allocation="token"), SIX_BITS)),
        ("transform", "", (parse("transform"), parse("transform-backward"))),
        ("transform", "int6", (TransformQuant(), parse("int6"))),
        ("TransformQuant(bits=5)", "", (TransformQuant(bits=5), TransformQuant(bits=5, step="message"))),
    ],
)
def test_both_formats_of_a_boundary(text: str, backward: str, pair: tuple) -> None:
    assert parse_pair(text, backward) == pair
    assert parse_pair(" / ".join(map(repr, pair))) == pair, "the full form says the same"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("TransformQuant(bits=8)", "TransformQuant(bits=8)"),
        ("int4 / int6", "int4 / int6"),
        ("int4 / GroupInt(bits=6, group=32)", "GroupInt(bits=4/6, group=64/32)"),
        ("int4 / GroupInt(bits=4, group=64)", "int4 / GroupInt(bits=4, group=64)"),
        ("int6 / GroupInt(group=32)", "GroupInt(bits=6/4, group=64/32)"),
        ("TAHQuant(tile=64) / TAHQuant(tile=64)", "TAHQuant(tile=64) / TAHQuant(tile=64)"),
        ("TransformQuant(bits=8) / tah-quant", "TransformQuant(bits=8) / tah-quant"),
        ("TransformQuant(bits=2) / TransformQuant(bits=4)", "TransformQuant(bits=2.0/4.0)"),
    ],
)
def test_what_two_formats_share_is_said_once(text: str, name: str) -> None:
    assert pair_name(text) == name


def test_bad_names() -> None:
    rows = {
        "int9": "codec is 'int9'; allowed: aq-sgd, fp8",
        "trasnform": "codec is 'trasnform'; did you mean transform?",
        "tah-quant-published-v1": "did you mean tah-quant-published or tah-quant-published-token?",
        "subspace": "codec is 'subspace', which was removed; allowed: 'transform' for",
        "SubspaceQuant(bits=4)": "which was removed",
        "aq-sgd-8bit": "which was removed; allowed: 'aq-sgd'",
        "feature-int4-static": "'feature-int4-static', which needs calibrated ranges; allowed: a codec that",
        "FeatureInt(gain='static')": "codec is ",
        "GroupInt(bits=9)": "bits is 9; allowed: 2 to 8",
        "GroupInt(6)": "keyword arguments",
        "GroupInt(bit=6)": "GroupInt has no argument 'bit'; did you mean bits[?]",
        "GroupInt(colour=6)": "GroupInt has no argument 'colour'; allowed: bits, ",
        "__import__('os').system('true')": "allowed: AQSGD, BlockFloat8",
        "GroupInt(bits=open('x'))": "allowed",
        "GroupInt(bits=6+1)": "cannot read",
        "Cast(dtype=torch.float7)": "torch has no dtype 'float7'",
        "": "codec is ''",
    }
    refused(*((partial(parse, text), ValueError, message) for text, message in rows.items()))
    refused((partial(parse, None), TypeError, "codec is None; allowed: a text such as 'int4'"))
    pairs = ("int4 / ", "int4 / int9", " / int4", "int4 / int4 / int4")
    refused(*((partial(parse_pair, text), ValueError, "codec is") for text in pairs))


PACKAGE = Path(__file__).parent / "outside"


def install(patch: pytest.MonkeyPatch, folder: Path, name: str, entry_points: dict[str, str], **modules: str) -> None:
    """What an installer leaves of a package, in a folder on the path: its name, its entry points and its modules."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{short} = {value}" for short, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lowbit.codecs]", *lines]))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
        patch.delitem(sys.modules, module, raising=False)
    patch.syspath_prepend(folder)
    patch.setattr(names, "outside", inspect.unwrap(names.outside))  # not cached


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the package of the example is installed in."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    code = (PACKAGE / "sign_codec.py").read_text()
    install(monkeypatch, tmp_path, project["name"], project["entry-points"]["lowbit.codecs"], sign_codec=code)
    return tmp_path


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
    sign: Path, monkeypatch: pytest.MonkeyPatch, points: dict[str, str], name: str, message: str
) -> None:
    install(monkeypatch, sign, "other", points)
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


REFUSED = {
    "AQSGD(inner=AQSGD())": "inner is AQSGD",
    "BlockFloat8(format='e3m4')": "format is 'e3m4'; allowed: 'e4m3', 'e5m2'",
    "BlockFloat8(block=16)": "block is 16; allowed: 32 to 65536",
    "BlockFloat8(block=48)": "block is 48; allowed: 32 to 65536, multiples of 32",
    "BlockFloat8(block=64.0)": r"block is 64\.0; allowed: an integer",
    "BlockFloat8(rounding='up')": "rounding is 'up'; allowed: 'nearest', 'stochastic'",
    "Cast(dtype=torch.int8)": r"dtype is torch\.int8; allowed: torch\.float32",
    "GroupInt(bits=1)": "bits is 1; allowed: 2 to 8",
    "GroupInt(bits=4.0)": r"bits is 4\.0; allowed: an integer",
    "GroupInt(bits=True)": "bits is True",
    "GroupInt(group=12)": "group is 12; allowed: 8 to 65536, multiples of 8",
    "GroupInt(group=0)": "group is 0; allowed: 8 to 65536",
    "GroupInt(symmetric=2)": "symmetric is 2",
    "GroupInt(rounding='up')": "rounding is 'up'; allowed: 'nearest', 'stochastic'",
    "TAHQuant(tile=48)": "tile is 48; allowed: powers of two from 8 to 128",
    "TAHQuant(tile=256)": "tile is 256; allowed: 8 to 128",
    "TAHQuant(high_bits=9)": "high_bits is 9; allowed: 2 to 8",
    "TAHQuant(high_bits=3, low_bits=4)": "low_bits is 4; allowed: 2 to 3",
    "TAHQuant(high_fraction=1.5)": r"high_fraction is 1\.5; allowed: 0 to 1",
    "TAHQuant(high_fraction=nan)": "high_fraction is nan",
    "TAHQuant(high_fraction='all')": "high_fraction is 'all'",
    "TAHQuant(pivot_ratio=1.0)": r"pivot_ratio is 1\.0; allowed: more than 1",
    "TAHQuant(allocation='row')": "allocation is 'row'; allowed: 'range', 'tile', 'token'",
    "TAHQuant(metadata='bf16')": "metadata is 'bf16'; allowed: 'octaves', 'float16'",
    "TAHQuant.published(allocation='range')": "allocation is 'range'; allowed: 'tile', 'token'",
    **{f"TransformQuant(bits={bad})": f"bits is {bad}; allowed: " for bad in ("0", "-1", "17", "True", "'much'")},
    "TransformQuant(step='channel')": "step is 'channel'; allowed: 'token', 'message'",
    "TransformQuant(bits='auto')": "bits is 'auto'; allowed: None or a number, which RateGoal",
}  # fmt: skip
REFUSED_GOALS = {
    **{
        f"TransformQuant(bits='auto', nats={bad})": "nats is .*; allowed: a number above 0"
        for bad in ("0", "0.0", "-1", "1e999", "'0.1'", "True")
    },
    "TransformQuant(bits='auto', nats=0.01, decibels=34)": "nats is 0.01, and decibels is 34; allowed: one of them",
    "TransformQuant(bits='auto', step='channel')": "step is 'channel'; allowed: 'token', 'message'",
    "TransformQuant(bits='auto', nat=0.01)": "TransformQuant has no argument 'nat'; did you mean nats",
}
FEATURES = {"ranges": ones(2, 4), "total": ones(4), "features": ()}
REFUSED_FEATURES = {
    "ranges=ones(4)": r"ranges is \(4,\); allowed: a tensor of \(ranks, features\)",
    "ranges=ones(2, 4).double()": r"ranges is torch\.float64; allowed: a float32 tensor",
    "ranges=tensor([[1.0, 1], [1, 0]]), total=ones(2)":
        r"ranges\[1, 1\], the range of feature 1, is 0; allowed: finite and above 0",
    "ranges=tensor([[1, nan, 1, 1]])": "feature 1, is nan; allowed: finite",
    "total=ones(3)": r"total has shape \(3,\); allowed: \(4,\)",
    "total=tensor([1, 1, 1, inf])": r"total\[3\], the range of feature 3, is inf",
    "features=[1]": r"features is \[1\]; allowed: a tuple of integers",
    "features=(2, 1)": r"features is \(2, 1\); allowed: ascending, from 0 to 3",
    "features=(1, 4)": r"features is \(1, 4\); allowed: ascending",
    "features=(0, 1, 2, 3)": "features are 4; allowed: fewer than the 4 there are",
    "bits=2": "bits is 2; allowed: 3 to 8",
    "gain='row'": "gain is 'row'; allowed: 'token', 'static'",
    "clip=0": "clip is 0; allowed: a number above 0 and at most 2, or None",
    "offsets=zeros(2, 4)": "one of offsets and total_offset is None; allowed: both or neither",
    "offsets=torch.full((2, 4), inf), total_offset=zeros(4)":
        r"offsets\[0, 0\], the mean of feature 0, is inf; allowed: finite",
    "rank=2": "rank is 2; allowed: 0 to 1",
    "artifact=3": "artifact is 3",
}  # fmt: skip


def test_wrong_settings_are_refused() -> None:
    """By an error that names the setting, its value and what is allowed."""
    known = vars(codecs) | {"torch": torch, "nan": math.nan, "inf": math.inf}
    known |= {"ones": ones, "zeros": zeros, "tensor": tensor, "FEATURES": FEATURES}
    features = {f"FeatureInt(**FEATURES | dict({change}))": text for change, text in REFUSED_FEATURES.items()}
    rows = (REFUSED | features).items()
    refused(*((partial(parse_goal, text), ValueError, expected) for text, expected in REFUSED_GOALS.items()))
    refused(*((partial(eval, call, known), (TypeError, ValueError), expected) for call, expected in rows))


def test_arguments_twice_and_dtypes_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="GroupInt has bits twice; allowed: each argument once"):
        parse("GroupInt(bits=6, group=32, bits=3)")
    with pytest.raises(ValueError, match="torch has no dtype 'nonsense'"):
        parse("TAHQuant(pivot_ratio=torch.nonsense)")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TAHQuant(pivot_ratio=2), TAHQuant(pivot_ratio=2.0)),
        (TAHQuant(high_fraction=1), TAHQuant(high_fraction=1.0)),
        (TAHQuant(high_fraction=np.float64(0.8)), TAHQuant()),
    ],
)
def test_equal_formats_have_one_fingerprint_and_one_text(one: Codec, other: Codec):
    assert one == other
    assert one.fingerprint() == other.fingerprint()
    assert parse(repr(one)) == other


def test_numbers_are_no_switches():
    with pytest.raises(ValueError, match="symmetric is 1; allowed: False, True"):
        GroupInt(symmetric=1)  # type: ignore[arg-type]
