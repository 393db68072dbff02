"""Tensor parallelism in hosts and a pipeline between them: four real processes, a small model that has learned."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers.distributed.pipeline_parallel")
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.codecs import GroupInt
from lowbit.integrations import transformers_line as line
from lowbit.integrations.transformers_parallel import load_parallel, low_bit_parallel_
from lowbit.tensor_parallel import Calibration, CalibrationError, SumSettings, calibrate, emulate_tensor_parallel_
from tests.integrations.test_transformers import BYTE, EXACT, SIZES, generated, logits_of, prompts, train, whole
from tests.processes import Ranks

ALWAYS, NEVER = SumSettings(small=0), SumSettings(small=1 << 60)
SUMS = GroupInt(bits=8, group=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained model, and calibrations of it for 2 and 4 ranks."""
    path = tmp_path_factory.mktemp("model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4}))
    train(model)
    model.eval().save_pretrained(path)
    for ranks in (2, 4):
        calibrate(model, prompts()["input_ids"], ranks=ranks).save(path / f"tp{ranks}")
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(0.01)
    calibrate(model, prompts()["input_ids"], ranks=2).save(path / "other")
    torch.set_num_threads(threads)
    return str(path)


def exact(folder: str, text: Tensor) -> None:
    model = load_parallel(folder, tensor=2, stages=2)
    assert torch.equal(generated(model), text)  # Transformers' own sums and stages
    installed = low_bit_parallel_(model, SUMS, EXACT, settings=NEVER)
    assert torch.equal(generated(model), text)
    assert torch.equal(generated(model, padded=True)[1], text[1])
    assert torch.equal(generated(model, prefill_chunk_size=7), text)
    assert installed.sums.traffic.plain > 0 == installed.sums.traffic.coded
    installed.remove()
    assert torch.equal(generated(model), text)


def test_exact_formats_give_the_text_of_the_whole_model(ranks: Ranks, folder: str):
    ranks.run(exact, folder, generated(whole(folder, EXACT)), ranks=4)


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


def test_both_boundaries_are_those_of_one_process_and_a_link_carries_hidden_states_once(ranks: Ranks, folder: str):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = whole(folder, BYTE)
    with emulate_tensor_parallel_(model, 2, Calibration.load(f"{folder}/tp2"), settings=ALWAYS):
        expected = logits_of(model)
    torch.set_num_threads(threads)
    apart, together = (ranks.run(coded, folder, expected, split, ranks=4) for split in (True, False))
    for rank in (0, 1):
        assert apart[rank][0] < 0.6 * together[rank][0]
        assert 8.4 < apart[rank][1] < 11  # with the checksums of small messages
    assert all(found[2] > 0 for found in (*apart, *together))


def refused(folder: str, calibration: str) -> None:
    low_bit_parallel_(load_parallel(folder, tensor=2, stages=2), f"{folder}/{calibration}")


@pytest.mark.parametrize(
    ("calibration", "text"),
    [
        ("tp4", "the calibration is for 4 ranks, and 2 share a layer"),
        ("other", "the calibration is for the model llama, hidden_size 64"),
        ("missing", "No such file"),
    ],
)
def test_another_calibration_is_refused_on_all_ranks(ranks: Ranks, folder: str, calibration: str, text: str):
    for outcome in ranks.outcomes(refused, folder, calibration, ranks=4):
        assert outcome.kind == CalibrationError.__name__
        assert text in outcome.text


def one_of_both(folder: str) -> None:
    with pytest.raises(ValueError, match=r"tensor is 3 and stages is 1; allowed: numbers whose product is 2"):
        load_parallel(folder, tensor=3, stages=1)
    for sizes, missing in (({"tensor": 2, "stages": 1}, "stages"), ({"tensor": 1, "stages": 2}, "tensor-parallel")):
        model: Any = load_parallel(folder, **sizes)
        with pytest.raises(ValueError, match=f"LlamaForCausalLM without {missing}"):
            low_bit_parallel_(model, SUMS)


def test_a_model_with_one_of_both_is_refused(ranks: Ranks, folder: str):
    ranks.run(one_of_both, folder)
