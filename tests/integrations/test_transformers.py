"""Few bits between the stages of Transformers' pipeline: real processes over Gloo, small models that have learned."""

import importlib
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers.distributed.pipeline_parallel")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import pipeline_parallel
from transformers.distributed.configuration_utils import DistributedConfig

from lowbit.codecs import Cast, Codec, GroupInt, TAHQuant, TransformQuant
from lowbit.collectives import AgreementError, DamagedError, PeerError
from lowbit.integrations import EngineError
from lowbit.integrations import transformers as module
from lowbit.integrations.transformers import low_bit_pipeline_
from tests.damage import Flip, on_the_way
from tests.lab.evaluate.models import TEXT
from tests.processes import Failure, Ranks
from tests.refused import refused
from tests.tensor_parallel.models import one_thread

LAYERS, WIDTH, PROMPT, NEW = 4, 64, 24, 20
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, Any] = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
EXACT, BYTE, HALF = Cast(dtype=torch.float32), GroupInt(bits=8, group=64), GroupInt(bits=4, group=64)
LIMIT = 2.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A trained model of each family, which continues `TEXT`."""
    folder = tmp_path_factory.mktemp("models")
    for name, (model_type, config) in FAMILIES.items():
        torch.manual_seed(0)
        model = model_type(config(**SIZES, tie_word_embeddings=name == "qwen3"))
        with one_thread():
            train(model, 100 if name == "llama" else 20)
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in FAMILIES}


def train(model: nn.Module, steps: int = 120) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = tokens_of(TEXT)
    for _ in range(steps):
        starts = torch.randint(len(text) - PROMPT - NEW, (8,))
        batch = torch.stack([text[start : start + PROMPT + NEW] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def prompts(*, padded: bool = False) -> dict[str, Tensor]:
    """Two prompts; padded: the first is shorter than the other."""
    ids = torch.stack([tokens_of(TEXT[start : start + PROMPT]) for start in (0, 31)])
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :9] = mask[0, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def stages_of(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model, cut over the ranks by Transformers."""
    config = DistributedConfig(pp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config)


