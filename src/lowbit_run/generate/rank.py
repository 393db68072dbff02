"""Answer and score on one rank, which holds its share of the model; every rank runs the same calls."""

import copy
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowbit.wire.agreement import agree
from lowbit.wire.checksum import secret_facts
from lowbit.wire.messages import gather_json
from lowbit.wire.pytorch import check_torch, new_group
from lowbit_run.generate.adapters import add_adapters
from lowbit_run.generate.prepare import Prepared
from lowbit_run.job.process_group import joined
from lowbit_run.terminal import print_pairs
from lowbit_run.train.answers import Answers, Encoded
from lowbit_run.train.config import DataConfig, PipelineConfig, RunConfig, TrainConfig
from lowbit_run.train.cut import MIXES_SAMPLES, Share
from lowbit_run.train.device import choose_autocast, threads_per_rank
from lowbit_run.train.evaluate import HeldOutEvaluation
from lowbit_run.train.layout import PipelineLayout
from lowbit_run.train.model import StageModule
from lowbit_run.train.weights import load_share
from lowbit_run.train.widened import widen_


def answer(prepared: Prepared) -> None:
    """Load this rank's share, answer or score, and print on rank 0; call it on every rank of the environment.

    Raises:
        AgreementError: ranks have different models, adapters, settings or versions.
        PeerError: another rank ended, or does not answer; the message names it.
    """
    settings, ranks = prepared.settings, prepared.layout.ranks
    if settings.threads or ranks > 1:
        torch.set_num_threads(settings.threads or threads_per_rank(ranks))
    with joined(settings.timeout_seconds):
        check_torch()
        agree(None, prepared.facts() | secret_facts(), settings.timeout_seconds, topic="settings of generate")
        tasks = _shared(prepared)
        answering = Answering(prepared)
        if tasks["samples"]:
            samples = [Encoded(np.array(ids, np.uint32), np.array(learned)) for ids, learned in tasks["samples"]]
            loss, exact = answering.scores(samples)
            if answering.rank == 0:
                print_pairs([("loss of the answers", f"{loss:.4f}"), ("exact match", f"{exact:.1%}")])
        else:
            _print_answers(answering, prepared, tasks["prompts"])
        if ranks > 1:
            dist.barrier()


def _shared(prepared: Prepared) -> dict[str, Any]:
    """Return rank 0's token ids on every rank. Raises ValueError: they are none of this model's."""
    own = {
        "prompts": [prompt.ids for prompt in prepared.prompts],
        "samples": [[sample.ids.tolist(), sample.learned.tolist()] for sample in prepared.samples],
    }
    tasks = gather_json(own)[0] if prepared.layout.ranks > 1 else own
    every = [*tasks["prompts"], *(ids for ids, _ in tasks["samples"])]
    size = prepared.exact.vocab_size
    if not every or not all(ids and all(type(x) is int and 0 <= x < size for x in ids) for ids in every):
        raise ValueError(f"rank 0 has token ids that the model does not know; allowed: 0 to {size - 1}")
    return tasks


def _print_answers(answering: "Answering", prepared: Prepared, prompts: list[list[int]]) -> None:
    """Answer all prompts; rank 0 prints one answer while it is written, and several as lines of JSON in their order."""
    tokenizer: Any = prepared.tokenizer.hugging_face()
    streamer = None
    if answering.rank == 0 and not prepared.settings.prompts:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begin, tokens = time.perf_counter(), 0
    answered: dict[int, list[int]] = {}
    printed, cut = 0, 0
    for index, ids in answering.answers(prompts, streamer):
        tokens += len(ids)
        cut += prepared.positions is not None and len(prompts[index]) + len(ids) >= prepared.positions
        answered[index] = ids
        while answering.rank == 0 and streamer is None and printed in answered:
            _print_line(prepared.prompts[printed].shown, tokenizer.decode(answered[printed], skip_special_tokens=True))
            printed += 1
    if answering.rank == 0:
        seconds = time.perf_counter() - begin
        about = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"
        if answering.stage is not None:
            about += f", {answering.stage.traffic.forward_bits:.1f} bits per element between ranks"
        if cut:
            about += f"; {cut} of {len(prompts)} answers end at the model's last position, {prepared.positions}"
        sys.stderr.write(about + "\n")
    elif "LOCAL_RANK" not in os.environ:
        sys.stdout.write("finished; rank 0 has the answers\n")


