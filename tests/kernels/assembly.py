"""What Triton's compiler makes of the kernels for an H200, without one: `python -m tests.kernels.assembly`.

Prints a row of JSON for each kernel: instructions for each element (straight through: what a loop repeats counts as
often as it stands there), registers of a thread, bytes spilled, and what would break the reference's rounding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # a process compiles or interprets

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import lowbit.activations.gated.gpu as gated
import lowbit.activations.norm.gpu as norm
import lowbit.codecs.block_float8.gpu as block_float8
import lowbit.codecs.feature_int.gpu as feature_int
import lowbit.codecs.group_int.gpu as group_int
import lowbit.codecs.subspace_quant.gpu as subspace
import lowbit.codecs.tah_quant.gpu as tah_quant
import lowbit.codecs.transform_quant.gpu as transform
import lowbit.codecs.transform_quant.gpu_fit as transform_fit
from lowbit.codecs import BlockFloat8, Codec, GroupInt, TAHQuant
from lowbit.codecs.feature_int.reference import feature_int_layout
from lowbit.codecs.subspace_quant.layout import subspace_geometry
from lowbit.codecs.transform_quant.layout import transform_geometry

KERNELS: dict[str, tuple[Codec, bool]] = {
    "TAHQuant() encode": (TAHQuant(), True),
    "TAHQuant() decode": (TAHQuant(), False),
    "TAHQuant(pivot_ratio=None) encode": (TAHQuant(pivot_ratio=None), True),
    "TAHQuant(pivot_ratio=None) decode": (TAHQuant(pivot_ratio=None), False),
    "TAHQuant.published() encode": (TAHQuant.published(), True),
    "TAHQuant.published() decode": (TAHQuant.published(), False),
    "GroupInt() encode": (GroupInt(), True),
    "GroupInt() decode": (GroupInt(), False),
    "BlockFloat8() encode": (BlockFloat8(), True),
    "BlockFloat8() decode": (BlockFloat8(), False),
}
NORM = 1e-6, False, 0.0, 4, 64
FUSED: dict[str, tuple[Any, str, Any]] = {  # module, operator, and its arguments from matrices, vectors and payloads
    "RMSNorm + GroupInt() encode": (norm, "encode", lambda m, v, p: (m, v, None, p, m, *NORM, None)),
    "RMSNorm recompute": (norm, "recompute", lambda m, v, p: (p, v, None, m, *NORM)),
    "RMSNorm backward": (norm, "backward", lambda m, v, p: (p, v, None, m, m, v, None, None, *NORM)),
    "SwiGLU + GroupInt() encode": (gated, "encode", lambda m, v, p: (m, m, p, p, m, "silu", 4, 64, None)),
    "SwiGLU recompute": (gated, "recompute", lambda m, v, p: (p, p, m, "silu", 4, 64)),
    "SwiGLU backward": (gated, "backward", lambda m, v, p: (p, p, m, m, m, None, "silu", 4, 64)),
}
FEATURES: dict[str, Any] = {  # arguments from matrix, payload, tables of numbers by rank and of one, order
    "FeatureInt encode": lambda m, p, t, f, o: (m, p, f, f, o, 64, 4, 0.1, True),
    "FeatureInt decode": lambda m, p, t, f, o: (p, m, f, f, o, 64, 4, 0.0, True),
    "FeatureInt sum": lambda m, p, t, f, o: ([p] * 4, m, t, f, o, 64, 4, 0.0, 3),
}
SUBSPACE: dict[str, Any] = {  # arguments from coefficients, units, matrix, directions, payload
    "coefficients_encode": lambda c, u, m, d, p: (c, u, p, c),
    "coefficients_decode": lambda c, u, m, d, p: (p, u, c),
    "rest_encode": lambda c, u, m, d, p: (m, c, d, p),
    "rest_decode": lambda c, u, m, d, p: (p, c, d, m),
}
TRANSFORM: dict[str, Any] = {  # arguments from coefficients, header, payload
    "TransformQuant encode": lambda z, h, p: (z, h, p),
    "TransformQuant decode": lambda z, h, p: (p, h, z),
}
MODULES = {"BlockFloat8": block_float8, "GroupInt": group_int, "TAHQuant": tah_quant}
SHAPE = (8, 4096, 4096)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}


def fused_launches(module: Any, operator: str, arguments: Any) -> list[tuple]:
    """The same for an operator on (tokens, channels)."""
    rows, channels = SHAPE[0] * SHAPE[1], SHAPE[2]
    matrix = torch.empty(rows, channels, dtype=torch.bfloat16, device="meta")
    payload = torch.empty(GroupInt().nbytes(matrix.shape), dtype=torch.uint8, device="meta")
    given = arguments(matrix, torch.empty(channels, dtype=torch.bfloat16, device="meta"), payload)
    return _caught(getattr(module, operator), given, module)


def feature_launches(name: str) -> list[tuple]:
    """The same for rows of features."""
    rows, size = SHAPE[0] * SHAPE[1], SHAPE[2]

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    given = FEATURES[name](
        empty((rows, size), torch.bfloat16),
        empty((feature_int_layout(rows, size, 64, 4, True).nbytes,), torch.uint8),
        empty((4, size), torch.float32), empty((size,), torch.float32), empty((size,), torch.int32),
    )  # fmt: skip
    return _caught(getattr(feature_int, name.split()[1]), given, feature_int)


def subspace_launches(operator: str, count: int = 64) -> list[tuple]:
    """The same for tokens near to a subspace."""
    rows, channels = SHAPE[0] * SHAPE[1], SHAPE[2]
    geo = subspace_geometry(rows, channels, count, 2, 64, 8)
    c, unit, directions = (torch.empty(s, device="meta") for s in ((rows, count), (count,), (count, channels)))
    matrix = torch.empty(rows, channels, dtype=torch.bfloat16, device="meta")
    payload = torch.empty(geo.layout.nbytes, dtype=torch.uint8, device="meta")
    given = SUBSPACE[operator](c, unit, matrix, directions, payload)
    return _caught(getattr(subspace, operator), (*given, geo), subspace)


def transform_launches(name: str) -> list[tuple]:
    """The same for coefficients, each kernel once: attempts launch some of them again."""
    rows, channels = SHAPE[0] * SHAPE[1], SHAPE[2]
    geo = transform_geometry(rows, channels, True, None, 2.25)
    given = TRANSFORM[name](
        torch.empty(rows, channels, device="meta"),
        torch.empty(4, dtype=torch.int32, device="meta"),
        torch.empty(geo.layout.nbytes, dtype=torch.uint8, device="meta"),
    )
    caught = _caught(getattr(transform, name.split()[1]), (*given, geo), transform, transform_fit)
    return list({launch[0]: launch for launch in caught}.values())


def launches(codec: Codec, encode: bool) -> list[tuple[Any, int, dict[str, Any], tuple, dict]]:
    """Kernels that a call launches, caught before they run: kernel, warps, shape, arguments, settings."""
    x = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
    payload = torch.empty(codec.nbytes(SHAPE), dtype=torch.uint8, device="meta")
    module = MODULES[type(codec).__name__]
    function = module.encode if encode else module.decode
    tensors = (x, payload) if encode else (payload, x)
    flat = (t.view(-1) if isinstance(codec, GroupInt) and t is x else t for t in tensors)
    return _caught(function, (*flat, *_settings(codec, encode)), module)


def _caught(function: Any, given: tuple, *modules: Any) -> list[tuple]:
    caught = []

    def catch(kernel: Any, programs: int, warps: int, shape: dict, *arguments: Any, **settings: Any) -> None:
        caught.append((kernel, warps, shape, arguments, settings))

    before = [module.launch for module in modules]
    for module in modules:
        module.launch = catch
    try:
        function(*given)
    finally:
        for module, launch in zip(modules, before, strict=True):
            module.launch = launch
    return caught


def _settings(codec: Codec, encode: bool) -> tuple:
    if isinstance(codec, GroupInt):
        return codec.bits, codec.group, codec.symmetric, None if encode else False
    if isinstance(codec, BlockFloat8):
        return codec.format, codec.block, *((None, False) if encode else (False,))
    assert isinstance(codec, TAHQuant)
    last = (codec.pivot_ratio,) if encode else (codec.pivot_ratio is not None, False)
    return (codec.tile, codec.high_bits, codec.low_bits, 1 - codec.high_fraction, codec.allocation, *last)


def compiled(kernel: Any, warps: int, shape: dict, arguments: tuple, settings: dict) -> Any:
    """The kernel for compute capability 9.0, specialised as a launch would have it."""
    constants = shape | settings
    given = dict(zip((n for n in kernel.arg_names if n not in constants), arguments, strict=True))
    signature: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        value = given.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name], aligned[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, tuple):  # of payloads
            signature[name] = ("*u8",) * len(value)
            aligned |= {(index, i): [["tt.divisibility", 16]] for i in range(len(value))}
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            assert isinstance(value, int)
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
    by_index = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, by_index, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def row(name: str, found: Any, elements: int) -> dict[str, Any]:
    """What the kernel's assembly says."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        sass = _output(tools / "nvdisasm", "-c", file.name)
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+\S", sass, re.MULTILINE))
    ptx = found.asm["ptx"]
    return {
        "kernel": name,
        "triton": triton.__version__,
        "instructions_per_element": round(instructions * 32 * found.metadata.num_warps / elements, 1),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spilled_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": found.metadata.shared,
        "vector_loads": len(re.findall(r"LDG\.E\.(?:64|128)", sass)),
        "vector_stores": len(re.findall(r"STG\.E\.(?:64|128)", sass)),
        "approximate": len(re.findall(r"\.approx|\.full\.f32", ptx)),
        "flushed": len(re.findall(r"\.ftz", ptx)),
    }


