"""One rank of `lowbit bench generation`: a stage of Transformers' pipeline for each format, with shared weights."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed.pipeline_parallel import apply_pipeline_parallelism

from lowbit.bench.generation import OWN, codec_of
from lowbit.bench.sums import sent_bytes
from lowbit.bench.worker import TIMEOUT_SECONDS, serve
from lowbit.integrations.transformers import LowBitPipelineStage, low_bit_pipeline_
from lowbit.train.answers import Answers
from lowbit.train.config import DataConfig
from lowbit.train.data import Windows, load_data

_HEAD = 64
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Clock:
    """A streamer of `generate` that notes when tokens come; the first call shows the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing: the last token has been noted."""


class GenerationRank:
    """This rank's stage of a model, for each format."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}
        self._stages: dict[str, LowBitPipelineStage] = {}
        self._held_out: Windows | Answers | None = None
        self._prompt = torch.empty(0, dtype=torch.int64)
        self._own: tuple[Tensor, Tensor] | None = None

    def open(self, settings: dict[str, Any]) -> None:
        """Make the model, cut it once for each format, and install the codecs."""
        model = _model_of(settings)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        for name in dict.fromkeys([OWN, *settings["formats"]]):
            shared = {id(weight): weight for weight in model.parameters()}
            self._models[name] = apply_pipeline_parallelism(copy.deepcopy(model, shared), mesh)
            if (codec := codec_of(name)) is not None:
                self._stages[name] = low_bit_pipeline_(self._models[name], codec, timeout=TIMEOUT_SECONDS)
        shape = settings["batch"], settings["prompt"]
        if settings["pretrained"]:
            held_out = self._held_out = load_data(DataConfig(**settings["data"])).held_out
            assert isinstance(held_out, Windows)  # settings of plain text
            tokens = torch.from_numpy(held_out.tokens[: shape[0] * shape[1]].astype("int64"))
            self._prompt = tokens.view(shape)
        else:
            self._prompt = torch.randint(3, settings["vocab"], shape, generator=torch.Generator().manual_seed(1))

    def generate(self, name: str, chunk: int, tokens: int) -> dict[str, Any]:
        """Generate once: seconds to the first token and of each further one, bits of hidden states, bytes sent."""
        clock, stage = Clock(), self._stages.get(name)
        counts: list[tuple[int, int]] = []

        def count(*_: Any) -> bool:
            traffic = stage.traffic if stage else None
            counts.append((traffic.forward_bytes, traffic.forward_elements) if traffic else (0, 0))
            return False

        dist.barrier()
        count()
        before, start = sent_bytes(), time.perf_counter()
        self._continued(name, self._prompt, tokens, chunk, streamer=clock, stopping_criteria=[count])
        sent = sent_bytes() - before
        dist.barrier()
        first, last = clock.times[1], clock.times[-1]
        dtype = next(self._models[name].parameters()).dtype
        own = 8.0 * dtype.itemsize
        bits = [_bits(*pair) or own for pair in ((counts[0], counts[1]), (counts[1], counts[-1]))]
        return {
            "prefill": first - start, "decode": (last - first) / (tokens - 1), "sent": sent,
            "bits_prefill": bits[0], "bits_decode": bits[1],
        }  # fmt: skip

    def agreement(self, name: str, samples: int, tokens: int) -> dict[str, float]:
        """Next tokens and texts that are those of Transformers' own pipeline, and the held-out loss."""
        assert self._held_out is not None  # asked for only with a pretrained model
        inputs, targets = self._held_out.batch(torch.arange(min(samples, len(self._held_out))))
        if self._own is None:
            self._own = self._likely(OWN, inputs, targets)[0], self._continued(OWN, inputs, tokens)
        likely, loss = self._likely(name, inputs, targets)
        texts = self._continued(name, inputs, tokens)
        same = (texts == self._own[1]).all(1).float().mean()
        return {"same_tokens": float((likely == self._own[0]).float().mean()), "same_texts": float(same), "loss": loss}

    @torch.no_grad()
    def _likely(self, name: str, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """The most probable next token at each position, and the loss."""
        logits = self._models[name](inputs).logits.float()
        return logits.argmax(-1), float(functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    def _continued(self, name: str, ids: Tensor, tokens: int, chunk: int = 0, **options: Any) -> Tensor:
        """The prompts and exactly so many tokens more, chosen greedily."""
        return self._models[name].generate(
            ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, prefill_chunk_size=chunk or None,
            attention_mask=torch.ones_like(ids), pad_token_id=0, **options,
        )  # fmt: skip


def _model_of(settings: dict[str, Any]) -> Any:
    """The whole model, in evaluation mode."""
    dtype = _DTYPES[settings["precision"]]
    if settings["pretrained"]:
        return AutoModelForCausalLM.from_pretrained(settings["pretrained"], dtype=dtype).eval()
    torch.manual_seed(settings["seed"])
    config = LlamaConfig(
        hidden_size=settings["width"], intermediate_size=settings["ffn"], num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"], num_key_value_heads=1, head_dim=_HEAD, vocab_size=settings["vocab"],
        max_position_embeddings=1 << 20, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def _bits(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Bits per element of what was sent between two counts; 0 if nothing was."""
    elements = after[1] - before[1]
    return 8 * (after[0] - before[0]) / elements if elements else 0.0


if __name__ == "__main__":
    serve(GenerationRank)
