"""What Triton's compiler makes of the kernels for an H200, without one: `python -m tests.lowbit.kernels.assembly`.

Prints a row of JSON for each kernel: instructions for each element (straight through: what a loop repeats counts as
often as it stands there), registers of a thread, bytes spilled, and what would break the reference's rounding.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

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
import lowbit.codecs.tah_quant.gpu as tah_quant
import lowbit.codecs.transform_quant.gpu as transform
from lowbit.codecs import BlockFloat8, Codec, GroupInt, TAHQuant
from lowbit.codecs.feature_int.reference import feature_int_layout
from lowbit.codecs.transform_quant.reference import transform_geometry

ROWS, CHANNELS = 8 * 4096, 4096
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def payload_of(nbytes: int) -> torch.Tensor:
    return empty(nbytes, dtype=torch.uint8)


Call = tuple[Any, str, tuple[Any, ...]]  # a module of kernels, its function, and the arguments
M, V = empty(ROWS, CHANNELS, dtype=torch.bfloat16), empty(CHANNELS, dtype=torch.bfloat16)


def calls_of(module: Any, codec: Codec, *settings: Any, encode: tuple[Any, ...], decode: tuple[Any, ...]) -> list[Call]:
    """Encode and decode; settings: of both."""
    x, payload = M.view(8, 4096, CHANNELS), payload_of(codec.nbytes((8, 4096, CHANNELS)))
    x = x.view(-1) if isinstance(codec, GroupInt) else x
    return [
        (module, "encode", (x, payload, *settings, *encode)), (module, "decode", (payload, x, *settings, *decode)),
    ]  # fmt: skip


def tah_quant_calls(codec: TAHQuant) -> list[Call]:
    settings = codec.tile, codec.high_bits, codec.low_bits, 1 - codec.high_fraction, codec.allocation
    settings += (codec.metadata == "float16",)
    last = {"encode": (codec.pivot_ratio,), "decode": (codec.pivot_ratio is not None, False)}
    return calls_of(tah_quant, codec, *settings, **last)


P, NORM = payload_of(GroupInt().nbytes((ROWS, CHANNELS))), (1e-6, False, 0.0, 4, 64)
KERNELS: dict[str, Call] = {
    f"{name} {call[1]}": call
    for name, calls in {
        "TAHQuant()": tah_quant_calls(TAHQuant()),
        "TAHQuant(pivot_ratio=None)": tah_quant_calls(TAHQuant(pivot_ratio=None)),
        "TAHQuant.published()": tah_quant_calls(TAHQuant.published()),
        "GroupInt()": calls_of(group_int, GroupInt(), 4, 64, False, encode=(None,), decode=(False,)),
        "BlockFloat8()": calls_of(block_float8, BlockFloat8(), "e4m3", 128, encode=(None, False), decode=(False,)),
    }.items()
    for call in calls
}
FUSED: dict[str, Call] = {
    "RMSNorm + GroupInt() encode": (norm, "encode", (M, V, None, P, M, *NORM, None)),
    "RMSNorm recompute": (norm, "recompute", (P, V, None, M, *NORM)),
    "RMSNorm backward": (norm, "backward", (P, V, M, M, V, None, *NORM)),
    "SwiGLU + GroupInt() encode": (gated, "encode", (M, M, P, P, M, "silu", 4, 64, None)),
    "SwiGLU recompute": (gated, "recompute", (P, P, M, "silu", 4, 64)),
    "SwiGLU backward": (gated, "backward", (P, P, M, M, M, None, "silu", 4, 64)),
}
F, BY_RANK, ORDER = empty(CHANNELS), empty(4, CHANNELS), empty(CHANNELS, dtype=torch.int32)
OF_FEATURES = payload_of(feature_int_layout(ROWS, CHANNELS, 64, 4, True).nbytes)
FEATURES: dict[str, Call] = {
    "FeatureInt encode": (feature_int, "encode", (M, OF_FEATURES, F, F, ORDER, 64, 4, 0.1, True)),
    "FeatureInt decode": (feature_int, "decode", ([OF_FEATURES], M, BY_RANK, F, ORDER, 64, 4, 0.0, 1, True)),
    "FeatureInt sum": (feature_int, "decode", ([OF_FEATURES] * 4, M, BY_RANK, F, ORDER, 64, 4, 0.0, 3, False)),
}
CODED = transform_geometry(ROWS, CHANNELS, True, None, 2.25)
Z, HEADER, OF_TRANSFORM = empty(ROWS, CHANNELS), empty(4, dtype=torch.int32), payload_of(CODED.layout.nbytes)
TRANSFORM: dict[str, Call] = {
    "TransformQuant encode": (transform, "encode", (Z, HEADER, OF_TRANSFORM, CODED)),
    "TransformQuant decode": (transform, "decode", (OF_TRANSFORM, HEADER, Z, CODED)),
}
CALLS = KERNELS | FUSED | FEATURES | TRANSFORM


def launches(name: str) -> list[tuple[Any, int, dict[str, Any], tuple, dict]]:
    """Kernels that a call launches, caught before they run: kernel, warps, shape, arguments, settings.

    Each of them once: attempts launch some again.
    """
    module, function, given = CALLS[name]
    caught = {}

    def catch(kernel: Any, programs: int, warps: int, shape: dict, *arguments: Any, **settings: Any) -> None:
        caught[kernel] = kernel, warps, shape, arguments, settings

    with mock.patch.object(module, "launch", catch):
        getattr(module, function)(*given)
    return list(caught.values())


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
    for name in names or CALLS:
        for kernel, warps, shape, arguments, settings in launches(name):
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
