"""AGoQ's bits for saved activations: 4 for all but attention, which is not coded."""

import copy

import torch

from lowbit.activations import LayerAware, compress_saved_, counted
from lowbit.codecs import GroupInt
from lowbit.train.config import METHODS, ModelConfig, TrainConfig, from_mapping
from lowbit.train.model import build_model

TOKENS, DIM, FFN = 2 * 32, 128, 256


def test_norms_and_gates_take_4_bits_and_attention_is_not_touched():
    model = build_model(ModelConfig(dim=DIM, layers=2, heads=4, kv_heads=2, ffn=FFN), vocab=64, sequence=32, seed=0)
    plain, ours = model.train(), copy.deepcopy(model).train()
    compressed = compress_saved_(ours, LayerAware.published())
    assert {bits for kind, bits in compressed.bits.values() if kind != "attention"} == {4}
    kept, ids = [], torch.arange(TOKENS).view(2, 32)
    for each in (plain, ours):
        with counted(each) as saved:
            loss = each(input_ids=ids, labels=ids).loss
        kept.append(saved)
        loss.backward()
    attention = [{name: size for (kind, name), size in k.modules.items() if kind == "attention"} for k in kept]
    assert attention[0] == attention[1]
    assert len(attention[0]) == 2
    four = GroupInt(bits=4, group=64)
    assert kept[1].peak["norm"] == 5 * four.nbytes((TOKENS, DIM))
    assert kept[1].peak["mlp"] == 2 * 2 * four.nbytes((TOKENS, FFN)), "gate and up of two layers"
    assert "linear" not in kept[1].peak, "recomputed"


def test_ours_differs_where_it_says_so():
    ours, paper = LayerAware(), LayerAware.published()
    assert [paper.bits_of(kind) for kind in ("norm", "gate", "mlp", "linear", "attention")] == [4, 4, 4, 4, 16]
    assert [ours.bits_of(kind) for kind in ("norm", "linear", "attention")] == [8, 6, 8]
    assert ours.bits_of("gate") == GroupInt(bits=7, group=128)


def test_the_run_by_name_has_these_bits():
    config = from_mapping({"run": {"method": "agoq"}})
    section = METHODS["agoq"]["activations"]
    assert LayerAware(**{kind: bits[0] for kind, bits in section.items() if bits}) == LayerAware.published()
    assert {key: getattr(config.activations, key) for key in section} == section
    assert TrainConfig().activations.bits == (16,)
