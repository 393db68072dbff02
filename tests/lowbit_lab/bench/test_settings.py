"""Settings that cannot be measured are refused before anything starts, by a line that names them."""

from functools import partial
from typing import Any

import torch

from benchmarks.race import RaceBenchmark
from lowbit_lab.bench.assumptions import AssumptionsBenchmark
from lowbit_lab.bench.codecs import CodecsBenchmark
from lowbit_lab.bench.convergence import ConvergenceBenchmark
from lowbit_lab.bench.generation import GenerationBenchmark
from lowbit_lab.bench.gradients import GradientsBenchmark
from lowbit_lab.bench.memory import MemoryBenchmark
from lowbit_lab.bench.pipeline import PipelineBenchmark
from lowbit_lab.bench.spectrum import SpectrumBenchmark
from lowbit_lab.bench.tensor_parallel import TensorParallelBenchmark
from lowbit_run.config import build
from lowbit_run.train.config import ModelConfig
from tests.refused import refused

AUTO = "TransformQuant(bits='auto')"
PIPELINE = PipelineBenchmark(boundaries=("stock-fp32", "tah-quant"), model=ModelConfig(dim=64, layers=8, heads=2))
SPECTRUM = SpectrumBenchmark(checkpoint="a", text="b")
SUMS = TensorParallelBenchmark(ranks=(2,), model=ModelConfig(dim=64, layers=1, heads=2, ffn=64))
MANY = tuple(f"{rate}mbit" for rate in range(1, 33))
ANCHORED: dict[str, Any] = {
    "boundaries": ("anchor:int4",), "regimes": ("finetune",), "model": {"pretrained": "nowhere"},
    "finetune_warmup_steps": 3,
}  # fmt: skip

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (PIPELINE, {"pipeline": {"ranks": 1}}, "pipeline.ranks is 1; allowed: at least 2"),
    (PIPELINE, {"pipeline": {"forward": "int4"}}, "pipeline.forward is .*; allowed: formats, in `boundaries`"),
    (PIPELINE, {"rounds": 0}, "rounds is 0; allowed: at least 1"),
    (PIPELINE, {"samples": 6}, "samples is 6; allowed: a multiple of data.batch"),
    (PIPELINE, {"samples": 0}, "samples is 0; allowed: at least 1"),
    (PIPELINE, {"links": ()}, "links is"),
    (PIPELINE, {"boundaries": ("int4", "int4")}, "boundaries is"),
    (PIPELINE, {"boundaries": ("int9",)}, "boundaries has 'int9': codec is 'int9'"),
    (PIPELINE, {"backward": "what"}, "codec is 'what'"),
    (PIPELINE, {"boundaries": (AUTO,)}, "boundaries has .*: bits is 'auto'"),
    (PIPELINE, {"backward": "TransformQuant(bits=0.1)"}, "'tah-quant': bits is 0.1, .* allowed: at least"),
    (PIPELINE, {"model": {"dim": 64, "layers": 7, "heads": 2}}, "8 stages"),
    (PIPELINE, {"model": {"dim": 63}}, "model.dim is 63"),
    (PIPELINE, {"boundaries": ("fp32", "auto"), "links": MANY}, "take 33 pipelines; allowed: 32"),
    (RaceBenchmark, {"boundaries": ("auto",)}, "boundaries has 'auto'; allowed: other formats"),
    (PIPELINE, {"device": "gpu"}, "device is 'gpu'; allowed: cpu, cuda"),
    (PIPELINE, {"device": "cuda"}, "boundaries has 'stock-fp32'; PyTorch's own stage cannot use Gloo"),
    (PipelineBenchmark, {"compute": "50ms", "evaluations": 1}, "compute is 50ms, evaluations is 1; allowed: 0, or "),
    (PipelineBenchmark, {"compute": "50ms", "device": "cuda"}, "compute is 50ms, device is cuda; allowed: cpu"),
    (PipelineBenchmark, {"compute": "50ms", "model": {"dropout": 0.1}}, "compute is 50ms, model.dropout is 0.1; allow"),
    (
        PipelineBenchmark, {"compute": "50ms", "pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}},
        "schedule is ZBVZeroBubble",
    ),
    (PipelineBenchmark, {"compute": "50"}, "compute is '50'; allowed: a number with a unit, such as 50ms"),
    *(
        (benchmark, {"links": ("9mbit@1s:1mbit",)}, "links has 9mbit@1s:1mbit, which changes; allowed: links th")
        for benchmark in (RaceBenchmark, PIPELINE, GradientsBenchmark, SUMS, GenerationBenchmark)
    ),
    (RaceBenchmark, {"samples": 6}, "samples is 6; allowed: a multiple of data.batch"),
    (RaceBenchmark, {"samples": 64, "evaluations": 3}, r"allowed: at most the steps of an epoch \(2\)"),
    (RaceBenchmark, {"boundaries": ("int9",)}, "codec is 'int9'"),
    (GenerationBenchmark, {"formats": ("int9",)}, "codec is 'int9'"),
    (GenerationBenchmark, {"formats": ("int4", "int4")}, "formats is"),
    (GenerationBenchmark, {"formats": ("transform",)}, "'transform', which keeps state; allowed: transformers, and"),
    (GenerationBenchmark, {"layers": 1}, "layers is 1; allowed: at least 2"),
    (GenerationBenchmark, {"layouts": ("both",)}, "layouts has 'both' and per_host is 1; allowed: at least 2"),
    (GenerationBenchmark, {"layouts": ("tensor",), "heads": 3}, "heads is 3; allowed: a multiple of 2, the tensor-par"),
    (GenerationBenchmark, {"per_host": 2}, "layers is 2; allowed: at least 4, one for each stage"),
    (GenerationBenchmark, {"sums": ("int9",)}, "codec is 'int9'"),
    (GenerationBenchmark, {"tokens": 1}, "tokens is 1; allowed: at least 2"),
    (GenerationBenchmark, {"chunks": ()}, "chunks is"),
    (GenerationBenchmark, {"precision": "fp8"}, "precision is 'fp8'"),
    (GradientsBenchmark, {"links": ()}, "links is"),
    (GradientsBenchmark, {"formats": ("int8", "int8")}, "formats is"),
    (GradientsBenchmark, {"formats": ("int9",)}, "codec is 'int9'"),
    (GradientsBenchmark, {"ranks": (1,)}, "ranks is"),
    (GradientsBenchmark, {"numel": 1000}, "numel is 1000"),
    (GradientsBenchmark, {"rounds": 0}, "rounds is 0"),
    (GradientsBenchmark, {"algorithm": "ring"}, "algorithm is 'ring'; allowed: one_shot, two_shot"),
    (SUMS, {"links": ()}, "links is"),
    (SUMS, {"formats": ("int4", "int4")}, "formats is"),
    (SUMS, {"formats": ("int9",)}, "formats is .*; allowed: bf16, int4, int8, feature-int4"),
    (SUMS, {"algorithms": ("ring",)}, "algorithms is .*; allowed: one_shot, two_shot, auto"),
    (SUMS, {"ranks": (1,)}, r"ranks is \(1,\)"),
    (SUMS, {"tokens": (0,)}, r"tokens is \(0,\)"),
    (SUMS, {"width": 0}, "width is 0"),
    (SUMS, {"rounds": 0}, "rounds is 0"),
    (SUMS, {"ranks": (2, 4)}, r"model.heads is 2, ranks \(2, 4\); allowed: multiples of each"),
    (SUMS, {"model": {"dim": 64, "heads": 2, "ffn": 5}}, r"model.ffn is 5, ranks \(2,\)"),
    (MemoryBenchmark, {"methods": ("agoc",)}, r"methods is .*'agoc'.*; allowed: bf16, .*, agoq"),
    (MemoryBenchmark, {"sequences": (0,)}, r"sequences is \(0,\); allowed: at least 1"),
    (MemoryBenchmark, {"steps": 1}, "steps is 1; allowed: at least 2"),
    (MemoryBenchmark, {"bits": 9}, "bits is 9; allowed: "),
    (MemoryBenchmark, {"weights": "fp16"}, "weights is 'fp16'"),
    (MemoryBenchmark, {"model": {"vocab": 100}}, "vocabulary has 100 entries"),
    (CodecsBenchmark, {"codecs": ("int9",)}, "codec is 'int9'"),
    (CodecsBenchmark, {"codecs": ("aq-sgd",)}, "'aq-sgd', which learns from .*`lowbit bench pipeline`"),
    (CodecsBenchmark, {"layer": True, "shape": (1, 4, 9)}, "model.dim is 9; allowed: .* even width"),
    (CodecsBenchmark, {"dtypes": ("float64",)}, r"dtypes is .*allowed: float32"),
    (CodecsBenchmark, {"data": ()}, r"data is empty"),
    (CodecsBenchmark, {"threads": (10**6,)}, "threads is"),
    (CodecsBenchmark, {"shape": (1, 0, 8)}, "shape is"),
    (CodecsBenchmark, {"shape": (1, 4, 8), "codecs": ("TransformQuant(bits=0.1)",)}, "bits is 0.1"),
    (CodecsBenchmark, {"rounds": 0}, "rounds is 0; allowed: at least 1"),
    (AssumptionsBenchmark, {"boundaries": ("aq-sgd",)}, "boundaries has 'aq-sgd', which learns from epoch to epoch"),
    (AssumptionsBenchmark, {"boundaries": ("TransformQuant(bits=0.1)",)}, "bits is 0.1, .*at least"),
    (AssumptionsBenchmark, {"boundaries": ("int1",)}, "codec is 'int1'"),
    (AssumptionsBenchmark, {"backward": "nothing"}, "codec is 'nothing'"),
    (AssumptionsBenchmark, {"steps": 30}, r"warmup_steps is 30; allowed: fewer than steps \(30\)"),
    (AssumptionsBenchmark, {"repeats": 1}, "repeats is 1; allowed: at least 2"),
    (AssumptionsBenchmark, {"device": "gpu"}, "device is 'gpu'; allowed: cpu, cuda"),
    (ConvergenceBenchmark, {"regimes": ("warm",)}, r"regimes is .*; allowed: scratch-warmup"),
    (
        ConvergenceBenchmark, {"boundaries": ("agoq+8bit",)},
        "boundary: codec is '.*'; allowed: .*tah-quant-published.*; or agoq, activations:POLICY, gradients:CODEC, anch",
    ),
    (
        ConvergenceBenchmark, {"boundaries": ("anchor:transform",)},
        "boundary is 'anchor:transform'; allowed: a format that codes activations, with regime finetune alone, ",
    ),
    *(
        (ConvergenceBenchmark, ANCHORED | change, "boundary is 'anchor:.*'; allowed: a format that codes activations")
        for change in (
            {"finetune_warmup_steps": 0}, {"model": {}}, {"regimes": ("finetune", "scratch")},
            {"boundaries": ("anchor:fp32",)},
        )
    ),
    (ConvergenceBenchmark, {"regimes": ("scratch",), "finetune_warmup_steps": 2}, "steps is 2; allowed: with regime f"),
    (ConvergenceBenchmark, {"finetune_warmup_steps": 120}, r"allowed: fewer than finetune_steps \(120\)"),
    (ConvergenceBenchmark, {"boundaries": ("gradients:fp8",), "data": {"batch": 3}}, "batch is 3; allowed: multiples"),
    (ConvergenceBenchmark, {"backward": "nothing"}, "codec is 'nothing'"),
    (ConvergenceBenchmark, {"boundaries": (f"int4 / {AUTO}",)}, "bits is 'auto'; allowed: None or a number"),
    (ConvergenceBenchmark, {"boundaries": ("TransformQuant(bits=0.01)",)}, "bits is 0.01, .*at least"),
    (ConvergenceBenchmark, {"stages": 1}, "stages is 1; allowed: at least 2"),
    (ConvergenceBenchmark, {"stages": 9}, r"stages is 9; allowed: at most model.layers \(8\)"),
    (ConvergenceBenchmark, {"lora": {"rank": 4}}, "lora.rank is 4 and model.pretrained is empty"),
    (ConvergenceBenchmark, {"jobs": 0}, "jobs is 0"),
    (ConvergenceBenchmark, {"precision": "fp16"}, "precision is 'fp16'; allowed: fp32, bf16"),
    (ConvergenceBenchmark, {"model": {"family": "gpt3"}}, "model.family is 'gpt3'; allowed: llama"),
    (SPECTRUM, {"stages": 1}, "stages is 1; allowed: at least 2"),
    (SPECTRUM, {"codecs": ("aq-sgd",)}, "codecs has 'aq-sgd', which learns"),
]  # fmt: skip

if not torch.cuda.is_available():
    REFUSED.append((RaceBenchmark, {"device": "cuda"}, "this machine has 0 devices"))


def test_settings_that_cannot_be_are_refused():
    refused(
        (lambda: GradientsBenchmark(formats=("tah-quant",)), TypeError, "cannot be summed"),
        *((partial(changed, base, change), ValueError, message) for base, change, message in REFUSED),
    )


def changed(base: Any, change: dict[str, Any]) -> Any:
    return build(base, change) if isinstance(base, type) else build(type(base), change, base=base)
