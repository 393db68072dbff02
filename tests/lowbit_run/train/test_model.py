import itertools
import json
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from lowbit.collectives import DamagedError
from lowbit.wire.messages import Messages
from lowbit_run.config import ConfigError
from lowbit_run.train import TrainConfig, export, save_model, train
from lowbit_run.train.config import FAMILIES, ModelConfig
from lowbit_run.train.cut import Share
from lowbit_run.train.model import (
    StageModule,
    architecture,
    build_model,
    check_pretrained,
    count_layers,
    hugging_face_config,
    next_token_loss,
    vocabulary,
)
from lowbit_run.train.weights import random_share
from tests.damage import Flip, on_the_way
from tests.lowbit_run.train.runs import tiny
from tests.processes import Ranks

IDS = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(3))


def _model(family: str = "llama", **values):
    values = {"dim": 32, "layers": 5, "heads": 4, "ffn": 64} | values
    return build_model(ModelConfig(family=family, **values), vocab=99, sequence=12, seed=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [{}, {"ffn": 48, "tied": True, "heads": 2}], ids=str)
def test_the_architecture_is_known_without_the_model(tmp_path, family: str, given: dict):
    """From the configuration alone, and from that of a saved model."""
    config = ModelConfig(family=family, dim=32, layers=2, **given)
    made = hugging_face_config(config, vocab=99, sequence=12)
    found = architecture(config, vocab=99)
    ffn = made.n_inner if family == "gpt2" else made.intermediate_size
    assert (found["ffn"], found["tied"]) == (ffn, bool(made.tie_word_embeddings))
    assert found["kv_heads"] == getattr(made, "num_key_value_heads", found["heads"])
    made.save_pretrained(tmp_path)
    saved = architecture(ModelConfig(pretrained=str(tmp_path)), vocab=99)
    known = {key: value for key, value in saved.items() if value is not None}
    assert known == {key: found[key] for key in known}
    assert {"dim", "layers", "heads", "vocab", "family"} <= known.keys()


def _stages(model, cuts: list[int], **kwargs) -> list[StageModule]:
    """Stages that end before these layers."""
    bounds = [0, *cuts, model.config.num_hidden_layers]
    return [
        StageModule(model, layers=range(low, high), first=low == 0, last=high == bounds[-1], **kwargs)
        for low, high in itertools.pairwise(bounds)
    ]


def _through(stages: list[StageModule], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 4]])
def test_stages_compute_what_the_whole_model_computes(family, cuts):
    model = _model(family, kv_heads=0 if family == "gpt2" else 2)
    for parameter in model.parameters():  # biases and norms that do something
        torch.nn.init.normal_(parameter, std=0.2)
    assert torch.equal(_through(_stages(model, cuts), IDS), model(input_ids=IDS).logits)


def test_layers_with_different_attention_keep_their_own_kind():
    from transformers import AutoModelForCausalLM

    config = _model("qwen2").config
    config.layer_types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    config.sliding_window = 3
    model = AutoModelForCausalLM.from_config(config)
    logits = model(input_ids=IDS).logits
    assert torch.equal(_through(_stages(model, [1, 3]), IDS), logits)
    config.layer_types = ["full_attention"] * 5  # the model reads it at every call
    assert not torch.equal(model(input_ids=IDS).logits, logits)


@pytest.mark.parametrize(("family", "tied"), [("gpt2", None), ("llama", False), ("qwen3", True)])
def test_every_parameter_has_its_name_in_the_whole_model(family, tied):
    model = _model(family, tied=tied)
    stages = _stages(model, [2, 3])
    named = {name: p for stage in stages for p, name in stage.names.items()}
    assert sum(len(list(stage.parameters())) for stage in stages) == len(named)
    copied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(named) == {name for name, _ in model.named_parameters()} | copied
    for name, parameter in model.named_parameters():
        assert named[name] is parameter
    for name in copied:
        assert torch.equal(named[name], model.get_input_embeddings().weight)
        assert named[name] is not model.get_input_embeddings().weight


def test_a_single_stage_keeps_the_tie():
    (whole,) = _stages(_model("gpt2"), [])
    assert whole.head.weight is whole.decoder.get_input_embeddings().weight  # pyright: ignore


def test_weights_depend_on_the_seed_alone():
    first = _model().state_dict()
    torch.manual_seed(99)
    assert all(torch.equal(first[k], v) for k, v in _model().state_dict().items())
    other = build_model(ModelConfig(dim=32, layers=5, ffn=64), vocab=99, sequence=12, seed=1)
    assert not torch.equal(other.get_input_embeddings().weight, first["model.embed_tokens.weight"])


def test_activations_leave_in_the_dtype_of_the_wire_and_can_be_detached():
    for family in ("llama", "gpt2"):
        first, last = _stages(_model(family), [2], boundary_dtype=torch.bfloat16)
        activations = first(IDS)
        assert activations.dtype == torch.bfloat16
        assert last(activations).dtype == torch.float32
        activations.detach_()  # what zero-bubble schedules do


