"""One rank of `lowbit bench generation`: its part of a Transformers model for each format, with shared weights."""

import copy
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed.pipeline_parallel import apply_pipeline_parallelism

from lowbit.integrations.transformers import LowBitPipelineStage, low_bit_pipeline_
from lowbit.integrations.transformers_parallel import low_bit_parallel_, of_this_stage
from lowbit.tensor_parallel import Installed, SumSettings, calibrate, low_bit_
from lowbit_lab.bench.generation import GAINS, OWN, codec_of
from lowbit_lab.bench.sums import sent_bytes
from lowbit_lab.bench.workers import TIMEOUT_SECONDS, serve
from lowbit_run.train.answers import Answers
from lowbit_run.train.config import DataConfig
from lowbit_run.train.data import Windows, load_data
from lowbit_run.train.pretrained import load

Key = tuple[str, str]
"""Layout and format."""

_HEAD = 64
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class GenerationRank:
    """This rank's stage of a model, for each format."""

    def __init__(self) -> None:
        self._models: dict[Key, Any] = {}
        self._stages: dict[Key, LowBitPipelineStage] = {}
        self._sums: dict[Key, Installed] = {}
        self._held_out: Windows | Answers | None = None
        self._prompt = torch.empty(0, dtype=torch.int64)
        self._own: dict[str, tuple[Tensor, Tensor]] = {}

    def open(self, settings: dict[str, Any]) -> None:
        """Make the model, cut it once for each layout and format, and install the codecs."""
        model = _model_of(settings)
        shape = max(settings["batch"]), settings["prompt"]
        if settings["pretrained"]:
            data = load_data(DataConfig(**settings["data"]), pretrained=settings["pretrained"])
            held_out = self._held_out = data.held_out
            assert isinstance(held_out, Windows)  # settings of plain text
            tokens = torch.from_numpy(held_out.tokens[: shape[0] * shape[1]].astype("int64"))
            self._prompt = tokens.view(shape)
        else:
            self._prompt = torch.randint(3, settings["vocab"], shape, generator=torch.Generator().manual_seed(1))
        ranks, calibrations = dist.get_world_size(), {}
        for wanted in settings["models"]:
            layout, name = key = wanted["layout"], wanted["name"]
            tensor = {"pipeline": 1, "tensor": ranks, "both": settings["per_host"]}[layout]
            if name in GAINS and (tensor, name) not in calibrations:
                calibrated = calibrate(model, [self._prompt[0]], ranks=tensor, gain=GAINS[name], bits=None)
                calibrations[tensor, name] = calibrated
            shared = {id(weight): weight for weight in model.parameters()}
            cut = self._models[key] = _cut(copy.deepcopy(model, shared), tensor)
            if name == OWN:
                continue
            source: Any = calibrations[tensor, name] if name in GAINS else codec_of(name)
            if layout == "pipeline":
                self._stages[key] = low_bit_pipeline_(cut, source, timeout=TIMEOUT_SECONDS)
            elif layout == "tensor":
                self._sums[key] = low_bit_(cut, source, settings=SumSettings(timeout=TIMEOUT_SECONDS))
            else:
                both = low_bit_parallel_(
                    cut, source, codec_of(settings["states"]), settings=SumSettings(timeout=TIMEOUT_SECONDS),
                    timeout=TIMEOUT_SECONDS,
                )  # fmt: skip
                self._sums[key] = both.sums

    def measure(self) -> dict[str, str]:
        """Measure on this link from which size on sums are coded; return it by layout and format."""
        return {"/".join(key): str(installed.measure()) for key, installed in self._sums.items()}

    def generate(self, layout: str, name: str, chunk: int, batch: int, tokens: int) -> dict[str, Any]:
        """Generate once; return seconds to the first and of each further token, bits of coded values, bytes sent."""
        key = layout, name
        counts: list[tuple[int, int]] = []
        times: list[float] = []  # of the tokens; the first call has the prompt
        streamer = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)

        def count(*_: Any) -> bool:
            counts.append(self._counted(key))
            return False

        dist.barrier()
        count()
        before, start = sent_bytes(), time.perf_counter()
        self._continued(key, self._prompt[:batch], tokens, chunk, streamer=streamer, stopping_criteria=[count])
        sent = sent_bytes() - before
        dist.barrier()
        first, last = times[1], times[-1]
        own = 8.0 * next(self._models[key].parameters()).dtype.itemsize
        bits = [_bits(*pair) or own for pair in ((counts[0], counts[1]), (counts[1], counts[-1]))]
        return {
            "prefill": first - start, "decode": (last - first) / (tokens - 1), "sent": sent,
            "bits_prefill": bits[0], "bits_decode": bits[1],
        }  # fmt: skip

    def agreement(self, layout: str, name: str, samples: int, tokens: int) -> dict[str, float]:
        """Return the shares of next tokens and texts equal to those of Transformers, and the held-out loss."""
        assert self._held_out is not None  # only called with a pretrained model
        inputs, targets = self._held_out.batch(torch.arange(min(samples, len(self._held_out))))
        if layout not in self._own:
            own = layout, OWN
            self._own[layout] = self._likely(own, inputs, targets)[0], self._continued(own, inputs, tokens)
        likely, loss = self._likely((layout, name), inputs, targets)
        texts = self._continued((layout, name), inputs, tokens)
        same = (texts == self._own[layout][1]).all(1).float().mean()
        same_tokens = float((likely == self._own[layout][0]).float().mean())
        return {"same_tokens": same_tokens, "same_texts": float(same), "loss": loss}

    def _counted(self, key: Key) -> tuple[int, int]:
        """Return bytes and elements so far: of sums, or of hidden states in a layout without sums."""
        if key in self._sums:
            sums = self._sums[key].traffic
            return sums.coded_bytes + sums.plain_bytes, sums.coded + sums.plain
        states = self._stages[key].traffic if key in self._stages else None
        return (states.forward_bytes, states.forward_elements) if states else (0, 0)

    @torch.no_grad()
    def _likely(self, key: Key, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Return the most probable next token at each position, and the loss."""
        logits = self._models[key](inputs).logits.float()
        return logits.argmax(-1), float(functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    def _continued(self, key: Key, ids: Tensor, tokens: int, chunk: int = 0, **options: Any) -> Tensor:
        """Return the prompts with exactly this many more tokens, chosen greedily."""
        return self._models[key].generate(
            ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, prefill_chunk_size=chunk or None,
            attention_mask=torch.ones_like(ids), pad_token_id=0, **options,
        )  # fmt: skip


def _cut(model: Any, tensor: int) -> Any:
    """Return this rank's part of a whole model, as `load_parallel` would load it; `tensor` ranks share a layer."""
    stages = dist.get_world_size() // tensor
    plan = model._expand_parallel_plan(model.tp_plan)
    mesh = init_device_mesh("cpu", (stages, 1, tensor), mesh_dim_names=("pp", "fsdp", "tp"))
    model._device_mesh, model._tp_size = mesh, tensor
    if stages > 1:
        model = apply_pipeline_parallelism(model, mesh["pp"])
    if tensor > 1:
        model = of_this_stage(model, mesh["tp"], plan)
    return model


def _model_of(settings: dict[str, Any]) -> Any:
    """Return the whole model, in evaluation mode."""
    dtype = _DTYPES[settings["precision"]]
    if settings["pretrained"]:
        return load(AutoModelForCausalLM, settings["pretrained"], "pretrained", dtype=dtype)[0].eval()
    torch.manual_seed(settings["seed"])
    config = LlamaConfig(
        hidden_size=settings["width"], intermediate_size=settings["ffn"], num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"], num_key_value_heads=settings["tensor"], head_dim=_HEAD,
        vocab_size=settings["vocab"], max_position_embeddings=1 << 20, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def _bits(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the bits per element sent between two counts; 0 if nothing was sent."""
    elements = after[1] - before[1]
    return 8 * (after[0] - before[0]) / elements if elements else 0.0


if __name__ == "__main__":
    serve(GenerationRank)
