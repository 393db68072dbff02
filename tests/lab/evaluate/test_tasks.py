"""Zero-shot tasks: shares that are kept, and tasks of lm-eval whose data are local."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowbit.config import ConfigError
from lowbit.report import run
from lowbit_lab.evaluate.commands import EVALUATE
from lowbit_lab.evaluate.tasks import Metric, Tasks, kept
from tests.lab.evaluate.models import write_checkpoint
from tests.lab.evaluate.test_run import evaluation_config


def mean(*items: float) -> Metric:
    return Metric(value=sum(items) / len(items), items=items)


def test_shares_kept_have_errors_of_pairs():
    exact, other = mean(1, 1, 1, 0), mean(1, 1, 0, 0)
    # a - 2/3 b is 1/3, 1/3, -2/3, 0, of mean 0: their variance is 6/9 over 3
    assert kept({"a acc": other}, {"a acc": exact}) == pytest.approx((2 / 3, math.sqrt(6 / 27 / 4) / 0.75))
    assert kept({"a acc": exact}, {"a acc": exact}) == (1, 0)
    both = kept({"a acc": other, "b acc": exact}, {"a acc": exact, "b acc": exact})
    assert both is not None
    assert both[0] == pytest.approx(1.25 / 1.5)
    assert kept({"a acc": other}, {"a acc": mean(0, 0)}) is None
    assert kept({"a f1": Metric(value=0.5)}, {"a f1": Metric(value=1.0)}) == (0.5, None)


SCORES: list[dict[str, Metric]] = [{"boolq acc": mean(1, 1, 0, 0)}, {"boolq acc": mean(1, 0, 0, 0)}]


@pytest.mark.parametrize("small", [0, 10**6])
def test_rows_have_scores_and_what_is_kept_of_them(small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a format that coded nothing, no share is kept."""
    folder, scores = write_checkpoint(tmp_path), iter(SCORES)
    monkeypatch.setattr("lowbit_lab.evaluate.tasks.load_tasks", lambda _: {})
    monkeypatch.setattr(Tasks, "score", lambda *_: next(scores))
    settings = evaluation_config(folder, tps=(2,), formats=("int8",), tasks=("boolq",), small=small)
    exact, int8 = run(EVALUATE, settings).rows
    assert (exact["scores_kept"], exact["scores_kept_error"]) == ((None, None) if small else (1, 0))
    assert int8["scores"] == {"boolq acc": 0.25}
    assert int8["score_kept"] == ({} if small else {"boolq acc": 0.5})
    assert int8["scores_kept"] == (None if small else 0.5)


YAML = """
task: my_task
dataset_path: json
dataset_kwargs: {data_files: DATA}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


def test_a_task_of_lm_eval_with_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra lowbit[tasks]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: the extra lowbit[tasks]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_checkpoint(tmp_path)
    lines: list[dict[str, Any]] = [{"question": "2 + 2 =", "choices": ["4", "5"], "answer": i % 2} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "my_task.yaml").write_text(YAML.replace("DATA", str(tmp_path / "data.jsonl")))
    settings = evaluation_config(
        folder, length=64, tps=(2,), formats=("int8",), tasks=("my_task",), task_folder=str(tmp_path)
    )
    with pytest.raises(ConfigError, match="task is 'nonsense'; allowed"):
        run(EVALUATE, dataclasses.replace(settings, tasks=("nonsense",)))
    for row in run(EVALUATE, settings).rows:
        assert row["scores"]["my_task acc"] == 0.5
        assert row["scores_error"]["my_task acc"] == pytest.approx(math.sqrt(1 / 12))
