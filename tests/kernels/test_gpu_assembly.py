"""The kernels compile for a real GPU, also where there is none, into what their design promises."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
CODECS = ("TAHQuant(pivot_ratio=None)", "GroupInt()", "BlockFloat8()")
KERNELS = [f"{codec} {way}" for codec in CODECS for way in ("encode", "decode")]
FEATURES = [f"FeatureInt {way}" for way in ("encode", "decode", "sum")]
TRANSFORM = ["TransformQuant encode", "TransformQuant decode"]
FUSED = ["RMSNorm + GroupInt() encode", "RMSNorm backward", "SwiGLU backward"]


def _rows(*names: str) -> list[dict[str, Any]]:
    """What the assembly of these kernels says."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.assembly", *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings NVIDIA's tools there")
def test_kernels_compile_without_spills_approximations_or_narrow_accesses() -> None:
    rows = _rows(*KERNELS, *FUSED, *FEATURES)
    assert len(rows) == len(KERNELS) + len(FUSED) + len(FEATURES)
    features = rows[len(KERNELS) + len(FUSED) :]
    for row in features:
        assert row["spilled_bytes"] == row["approximate"] == row["flushed"] == 0, row
    for row in rows[len(KERNELS) : -len(features)]:
        assert row["spilled_bytes"] == 0, row
        assert row["vector_loads"] >= 8, row
        assert row["vector_stores"] >= 8, row
    for row in rows[: len(KERNELS)]:
        assert row["spilled_bytes"] == row["approximate"] == row["flushed"] == 0, row
        assert row["registers"] <= 128, row
        encode = row["kernel"].endswith("encode")
        # Eight 16-byte loads of bfloat16 elements, or as many stores of them; codes move 8 bytes at a time.
        assert row["vector_loads" if encode else "vector_stores"] >= 8, row
        assert row["vector_stores" if encode else "vector_loads"] >= 4, row
        assert row["instructions_per_element"] < (36 if encode else 20), row


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings NVIDIA's tools there")
def test_rotating_kernels_compile_without_spills_or_approximations() -> None:
    """They hold a tile and its rotation, so they take more registers, and more instructions, than the others."""
    rows = _rows("TAHQuant() encode", "TAHQuant() decode")
    assert len(rows) == 2
    for row, instructions in zip(rows, (64, 36), strict=True):
        assert row["spilled_bytes"] == row["approximate"] == row["flushed"] == 0, row
        assert row["registers"] <= 255, row
        assert row["instructions_per_element"] < instructions, row


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton brings NVIDIA's tools there")
def test_streams_of_symbols_compile_without_spills() -> None:
    rows = _rows(*TRANSFORM)
    assert len(rows) == 9
    for row in rows:
        assert row["spilled_bytes"] == row["flushed"] == 0, row
        assert row["registers"] <= 128, row
    warps = [row for row in rows if row["kernel"] == "TransformQuant decode"]
    assert warps[1]["shared_bytes"] == 0, "states stay in the registers of one warp"
