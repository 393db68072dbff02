"""Few bits between the stages of Transformers' pipeline: real processes over Gloo, small models that have learned."""

import contextlib
import importlib
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers.distributed.pipeline_parallel")
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.distributed import pipeline_parallel
from transformers.distributed.configuration_utils import DistributedConfig

from lowbit.codecs import Cast, Codec, GroupInt, TAHQuant, TransformQuant
from lowbit.collectives import AgreementError, PeerError
from lowbit.integrations import EngineError
from lowbit.integrations import transformers as module
from lowbit.integrations.transformers import low_bit_pipeline_
from tests.damage import Flip, on_the_way
from tests.lowbit_lab.evaluate.models import TEXT
from tests.processes import Failure, Ranks, on_ranks
from tests.refused import refused

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


def stages_of(folder: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The model, cut over the ranks by Transformers."""
    config = DistributedConfig(pp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config, **options)


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


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
@on_ranks
def test_an_exact_codec_gives_what_transformers_gives(folders: dict[str, str], family: str, dtype: torch.dtype):
    model = stages_of(folders[family], dtype)
    text, logits = generated(model), logits_of(model)
    own = generated(model, return_dict_in_generate=True, output_logits=True)
    stage = low_bit_pipeline_(model, EXACT)
    assert torch.equal(logits_of(model), logits)
    out = generated(model, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, text)
    assert torch.equal(torch.stack(out.logits), torch.stack(own.logits))
    stage.remove()
    assert torch.equal(generated(model), text)
    assert "generate" not in vars(model)


@on_ranks
def test_weights_of_4_bits_give_what_one_process_gives_with_them(folders: dict[str, str]):
    pytest.importorskip("bitsandbytes")
    nf4 = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    own = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32, **nf4)
    model = stages_of(folders["llama"], **nf4)
    stage = low_bit_pipeline_(model, EXACT)
    assert torch.equal(logits_of(model), logits_of(own))
    assert torch.equal(generated(model), generated(own))
    assert stage.traffic.forward_bits in (0.0, pytest.approx(32, rel=0.1))


@pytest.mark.parametrize(
    ("family", "codec", "dtype"),
    [("qwen3", BYTE, torch.bfloat16), ("qwen3", HALF, torch.float32), ("llama", TAHQuant(), torch.float32)],
    ids=str,
)
@on_ranks
def test_few_bits_give_what_one_process_gives_with_them(
    folders: dict[str, str], family: str, codec: Codec, dtype: torch.dtype
):
    own, model = whole(folders[family], codec, dtype), stages_of(folders[family], dtype)
    stage = low_bit_pipeline_(model, codec)
    assert torch.equal(logits_of(model), logits_of(own))
    stage.traffic.reset()
    assert torch.equal(generated(model, padded=True), generated(own, padded=True))
    one, first = (codec.open(shape=(2, n, WIDTH), dtype=dtype).nbytes() for n in (1, PROMPT))
    if dist.get_rank():
        assert stage.traffic.backward_bytes == NEW * (2 * 8 + 8)  # tokens
    else:
        assert stage.traffic.backward_bytes == 0
        assert stage.traffic.forward_bytes == first + 8 + (NEW - 1) * (one + 8)


@on_ranks
def test_chunks_beams_and_samples(folders: dict[str, str]):
    """Everything but one token after the other."""
    own, model = whole(folders["llama"], BYTE), stages_of(folders["llama"])
    low_bit_pipeline_(model, BYTE)
    greedy = generated(own, padded=True)
    assert torch.equal(generated(model, padded=True, prefill_chunk_size=7), greedy)
    assert torch.equal(generated(model, padded=True, use_cache=False), greedy)
    assert torch.equal(generated(model, num_beams=2), generated(own, num_beams=2))
    torch.manual_seed(5)
    wanted = [generated(own, do_sample=True, temperature=2.0) for _ in range(2)]
    assert not torch.equal(*wanted)
    torch.manual_seed(5 if dist.get_rank() else 99)
    for text in wanted:
        assert torch.equal(generated(model, do_sample=True, temperature=2.0), text), "the last stage draws, for all"
    options: dict[str, Any] = {"inputs": prompts()["input_ids"][:1], "max_new_tokens": NEW, "do_sample": False}
    assistant = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert torch.equal(model.generate(**options, assistant_model=assistant), own.generate(**options))


@on_ranks
def test_receives_posted_ahead_that_are_too_short_are_passed_over(folders: dict[str, str]):
    """Prompts of very different lengths, one after the other."""
    own, model = AutoModelForCausalLM.from_pretrained(folders["llama"]), stages_of(folders["llama"])
    stage = low_bit_pipeline_(model, EXACT)
    lengths = (3, PROMPT, 1, PROMPT)
    for length in lengths:
        ids = prompts()["input_ids"][:, :length]
        assert torch.equal(*(each.generate(ids, max_new_tokens=3, do_sample=False) for each in (own, model)))
    tokens = sum(length + 2 for length in lengths)
    empty = 2 + 2  # before each long prompt: both receives are as long as one token
    if dist.get_rank() == 0:
        assert stage.traffic.forward_bytes == 2 * 4 * WIDTH * tokens + 8 * (4 * 3 + empty)


@on_ranks(3)
def test_three_stages(folders: dict[str, str]):
    text = generated(AutoModelForCausalLM.from_pretrained(folders["llama"]), padded=True)
    assert bytes(text[1, -NEW:].tolist()).decode() in TEXT, "it has learned nothing"
    model = stages_of(folders["llama"])
    low_bit_pipeline_(model, EXACT)
    assert torch.equal(generated(model, padded=True), text)
    assert logits_of(model).shape == (2, PROMPT, SIZES["vocab_size"])


def failing(folder: str, how: str) -> tuple[str, int, float]:
    """How a stage ends whose peer fails at its fifth token, or sends a changed message."""
    model = stages_of(folder)
    BYTE.round_trip(torch.zeros(2, PROMPT, WIDTH))  # nothing is compiled within the short time limit
    dist.barrier()
    low_bit_pipeline_(model, BYTE, timeout=LIMIT)

    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == PROMPT + 4:
            os._exit(3) if how == "dies" else time.sleep(LIMIT + 2)
        return scores

    start = time.monotonic()
    damage = on_the_way(0, Flip(0)) if how == "damages" else contextlib.nullcontext()
    with damage, pytest.raises(PeerError) as caught:
        generated(model, logits_processor=[fail])
    return f"{caught.type.__name__}: {caught.value}", caught.value.rank, time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "culprit", "said"),
    [
        ("dies", 1, "PeerError: rank 1 closed its connection"),
        pytest.param("sleeps", 1, "PeerError: rank 1 did not answer within 2.5 s", marks=pytest.mark.slow),
        ("damages", 0, "DamagedError: transformers pipeline, hidden states (2, 24, 64), number 0"),
    ],
)
def test_a_peer_that_fails_is_named_in_time(ranks: Ranks, folders: dict[str, str], how: str, culprit: int, said: str):
    outcome = ranks.outcomes(failing, folders["llama"], how)[1 - culprit]
    assert not isinstance(outcome, Failure), outcome
    text, rank, seconds = outcome
    assert text.startswith(said)
    assert rank == culprit
    assert seconds < 4 * LIMIT


@on_ranks
def test_wrong_arguments_and_modes_are_one_line(folders: dict[str, str]):
    model, training = (stages_of(folders["llama"]) for _ in range(2))
    training.train()
    rank = dist.get_rank()

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
    texts += refused((lambda: logits_of(model), RuntimeError, r"training mode, .* allowed: model.eval\(\)"))
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, texts)
    assert everywhere == [texts, texts]


@pytest.mark.parametrize("name", ["communicate", "broadcast_from_last"])
def test_another_version_of_transformers_is_named(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.delattr(pipeline_parallel.PipelineStage, name)
    with pytest.raises(EngineError, match=rf"transformers 5\.\d+.* has no .*PipelineStage.{name}; lowbit works with"):
        importlib.reload(module)
    monkeypatch.undo()
    importlib.reload(module)
