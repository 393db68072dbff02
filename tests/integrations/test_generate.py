"""Transformers' ways to generate text with low-bit sums: real tensor-parallel ranks, a small model that has learned."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers.distributed")
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed.configuration_utils import DistributedConfig

from lowbit.codecs import GroupInt
from lowbit.tensor_parallel import SumSettings, Traffic, low_bit_
from tests.integrations.test_transformers import NEW, PROMPT, SIZES, WIDTH, prompts
from tests.processes import Ranks

BYTE = GroupInt(bits=8, group=64)
PAGES = ContinuousBatchingConfig(page_size=32, num_blocks=8, max_batch_tokens=64)  # its default takes all memory
SUMS, ROWS = 2 * SIZES["num_hidden_layers"], 2
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "KV cache": {},
    "padded": {"padded": True},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt in chunks": {"prefill_chunk_size": 7},
    "beams": {"num_beams": 2},
    "batches": {},
    "manager": {},
}


def text_of(model: Any, way: str) -> Tensor:
    """The tokens after both prompts, generated in one of the `WAYS`."""
    options = WAYS[way] | GREEDY
    given = prompts(padded=options.pop("padded", False))
    if way not in ("batches", "manager"):
        return model.generate(**given, **options)[:, PROMPT:]
    config = GenerationConfig(**GREEDY, eos_token_id=-1, pad_token_id=0)
    inputs = given["input_ids"].tolist()
    if way == "batches":
        found = model.generate_batch(inputs, generation_config=config, continuous_batching_config=PAGES)
        return torch.tensor([found[key].generated_tokens for key in sorted(found)])
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=PAGES
    ) as manager:
        if manager.is_tp_driver:  # the others get its requests
            for number, ids in enumerate(inputs):
                manager.add_request(ids, request_id=str(number))
        results: list[Any] = [manager.get_result(timeout=60) for _ in inputs]
        found = {result.request_id: result.generated_tokens for result in results}
    return torch.tensor([found[key] for key in sorted(found)])


def loaded(folder: str) -> Any:
    config = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()


def ways(folder: str, bits: int) -> dict[str, tuple[Tensor, Tensor, Traffic]]:
    """By way: tokens with Transformers' own sums, tokens in few bits, and what these sums carried."""
    model = loaded(folder)
    own = {way: text_of(model, way) for way in WAYS}
    source = BYTE if bits == 8 else f"{folder}/tp{dist.get_world_size()}"
    found = {}
    with low_bit_(model, source, settings=SumSettings(small=0)) as installed:
        for way in WAYS:
            installed.traffic.reset()
            text = text_of(model, way)
            found[way] = own[way], text, Traffic(coded=installed.traffic.coded, plain=installed.traffic.plain)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "bits"), [(4, 8), (2, 4)])
def test_all_ways_to_generate_use_low_bit_sums_and_agree(ranks: Ranks, shared_folder: str, count: int, bits: int):
    results = ranks.run(ways, shared_folder, bits, ranks=count)
    for way in WAYS:
        own, text, traffic = results[0][way]
        assert text.shape == (ROWS, NEW)
        for rank in range(count):
            assert torch.equal(results[rank][way][1], text), f"{way}, rank {rank}"
        assert traffic.plain == traffic.coded // SUMS  # the embedding's sum
        assert traffic.coded >= SUMS * ROWS * (PROMPT - 9 + NEW - 1) * WIDTH, way
        same = float((own == text).float().mean())
        print(f"{way}, {count} ranks, {bits} bits: {same:.0%} of the tokens of Transformers' own sums")
        assert same == 1 if bits == 8 else same > 0.5, way


def thresholds(folder: str) -> tuple[int, int]:
    with low_bit_(model := loaded(folder), BYTE, settings=SumSettings(small=ROWS * PROMPT * WIDTH)) as installed:
        text_of(model, "KV cache")
    return installed.traffic.coded, installed.traffic.plain


def test_only_the_prompt_is_coded_where_a_token_is_small(ranks: Ranks, shared_folder: str):
    for coded, plain in ranks.run(thresholds, shared_folder):
        assert coded == SUMS * ROWS * PROMPT * WIDTH
        tokens = PROMPT + NEW - 1  # of which the embedding adds up each
        assert plain == ROWS * (SUMS * (NEW - 1) + tokens) * WIDTH
