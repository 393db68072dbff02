"""The bytes of a step between machines are those that a run of the recipe predicts for all of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowbit.doctor import step
from lowbit.doctor.step import step_bytes
from lowbit.plan.sizes import measure_sizes
from lowbit.train import TrainConfig
from lowbit.train.config import from_mapping
from lowbit.train.expected import ExpectedTraffic
from lowbit.train.metrics import BOUNDARIES, GRADIENTS, TIED
from lowbit.train.prepare import prepare
from tests.doctor.machines import TEXT


def recipe(tmp_path: Path, **sections: dict[str, Any]) -> TrainConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    values: dict[str, dict[str, Any]] = {
        "model": {"dim": 32, "layers": 4, "heads": 2},
        "data": {"text": [str(tmp_path / "text.txt")], "sequence": 32, "batch": 8},
        "pipeline": {"microbatches": 2, "forward": ["bf16"], "backward": ["fp32"], "tied_rows": "fp32"},
        "run": {"checksums": False, "output": str(tmp_path / "run"), "device": "cpu"},
    }
    return from_mapping({name: values.get(name, {}) | sections.get(name, {}) for name in (*values, *sections)})


def sent(config: TrainConfig, ranks: list[int]) -> tuple[list[list[float]], dict[str, float]]:
    """Bytes by sender and receiver, and those of all ranks by part, as a run predicts them."""
    prepared = prepare(config, ranks=sum(ranks))
    sizes = measure_sizes(config.model, vocab=prepared.vocab, sequence=config.data.sequence, precision="fp32")
    return step_bytes(config, sizes, prepared.vocab, ranks), ExpectedTraffic(prepared).step()


def test_activations_go_one_way_and_gradients_the_other(tmp_path: Path):
    table, parts = sent(recipe(tmp_path), [1, 1])
    elements = 8 * 32 * 32
    assert table == [[0, 2 * elements], [4 * elements, 0]]
    assert sum(map(sum, table)) == parts[BOUNDARIES]


def test_ranks_of_one_machine_use_no_link(tmp_path: Path):
    table, parts = sent(recipe(tmp_path, pipeline={"schedule": "GPipe"}), [2, 1])
    assert 2 * sum(map(sum, table)) == parts[BOUNDARIES]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_replicas_average_gradients_and_a_tied_embedding_is_followed(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
):
    model = {"family": family, "tied": True}
    config = recipe(tmp_path, model=model, pipeline={"data_parallel": 2}, gradients={"all_reduce": "fp32"})
    _, parts = sent(config, [1, 1, 1, 1])
    distinct = parts[TIED] / 2 / 2 / (4 * 32)  # pipelines, ways, bytes of a row
    monkeypatch.setattr(step, "expected_rows", lambda tokens, vocab: round(distinct))
    table, _ = sent(config, [1, 1, 1, 1])
    distances = [sum(table[a][b] for a in range(4) for b in range(4) if abs(a - b) == apart) for apart in range(4)]
    assert distances[1] == pytest.approx(parts[BOUNDARIES] + parts[TIED], rel=0.01)
    assert distances[2] == pytest.approx(parts[GRADIENTS], rel=0.01)
    assert distances[0] == distances[3] == table[1][2] == table[2][1] == 0


def test_a_recipe_for_another_number_of_machines_has_no_bytes(tmp_path: Path):
    config = recipe(tmp_path)
    sizes = measure_sizes(config.model, vocab=256, sequence=32, precision="fp32")
    assert step_bytes(config, sizes, 256, [1] * 9) == []