def test_autocast_computes_in_bfloat16_and_sends_float32():
    model = _model()
    first, last = _stages(model, [2], autocast=torch.bfloat16)
    assert first(IDS).dtype == torch.float32
    logits = last(first(IDS))
    assert logits.dtype == torch.bfloat16
    exact = model(input_ids=IDS).logits
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_saved_model_is_measured_and_loaded(tmp_path):
    model = _model("gpt2")
    model.save_pretrained(tmp_path)
    config = ModelConfig(pretrained=str(tmp_path), dropout=0.25)
    assert count_layers(config) == 5
    assert vocabulary(config, 99) == 99
    with pytest.raises(ConfigError, match="data.sequence is 13; the model knows 12 positions"):
        check_pretrained(config, 13)
    loaded = build_model(config, vocab=99, sequence=12, seed=0)
    assert (loaded.config.attn_pdrop, loaded.config.embd_pdrop) == (0.25, 0.25)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in loaded.state_dict().items())


class Module:
    """The parts of a stage's module that an export reads."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        shapes = {"matrix": (3 + rank, 50), "vector": (7,), "empty": (0, 4), "number": ()}
        self.aliases, self.saved_buffers = {}, {}
        self.names = {
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)): f"{rank}.{name}"
            for (name, shape), dtype in zip(shapes.items(), (torch.float32, torch.bfloat16) * 2, strict=True)
        }

    def as_stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights


def exported(folder: Path, dtype: torch.dtype | None = None, change: Any = None, alien: Any = "") -> Any:
    rank = dist.get_rank()
    module: Any = Module(rank)
    if alien and rank == 1:
        module.names = {torch.nn.Parameter(torch.zeros(2)): alien}
    messages = Messages(None, "saving", timeout=10)
    limits = mock.patch.multiple(export, PIECE_BYTES=64, SHARD_BYTES=700)
    try:
        with limits, on_the_way(2, change or (lambda count, message: None)):
            files = export.Export([module], messages, dtype, adapters=False)
            if rank == 0:
                files.reserve(folder)
            files.write()
    except DamagedError as error:
        return str(error), error.rank


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_all_weights_arrive_in_their_files(ranks: Ranks, tmp_path: Path, dtype: torch.dtype | None):
    ranks.run(exported, tmp_path, dtype, ranks=3)
    placed = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    expected = {name: w for rank in range(3) for w, name in Module(rank).names.items()}
    assert placed.keys() == expected.keys()
    assert len(set(placed.values())) > 1
    for name, weight in expected.items():
        found = load_file(tmp_path / placed[name])[name]
        assert (found.dtype, found.shape) == (dtype or weight.dtype, weight.shape)
        assert torch.equal(found, weight.to(found.dtype))


def test_a_damaged_piece_names_weight_and_sender(ranks: Ranks, tmp_path: Path):
    outcome = ranks.outcomes(exported, tmp_path, None, Flip(5), ranks=3)[0]
    assert outcome[0].startswith("saving, 2.matrix, number 5: the message from rank 2 is damaged: ")
    assert outcome[1] == 2


def test_weights_of_another_rank_are_not_written_over(ranks: Ranks, tmp_path: Path):
    failure = ranks.outcomes(exported, tmp_path, None, None, "0.vector", ranks=3)[0]
    assert failure.kind == "ValueError"
    assert failure.text.startswith("two ranks of the pipeline have 0.vector; allowed: ")


@pytest.mark.parametrize("described", [[["w", [-1], "F32"]], [["w", [2], "X"]], [["w"]], 3, [["w", "ab", "F32"]]])
def test_a_hostile_description_is_refused(described: Any):
    with pytest.raises(ValueError, match="rank 1 of the pipeline describes .*; allowed: names"):
        export._checked(described, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_share_of_a_random_model_has_the_weights_of_the_whole(family: str, tied: bool):
    config = ModelConfig(family=family, dim=32, layers=4, heads=2, tied=tied)
    whole = dict(build_model(config, vocab=99, sequence=12, seed=3).state_dict())
    exact = hugging_face_config(config, vocab=99, sequence=12)
    for layers, first, last in (({0, 1}, True, False), ({2}, False, False), ({3}, False, True), ({0, 3}, True, True)):
        share = random_share(exact, Share(layers=frozenset(layers), first=first, last=last), 3)
        weights = dict(share.named_parameters())
        assert len({int(name) for name in re.findall(r"(?:layers|h)\.(\d+)\.", " ".join(weights))}) == len(layers)
        assert all(torch.equal(value, whole[name]) for name, value in weights.items())


def _train_with_a_slow_disk(config: TrainConfig, seconds: float) -> int:
    def save(folder: Path, *_: Any, **__: Any) -> None:
        time.sleep(seconds)
        (folder / "config.json").write_text("{}")

    with mock.patch.object(save_model, "save_config", save):
        return train(config).steps


@pytest.mark.slow
def test_a_model_may_take_longer_to_save_than_the_time_limit(ranks: Ranks, tmp_path: Path):
    run = {"steps": 1, "save_model": True, "timeout_seconds": 3, "eval_batches": 1}
    config = tiny(tmp_path, model={"layers": 2}, run=run)
    assert ranks.run(_train_with_a_slow_disk, config, 3.5) == [1, 1]
    assert (tmp_path / "run/model/config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_in_pieces_are_those_of_all_logits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reduction: str):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 30, 500, generator=generator)).to(dtype)
    targets = torch.randint(500, (2, 30), generator=generator)
    targets[0, 3:20] = -100
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for piece in (logits.numel(), 7 * 500 + 1, 1):
        monkeypatch.setattr("lowbit_run.train.model._PIECE", piece)
        x = logits.clone().requires_grad_()
        loss = next_token_loss(x, targets, reduction) / 7
        loss.backward()
        assert x.grad is not None
        results.append((loss.detach(), x.grad))
    for loss, gradient in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])
