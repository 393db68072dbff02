"""Tensor parallelism in hosts and a pipeline between them: four real processes, a small model that has learned."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers.distributed.pipeline_parallel")
from lowbit.codecs import GroupInt
from lowbit.integrations import transformers as line
from lowbit.integrations.transformers_parallel import load_parallel, low_bit_parallel_
from lowbit.tensor_parallel import Calibration, CalibrationError, SumSettings, emulate_tensor_parallel_
from tests.integrations.test_transformers import BYTE, EXACT, generated, logits_of, whole
from tests.processes import Ranks
from tests.refused import refused
from tests.tensor_parallel.models import one_thread

ALWAYS, NEVER = SumSettings(small=0), SumSettings(small=1 << 60)
SUMS = GroupInt(bits=8, group=64)


def exact(folder: str, text: Tensor) -> None:
    model = load_parallel(folder, tensor=2, stages=2)
    assert torch.equal(generated(model), text)  # Transformers' own sums and stages
    installed = low_bit_parallel_(model, SUMS, EXACT, settings=NEVER)
    assert torch.equal(generated(model), text)
    assert torch.equal(generated(model, prefill_chunk_size=7), text)
    assert installed.sums.traffic.plain > 0 == installed.sums.traffic.coded
    installed.remove()
    assert torch.equal(generated(model), text)


def test_exact_formats_give_the_text_of_the_whole_model(ranks: Ranks, shared_folder: str):
    ranks.run(exact, shared_folder, generated(whole(shared_folder, EXACT)), ranks=4)


def coded(folder: str, expected: Tensor, split: bool) -> tuple[int, float, int]:
    with mock.patch.object(line, "SPLIT", 0 if split else 1 << 60):
        model = load_parallel(folder, tensor=2, stages=2)
        installed = low_bit_parallel_(model, f"{folder}/tp2", BYTE, settings=ALWAYS)
        assert torch.equal(logits_of(model), expected)
        counts = installed.stage.traffic
        text = generated(model, do_sample=True, top_k=8)  # random numbers differ by rank
    everywhere = [torch.empty_like(text) for _ in range(4)]
    dist.all_gather(everywhere, text)
    assert all(torch.equal(text, each) for each in everywhere)
    return counts.forward_bytes, counts.forward_bits, installed.sums.traffic.coded


def test_both_boundaries_are_those_of_one_process_and_a_link_carries_hidden_states_once(
    ranks: Ranks, shared_folder: str
):
    model = whole(shared_folder, BYTE)
    with one_thread(), emulate_tensor_parallel_(model, 2, Calibration.load(f"{shared_folder}/tp2"), settings=ALWAYS):
        expected = logits_of(model)
    apart, together = (ranks.run(coded, shared_folder, expected, split, ranks=4) for split in (True, False))
    for rank in (0, 1):
        assert apart[rank][0] < 0.6 * together[rank][0]
        assert 8.4 < apart[rank][1] < 11  # with the checksums of small messages
    assert all(found[2] > 0 for found in (*apart, *together))


def refusals(folder: str) -> list[str]:
    model = load_parallel(folder, tensor=2, stages=2)

    def given(calibration: str) -> Any:
        return lambda: low_bit_parallel_(model, f"{folder}/{calibration}")

    return refused(
        (given("tp4"), CalibrationError, "the calibration is for 4 ranks, this is a group of 2"),
        (given("other"), CalibrationError, "the calibration is for the model llama, hidden_size 64"),
        (given("missing"), CalibrationError, "No such file"),
    )


def test_another_calibration_is_refused_on_all_ranks(ranks: Ranks, shared_folder: str):
    first, *others = ranks.run(refusals, shared_folder, ranks=4)
    assert [text for text, *_ in others] == [first[0]] * 3


def one_of_both(folder: str) -> None:
    def part(tensor: int, stages: int) -> Any:
        return lambda: low_bit_parallel_(load_parallel(folder, tensor=tensor, stages=stages), SUMS)

    refused(
        (part(3, 1), ValueError, "tensor is 3 and stages is 1; allowed: numbers whose product is 2"),
        (part(2, 1), ValueError, "LlamaForCausalLM without stages"),
        (part(1, 2), ValueError, "LlamaForCausalLM without tensor-parallel"),
    )


def test_a_model_with_one_of_both_is_refused(ranks: Ranks, shared_folder: str):
    ranks.run(one_of_both, shared_folder)
