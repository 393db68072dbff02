"""What `benchmarks.vllm_link` makes of a server's replies, and what it refuses before it starts one."""

from pathlib import Path
from unittest import mock

import pytest

from benchmarks import vllm_link
from lowbit_lab.evaluate.questions import Question
from lowbit_lab.evaluate.tasks import Choice, LocalTask

CHOICES = [Choice(inputs=(1, 2, 3), targets=(4,)), Choice(inputs=(1, 2, 3, 5), targets=(5, 6))]
REPLIES = [
    {"prompt_logprobs": [None, *({str(token): {"logprob": -float(token)}} for token in tokens)]}
    for tokens in ((2, 3, 4), (2, 3, 5, 6))
]


def test_the_last_tokens_of_a_reply_are_the_choices():
    assert vllm_link.log_likelihoods(CHOICES, REPLIES) == [-4.0, -11.0]


def test_answers_are_compared_and_the_longest_question_is_found():
    short, long = (Question.of("a", ["b", "c"], answer) for answer in (0, 1))
    task = LocalTask(name="piqa", questions=[short, long], choices=[CHOICES[:1] * 2, CHOICES])
    assert vllm_link.longest_of(task).questions == [long]
    row = vllm_link.compared(task, [[-1.0, -2.0], [-1.0, -2.0]], [[-1.0, -2.0], [-2.0, -1.0]])
    assert (row["right"], row["same_answers"]) == (1.0, 0.5)
    assert row["divergence"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mbit", "--mbit has no rates; allowed: at least one, or --task"),
        ("--task piqa=a piqa=b", "--task has piqa piqa; allowed: each task once"),
        ("--task pica=a", "--task is pica=a; allowed: NAME=FILE"),
        ("--tokens 9999", "and --tokens below"),
        ("--calibration none", "there is no file none"),
    ],
)
def test_bad_input_is_one_line(words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text("{}")
    argv = ["vllm_link", str(tmp_path), "--json", str(tmp_path / "rows.json"), *words.split()]
    with mock.patch("sys.argv", argv), pytest.raises(SystemExit):
        vllm_link.options()
    assert said in capsys.readouterr().err