def _print_line(prompt: Any, answer: str) -> None:
    line = (prompt if isinstance(prompt, dict) else {"prompt": prompt}) | {"answer": answer}
    sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.stdout.flush()


@dataclass
class _Evaluated:
    config: TrainConfig
    layout: PipelineLayout
    modules: dict[int, StageModule]
    device: torch.device
    width: int
    lowbit_stages: dict[int, Any]


class Answering:
    """This rank's share of a model, which answers and scores with those of the others; every rank makes one.

    Attributes:
        module: this rank's stage. stage: sends between the ranks, and counts; None on a single one.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, layout = prepared, prepared.layout
        self.rank = dist.get_rank() if layout.ranks > 1 else 0
        first, last, held = self.rank == 0, self.rank == layout.ranks - 1, layout.layers_of(self.rank)
        built = load_share(
            prepared.base, prepared.exact, Share(layers=frozenset(held), first=first, last=last), dtype=prepared.dtype,
            quantized=prepared.quantized, device=prepared.device, key="folder",
        )  # fmt: skip
        if prepared.dtype == torch.bfloat16 and choose_autocast("auto", prepared.device) is None:
            widen_(built)
        if prepared.adapters is not None:
            folder, config = prepared.adapters
            add_adapters(built, config, folder)
        self.module = StageModule(built.eval(), layers=held, first=first, last=last).eval()
        self._model: Any = self.module.model
        self.stage = None

    def scores(self, samples: Sequence[Encoded]) -> tuple[float, float]:
        """Return the mean loss of the answers' tokens in nats, and the share of samples that are answered exactly."""
        prepared, settings = self._prepared, self._prepared.settings
        sequence = max(sample.places for sample in samples)
        config = TrainConfig(
            data=DataConfig(sequence=sequence, batch=settings.batch),
            pipeline=PipelineConfig(ranks=prepared.layout.ranks, microbatches=1),
            run=RunConfig(timeout_seconds=settings.timeout_seconds, checksums=settings.checksums),
        )  # fmt: skip
        stages = _Evaluated(config, prepared.layout, {self.rank: self.module}, prepared.device, self.module.width, {})
        group = new_group(timeout=settings.timeout_seconds)
        codecs = (prepared.codec,) * (prepared.layout.ranks - 1)
        windows = Answers(samples, sequence, packing=False)
        return HeldOutEvaluation(stages, group).scores(windows, batch=settings.batch, batches=0, codecs=codecs)

    def answers(self, prompts: list[list[int]], streamer: Any = None) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of each prompt and the ids of its answer, without its end; prompts of like lengths first."""
        settings = self._prepared.settings
        if self._prepared.layout.ranks > 1 and self.stage is None:
            from lowbit.integrations.transformers import connect_stages_

            seconds = settings.timeout_seconds
            self.stage = connect_stages_(
                self._model, self._prepared.codec, group=new_group(timeout=seconds), timeout=seconds,
                checksums=settings.checksums,
            )  # fmt: skip
        torch.manual_seed(settings.seed)
        generation, positions = self._prepared.generation, self._prepared.positions
        # Padding would change the answers of models whose layers do more than attend, and where it counts as repeated.
        repeats = generation.repetition_penalty not in (None, 1.0) or generation.no_repeat_ngram_size
        padded = self._prepared.exact.model_type not in MIXES_SAMPLES and not repeats

        def group(index: int) -> int:
            """0, or the length of a prompt that is computed only with others of its length."""
            length = len(prompts[index])
            # One whose answer may end at the last position would end those of shorter prompts as early.
            ends = positions is not None and length + generation.max_new_tokens > positions
            return 0 if padded and not ends else length

        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for _, alike in groupby(order, key=group):
            while together := list(islice(alike, settings.batch)):
                yield from zip(together, self._answered([prompts[index] for index in together], streamer), strict=True)

    def _answered(self, prompts: list[list[int]], streamer: Any) -> list[list[int]]:
        generation, longest = copy.deepcopy(self._prepared.generation), max(map(len, prompts))
        pad, ends = generation.pad_token_id, set(generation.eos_token_id or ())
        if self._prepared.positions is not None:
            generation.max_new_tokens = min(generation.max_new_tokens, self._prepared.positions - longest)
        ids = torch.tensor([[pad] * (longest - len(each)) + each for each in prompts], device=self._prepared.device)
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device=ids.device)
        out = self._model.generate(ids, attention_mask=mask, generation_config=generation, streamer=streamer)
        answers = []
        for row in out[:, longest:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row))
            answers.append(row[:end])
        return answers
