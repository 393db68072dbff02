"""The kernels compile for a real GPU, also where there is none, into what their design promises."""

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="no Triton; make test-cpus installs it")
CODECS = ("TAHQuant(pivot_ratio=None)", "GroupInt()", "BlockFloat8()")
KERNELS = [f"{codec} {way}" for codec in CODECS for way in ("encode", "decode")]
FEATURES = [f"FeatureInt {way}" for way in ("encode", "decode", "sum")]
TRANSFORM = ["TransformQuant encode", "TransformQuant decode"]
ROTATING = ["TAHQuant() encode", "TAHQuant() decode"]
FUSED = ["RMSNorm + GroupInt() encode", "RMSNorm backward", "SwiGLU backward"]


def _rows(*names: str) -> list[dict[str, Any]]:
    """What the assembly of these kernels says."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.lowbit.kernels.assembly", *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings NVIDIA's tools there")
def test_kernels_compile_without_spills_approximations_or_narrow_accesses() -> None:
    rows = _rows(*KERNELS, *ROTATING, *FUSED, *FEATURES, *TRANSFORM)
    assert len(rows) == len(KERNELS) + len(ROTATING) + len(FUSED) + len(FEATURES) + 9
    for row in rows:
        name, encodes = row["kernel"], row["kernel"].endswith("encode")
        assert row["spilled_bytes"] == 0, row
        assert row["flushed"] == 0 or name in FUSED, row
        assert row["approximate"] == 0 or name in (*FUSED, *TRANSFORM), row
        # Rotating kernels hold a tile and its rotation, so they take more registers, and more instructions.
        assert row["registers"] <= (128 if name in (*KERNELS, *TRANSFORM) else 255), row
        if name in FUSED:
            assert min(row["vector_loads"], row["vector_stores"]) >= 8, row
        if name in KERNELS:
            # Eight 16-byte loads of bfloat16 elements, or as many stores of them; codes move 8 bytes at a time.
            assert row["vector_loads" if encodes else "vector_stores"] >= 8, row
            assert row["vector_stores" if encodes else "vector_loads"] >= 4, row
            assert row["instructions_per_element"] < (36 if encodes else 20), row
        if name in ROTATING:
            assert row["instructions_per_element"] < (64 if encodes else 36), row
    warps = [row for row in rows if row["kernel"] == "TransformQuant decode"]
    assert warps[1]["shared_bytes"] == 0, "states stay in the registers of one warp"
