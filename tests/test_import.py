"""Importing is light, works without an installation, and offers exactly the agreed names."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
HEAVY = {"numba", "transformers", "rich", "matplotlib", "pydantic", "tensorboard", "datasets"}
PUBLIC = {
    "lowbit": "__version__",
    "lowbit.activations": ("Compressed LayerAware LayerChoice LayerPlan checkpoint_ compress_saved_ counted restore_"),
    "lowbit_lab.bench": "COMMANDS",
    "lowbit_run.cli": "main",
    "lowbit_run.config": ("ConfigError NonNegative Positive Setting build resolve section settings_of to_toml"),
    "lowbit.codecs": (
        "AQSGD BlockFloat8 Cast Codec CodecError FeatureInt GroupInt RateGoal Session StatefulCodec Summable "
        "TAHQuant TransformQuant backward_codec parse parse_pair"
    ),
    "lowbit.collectives": (
        "AgreementError DamagedError Pending PeerError agree all_gather all_reduce all_reduce_bytes reduce_scatter"
    ),
    "lowbit_run.doctor": "",
    "lowbit_lab.evaluate": "CalibrationConfig EvaluationConfig Score Sequences perplexity",
    "lowbit_run.generate": "",
    "lowbit.gradients": "GradientStorage LowBitReduceScatter all_reduce_hook",
    "lowbit.integrations": "EngineError",
    "lowbit_run.job": "",
    "lowbit.kernels": "Operator apart backend implementation operator",
    "lowbit_lab.network": "Link LinkUnavailable SlowLink goodput round_trip",
    "lowbit_run.plan": (
        "InFlight MemoryPlan StageCost actions_of choose_layers in_flight measure_layers order_of plan_bits plan_layers"
    ),
    "lowbit.pipeline": (
        "AgreementError DamagedError Emulation LowBitStage PeerError TokenAnchor Traffic choose_rate connect_more "
        "emulate_"
    ),
    "lowbit_run.report": (
        "Baseline Column Command Report Row Table Value check_output compare execute machine run spread summary"
    ),
    "lowbit_lab.charts": "Bars Heights Lines Points Stacks",
    "lowbit_run.simulate": "Actions Channel Network StageTimes Step Timeline actions actions_from simulate",
    "lowbit.tensor_parallel": (
        "Calibration CalibrationError Drift Installed LowBitRowwiseParallel ModelSum SumSettings Thresholds "
        "SumTraffic calibrate emulate_tensor_parallel_ low_bit_ low_bit_styles model_sums tensor_parallel_"
    ),
    "lowbit_run.train": (
        "ConfigError LaunchError StepMetrics StoppedError Summary TrainConfig from_mapping load run train"
    ),
    "lowbit.wire": "",
}


def python(program: str, **environment: str) -> str:
    """Standard output of `program` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *environment.pop("flags", "").split(), "-c", program],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_loads_no_kernel_compiler_no_extra_and_nothing_of_the_laboratory():
    seen = "print(*{m.split('.')[0] for m in sys.modules})"
    core = "lowbit.codecs, lowbit.pipeline, lowbit.wire.agreement"
    more = "lowbit_run.train, lowbit_run.plan, lowbit.tensor_parallel, lowbit_run.report, lowbit.activations"
    loaded = python(f"import sys, lowbit; {seen}; import {core}; {seen}; import {more}; {seen}").splitlines()
    package, first, second = ({*line.split()} for line in loaded)
    assert not package & (HEAVY | {"torch", "numpy"}), "the package itself loads nothing"
    assert "torch" in first
    assert not HEAVY & first
    assert "lowbit_lab" not in second


def test_the_version_needs_no_installation():
    shown = python("import lowbit; print(lowbit.__version__)", flags="-S", PYTHONPATH=str(SOURCE))
    assert shown == importlib.import_module("lowbit").__version__


def test_every_package_has_a_frozen_surface():
    packages = {".".join(path.relative_to(SOURCE).parent.parts) for path in SOURCE.glob("lowbit*/*/__init__.py")}
    assert packages == {name for name in PUBLIC if "." in name}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_surface_is_frozen_and_explained(module: str):
    names = importlib.import_module(module).__all__
    assert sorted(names) == sorted(PUBLIC[module].split()), "changing public names is a decision"
    for name in names:
        thing = getattr(importlib.import_module(module), name)
        if inspect.isclass(thing):
            members = {n: m for n, m in vars(thing).items() if inspect.isroutine(m)}
            silent = [n for n in members if n[0] != "_" and not inspect.getdoc(getattr(thing, n))]
            assert not silent, f"{module}.{name} has methods without a docstring"
        if inspect.isclass(thing) or inspect.isroutine(thing):
            assert inspect.getdoc(thing), f"{module}.{name} has no docstring"