def whole(folder: str, codec: Codec, dtype: torch.dtype = torch.float32, boundary: int = LAYERS // 2) -> Any:
    """The model in one process, with hidden states that a codec has coded at the boundary of two stages."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def code(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        session = codec.open(shape=out.shape, dtype=out.dtype)
        return session.decode(session.encode(out))

    model.model.layers[boundary - 1].register_forward_hook(code)
    return model


def generated(model: Any, *, padded: bool = False, **options: Any) -> Tensor:
    return model.generate(**prompts(padded=padded), max_new_tokens=NEW, **{"do_sample": False, **options})


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(**prompts()).logits


def exact(folder: str, dtype: torch.dtype) -> None:
    model = stages_of(folder, dtype)
    text, logits = generated(model), logits_of(model)
    own = generated(model, return_dict_in_generate=True, output_logits=True)
    stage = low_bit_pipeline_(model, EXACT)
    assert torch.equal(generated(model), text)
    assert torch.equal(logits_of(model), logits)
    out = generated(model, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, text)
    assert torch.equal(torch.stack(out.logits), torch.stack(own.logits))
    stage.remove()
    assert torch.equal(generated(model), text)
    assert "generate" not in vars(model)


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_an_exact_codec_gives_what_transformers_gives(
    ranks: Ranks, folders: dict[str, str], family: str, dtype: torch.dtype
):
    ranks.run(exact, folders[family], dtype)


def coded(folder: str, codec: Codec, dtype: torch.dtype, text: Tensor, logits: Tensor) -> tuple[int, int]:
    model = stages_of(folder, dtype)
    stage = low_bit_pipeline_(model, codec)
    assert torch.equal(logits_of(model), logits)
    stage.traffic.reset()
    assert torch.equal(generated(model, padded=True), text)
    return stage.traffic.forward_bytes, stage.traffic.backward_bytes


@pytest.mark.parametrize(
    ("family", "codec", "dtype"),
    [("qwen3", BYTE, torch.bfloat16), ("qwen3", HALF, torch.float32), ("llama", TAHQuant(), torch.float32)],
    ids=str,
)
def test_few_bits_give_what_one_process_gives_with_them(
    ranks: Ranks, folders: dict[str, str], family: str, codec: Codec, dtype: torch.dtype
):
    model = whole(folders[family], codec, dtype)
    (forward, none), (_, tokens) = ranks.run(
        coded, folders[family], codec, dtype, generated(model, padded=True), logits_of(model)
    )
    one, first = (codec.open(shape=(2, n, WIDTH), dtype=dtype).nbytes() for n in (1, PROMPT))
    assert (forward, none) == (first + 8 + (NEW - 1) * (one + 8), 0)
    assert tokens == NEW * (2 * 8 + 8)


def other_ways(folder: str, wanted: dict[str, Tensor]) -> None:
    """Everything but one token after the other."""
    model = stages_of(folder)
    low_bit_pipeline_(model, BYTE)
    assert torch.equal(generated(model, padded=True, prefill_chunk_size=7), wanted["greedy"])
    assert torch.equal(generated(model, num_beams=2), wanted["beams"])
    torch.manual_seed(5 if dist.get_rank() else 99)
    drawn = [generated(model, do_sample=True, temperature=2.0) for _ in range(2)]
    assert torch.equal(torch.cat(drawn), wanted["drawn"]), "the last stage draws, for all"
    assert torch.equal(generated(model, padded=True, use_cache=False), wanted["greedy"])
    one = prompts()["input_ids"][:1]
    assistant = AutoModelForCausalLM.from_pretrained(folder)
    text = model.generate(one, max_new_tokens=NEW, do_sample=False, assistant_model=assistant)
    assert torch.equal(text, wanted["assisted"])


def test_chunks_beams_and_samples(ranks: Ranks, folders: dict[str, str]):
    model = whole(folders["llama"], BYTE)
    torch.manual_seed(5)
    drawn = torch.cat([generated(model, do_sample=True, temperature=2.0) for _ in range(2)])
    assert not torch.equal(drawn[:2], drawn[2:])
    wanted = {"greedy": generated(model, padded=True), "beams": generated(model, num_beams=2), "drawn": drawn}
    wanted["assisted"] = model.generate(prompts()["input_ids"][:1], max_new_tokens=NEW, do_sample=False)
    ranks.run(other_ways, folders["llama"], wanted)


def longer_later(folder: str, texts: list[Tensor]) -> int:
    """Prompts of very different lengths, one after the other."""
    model = stages_of(folder)
    stage = low_bit_pipeline_(model, EXACT)
    for length, text in zip((3, PROMPT, 1, PROMPT), texts, strict=True):
        assert torch.equal(model.generate(prompts()["input_ids"][:, :length], max_new_tokens=3, do_sample=False), text)
    return stage.traffic.forward_bytes


def test_receives_posted_ahead_that_are_too_short_are_passed_over(ranks: Ranks, folders: dict[str, str]):
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    ids = prompts()["input_ids"]
    texts = [model.generate(ids[:, :n], max_new_tokens=3, do_sample=False) for n in (3, PROMPT, 1, PROMPT)]
    sent, _ = ranks.run(longer_later, folders["llama"], texts)
    messages = [length + 2 for length in (3, PROMPT, 1, PROMPT)]  # tokens of them
    empty = 2 + 2  # before each long prompt: both receives are as long as one token
    assert sent == 2 * 4 * WIDTH * sum(messages) + 8 * (4 * 3 + empty)


def of_three(folder: str, text: Tensor) -> None:
    model = stages_of(folder)
    low_bit_pipeline_(model, EXACT)
    assert torch.equal(generated(model, padded=True), text)
    assert logits_of(model).shape == (2, PROMPT, SIZES["vocab_size"])


def test_three_stages(ranks: Ranks, folders: dict[str, str]):
    text = generated(AutoModelForCausalLM.from_pretrained(folders["llama"]), padded=True)
    assert bytes(text[1, -NEW:].tolist()).decode() in TEXT, "it has learned nothing"
    ranks.run(of_three, folders["llama"], text, ranks=3)


def limited(folder: str) -> Any:
    """The model with a short time limit, in which nothing is loaded or compiled."""
    model = stages_of(folder)
    BYTE.round_trip(torch.zeros(2, PROMPT, WIDTH))
    dist.barrier()
    low_bit_pipeline_(model, BYTE, timeout=LIMIT)
    return model


def failing(folder: str, how: str) -> tuple[str, str, int, float]:
    """The last stage fails at its fifth token; how the first one ends."""
    model = limited(folder)
    seen = 0

    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen == 5 and how == "dies":
            os._exit(3)
        if seen == 5:
            time.sleep(LIMIT + 2)
        return scores

    start = time.monotonic()
    try:
        generated(model, logits_processor=[fail])
    except PeerError as error:
        return type(error).__name__, str(error), error.rank, time.monotonic() - start
    return "", "", -1, 0.0


@pytest.mark.parametrize(
    ("how", "said"), [("dies", "closed its connection"), ("sleeps", "did not answer within 2.5 s")]
)
def test_a_peer_that_fails_is_named_in_time(ranks: Ranks, folders: dict[str, str], how: str, said: str):
    first = ranks.outcomes(failing, folders["llama"], how)[0]
    assert not isinstance(first, Failure), first
    kind, text, culprit, seconds = first
    assert (kind, culprit) == ("PeerError", 1)
    assert text.startswith(f"rank 1 {said}")
    assert seconds < 4 * LIMIT


def damaged(folder: str) -> tuple[str, int]:
    model = limited(folder)
    with on_the_way(0, Flip(0)):
        try:
            generated(model)
        except PeerError as error:
            return f"{type(error).__name__}: {error}", error.rank
    return "", -1


def test_a_changed_message_is_an_error(ranks: Ranks, folders: dict[str, str]):
    text, culprit = ranks.outcomes(damaged, folders["llama"])[1]
    assert text.startswith(f"{DamagedError.__name__}: transformers pipeline, hidden states (2, 24, 64), number 0")
    assert culprit == 0


def refusals(folder: str) -> list[str]:
    model, training, rank = stages_of(folder), stages_of(folder).train(), dist.get_rank()

    def given(codec: Any, model: Any = model, **options: Any) -> Any:
        return lambda: low_bit_pipeline_(model, codec, **options)

    texts = refused(
        (given(TransformQuant()), ValueError, r"^codec is TransformQuant.*, which keeps state between messages"),
        (given("int8"), TypeError, "^codec is 'int8';"),
        (given(BYTE, timeout=0), ValueError, "^timeout is 0;"),
        (given(BYTE, checksums=1), TypeError, "^checksums is 1;"),
        (given(BYTE if rank else HALF), AgreementError, "codec.*bits=4.*bits=8"),
        (given(BYTE, training), RuntimeError, "training mode"),
        (given(BYTE, nn.Linear(2, 2)), ValueError, "model is Linear without pipeline stages; allowed: .*pp_size=2"),
    )
    low_bit_pipeline_(model, BYTE)

    def generating(length: int) -> Any:
        """Prompts that differ from rank to rank."""
        ids = torch.arange(1 + rank, 1 + rank + (length if rank else 4))[None]
        return lambda: model.generate(ids, max_new_tokens=3, do_sample=False)

    texts += refused(
        (lambda: model(**prompts()), RuntimeError, r"gradients are enabled, .* allowed: calls within torch.no_grad"),
        (generating(4), AgreementError, r"\(1, 4\), digest.*\(1, 4\), digest"),
        (generating(3), AgreementError, r"\(1, 4\), digest.*\(1, 3\), digest"),
    )
    model.train()
    return texts + refused((lambda: logits_of(model), RuntimeError, r"training mode, .* allowed: model.eval\(\)"))


def test_wrong_arguments_and_modes_are_one_line(ranks: Ranks, folders: dict[str, str]):
    first, second = ranks.run(refusals, folders["llama"])
    assert first == second


@pytest.mark.parametrize("name", ["communicate", "broadcast_from_last"])
def test_another_version_of_transformers_is_named(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.delattr(pipeline_parallel.PipelineStage, name)
    with pytest.raises(EngineError, match=rf"transformers 5\.\d+.* has no .*PipelineStage.{name}; lowbit works with"):
        importlib.reload(module)
    monkeypatch.undo()
    importlib.reload(module)