def _output(*command: Any) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def main(names: list[str]) -> None:
    for name in names or (*KERNELS, *FUSED, *FEATURES, *SUBSPACE, *TRANSFORM):
        if name in FEATURES:
            caught = feature_launches(name)
        elif name in TRANSFORM:
            caught = transform_launches(name)
        elif name in SUBSPACE:
            caught = subspace_launches(name)
        else:
            caught = fused_launches(*FUSED[name]) if name in FUSED else launches(*KERNELS[name])
        for kernel, warps, shape, arguments, settings in caught:
            found = compiled(kernel, warps, shape, arguments, settings)
            print(json.dumps(row(name, found, _elements(name, shape))), flush=True)


def _elements(name: str, shape: dict[str, int]) -> float:
    """Of a program."""
    if name in FEATURES:
        return 2 * shape["ROWS"] * shape["WIDTH"]
    if name in TRANSFORM:
        return shape.get("BLOCK", 1)
    if "K" in shape:
        return shape["ROWS"] * shape["WIDTH"]
    lanes = shape.get("NT") or shape.get("LANES") or shape["GROUPS"] / (8 if "BLOCK" in shape else 1)
    lanes *= shape["ROWS"] if name.startswith("RMSNorm") else 1
    return lanes * shape["WIDTH"] * 8


if __name__ == "__main__":
    main(sys.argv[1:])
