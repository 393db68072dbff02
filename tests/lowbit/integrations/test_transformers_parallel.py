"""Transformers with tensor parallelism: its ways to generate text, and a pipeline between hosts; real ranks.

The model is small and has learned.
"""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers.distributed.pipeline_parallel")
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.distributed.configuration_utils import DistributedConfig

from lowbit.integrations import transformers as line
from lowbit.integrations.transformers_parallel import load_parallel, low_bit_parallel_
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    SumSettings,
    calibrate,
    emulate_tensor_parallel_,
    low_bit_,
)
from tests.lowbit.integrations.test_transformers import (
    BYTE,
    EXACT,
    NEW,
    PROMPT,
    SIZES,
    WIDTH,
    generated,
    logits_of,
    prompts,
    train,
    whole,
)
from tests.processes import Ranks, on_ranks
from tests.refused import refused

ALWAYS, NEVER = SumSettings(small=0), SumSettings(small=1 << 60)
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


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained model whose heads four ranks can share, calibrations of it for 2 and 4 ranks, and one of another."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4}))
    train(model)
    model.eval().save_pretrained(path)
    for ranks in (2, 4):
        calibrate(model, prompts()["input_ids"], ranks=ranks).save(path / f"tp{ranks}")
    for weight in model.parameters():
        weight.data.add_(0.01)
    calibrate(model, prompts()["input_ids"], ranks=2).save(path / "other")
    return str(path)


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


def ways(folder: str, bits: int) -> dict[str, Tensor]:
    """By way: tokens in few bits, which are nearly those with Transformers' own sums."""
    model = loaded(folder)
    own, texts = {way: text_of(model, way) for way in WAYS}, {}
    source = BYTE if bits == 8 else f"{folder}/tp{dist.get_world_size()}"
    with low_bit_(model, source, settings=ALWAYS) as installed:
        for way in WAYS:
            installed.traffic.reset()
            texts[way] = text_of(model, way)
            assert texts[way].shape == (ROWS, NEW)
            coded, same = installed.traffic.coded, float((own[way] == texts[way]).float().mean())
            assert coded >= SUMS * ROWS * (PROMPT - 9 + NEW - 1) * WIDTH, way
            assert installed.traffic.plain == coded // SUMS  # the embedding's sum
            assert same == 1 if bits == 8 else same > 0.5, way
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(("count", "bits"), [(4, 8), (2, 4)])
def test_all_ways_to_generate_use_low_bit_sums_and_agree(ranks: Ranks, shared_folder: str, count: int, bits: int):
    first, *others = ranks.run(ways, shared_folder, bits, ranks=count)
    for way, rank in itertools.product(WAYS, range(1, count)):
        assert torch.equal(others[rank - 1][way], first[way]), f"{way}, rank {rank}"


@pytest.mark.slow
@on_ranks
def test_only_the_prompt_is_coded_where_a_token_is_small(shared_folder: str):
    model = loaded(shared_folder)
    with low_bit_(model, BYTE, settings=SumSettings(small=ROWS * PROMPT * WIDTH)) as installed:
        text_of(model, "KV cache")
    assert installed.traffic.coded == SUMS * ROWS * PROMPT * WIDTH
    tokens = PROMPT + NEW - 1  # of which the embedding adds up each
    assert installed.traffic.plain == ROWS * (SUMS * (NEW - 1) + tokens) * WIDTH


@on_ranks(4)
def test_exact_formats_give_the_text_of_the_whole_model(shared_folder: str):
    text = generated(whole(shared_folder, EXACT))
    model = load_parallel(shared_folder, tensor=2, stages=2)
    assert torch.equal(generated(model), text)  # Transformers' own sums and stages
    installed = low_bit_parallel_(model, BYTE, EXACT, settings=NEVER)
    assert torch.equal(generated(model), text)
    assert torch.equal(generated(model, prefill_chunk_size=7), text)
    assert installed.sums.traffic.plain > 0 == installed.sums.traffic.coded
    installed.remove()
    assert torch.equal(generated(model), text)


@on_ranks(4)
def test_both_boundaries_are_those_of_one_process_and_a_link_carries_hidden_states_once(shared_folder: str):
    own, traffic = whole(shared_folder, BYTE), []
    with emulate_tensor_parallel_(own, 2, Calibration.load(f"{shared_folder}/tp2"), settings=ALWAYS):
        expected = logits_of(own)
    for split in (0, 1 << 60):
        with mock.patch.object(line, "SPLIT", split):
            model = load_parallel(shared_folder, tensor=2, stages=2)
            installed = low_bit_parallel_(model, f"{shared_folder}/tp2", BYTE, settings=ALWAYS)
            assert torch.equal(logits_of(model), expected)
            text = generated(model, do_sample=True, top_k=8)  # random numbers differ by rank
        everywhere = [torch.empty_like(text) for _ in range(4)]
        dist.all_gather(everywhere, text)
        assert all(torch.equal(text, each) for each in everywhere)
        assert installed.sums.traffic.coded > 0
        traffic.append(installed.stage.traffic)
    apart, together = traffic
    if dist.get_rank() < 2:
        assert apart.forward_bytes < 0.6 * together.forward_bytes
        assert 8.4 < apart.forward_bits < 11  # with the checksums of small messages


@on_ranks(4)
def test_another_calibration_is_refused_on_all_ranks(shared_folder: str):
    model = load_parallel(shared_folder, tensor=2, stages=2)

    def given(calibration: str) -> Any:
        return lambda: low_bit_parallel_(model, f"{shared_folder}/{calibration}")

    first, *_ = refused(
        (given("tp4"), CalibrationError, "the calibration is for 4 ranks, this is a group of 2"),
        (given("other"), CalibrationError, "the calibration is for the model llama, hidden_size 64"),
        (given("missing"), CalibrationError, "No such file"),
    )
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, first)
    assert everywhere == [first] * 4


@on_ranks
def test_a_model_with_one_of_both_is_refused(shared_folder: str):
    def part(tensor: int, stages: int) -> Any:
        return lambda: low_bit_parallel_(load_parallel(shared_folder, tensor=tensor, stages=stages), BYTE)

    refused(
        (part(3, 1), ValueError, "tensor is 3 and stages is 1; allowed: numbers whose product is 2"),
        (part(2, 1), ValueError, "LlamaForCausalLM without stages"),
        (part(1, 2), ValueError, "LlamaForCausalLM without tensor-parallel"),
    )
