"""Zero-shot tasks from local files: their formats, scores by hand and next to lm-eval's, and what is refused."""

import codecs
import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowbit_lab.evaluate import EvaluationConfig, questions
from lowbit_lab.evaluate.commands import EVALUATE
from lowbit_lab.evaluate.questions import Question, read_questions
from lowbit_lab.evaluate.settings import FILE_TASKS
from lowbit_lab.evaluate.tasks import (
    Choice,
    LocalTask,
    Metric,
    _choice,
    differences,
    kept,
    log_likelihoods,
    shares_contexts,
)
from lowbit_run.config import ConfigError
from lowbit_run.report import run
from lowbit_run.train.pretrained import ByteTokenizer
from tests.command_line import invoke
from tests.lowbit_lab.evaluate.models import ARC, BOOLQ, HELLASWAG, PIQA, RECORDS, WINOGRANDE, Records
from tests.lowbit_lab.evaluate.test_run import evaluation_config


def write(folder: Path, name: str, records: Records, suffix: str = ".jsonl") -> Path:
    path = folder / f"{name}{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the extra lowbit[datasets]")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("\n".join(map(json.dumps, records)) + "\n", "utf-8")
    return path


@pytest.mark.parametrize("name", FILE_TASKS)
def test_formats_of_hub_and_publisher_are_the_same_questions(name: str, tmp_path: Path):
    hub, published = RECORDS[name]
    lines = read_questions(name, str(write(tmp_path, "hub", hub)))
    assert read_questions(name, str(write(tmp_path, "hub", hub, ".parquet"))) == lines
    assert read_questions(name, str(write(tmp_path, "own", published))) == lines
    assert read_questions(name, str(tmp_path / "own.jsonl"), 1) == lines[:1]
    assert len(lines) == len(hub)
    (tmp_path / "own.jsonl").write_bytes(codecs.BOM_UTF8 + (tmp_path / "own.jsonl").read_bytes())
    assert read_questions(name, str(tmp_path / "own.jsonl")) == lines


def test_prompts_are_those_of_lm_eval_word_for_word(tmp_path: Path):
    first = {name: read_questions(name, str(write(tmp_path, name, RECORDS[name][0])))[0] for name in FILE_TASKS}
    assert first["arc_easy"].contexts[0] == "Question: Which of these falls when a cat pushes it off a table?\nAnswer:"
    assert first["arc_easy"].endings == (" a cup", " the moon", " a shadow")
    assert first["boolq"].contexts[1].endswith("than water.\nQuestion: is ice made of water?\nAnswer:")
    assert (first["boolq"].endings, first["boolq"].answer) == ((" no", " yes"), 1)
    assert first["hellaswag"].contexts[0] == "Feeding a dog: A man opens a tin. The dog"
    assert first["hellaswag"].endings[2:] == ("  reads the tin.", "  is a tin.")
    assert first["piqa"].contexts[0] == "Question: How do I dry a cup?\nAnswer:"
    assert (first["piqa"].endings, first["piqa"].answer) == ((" Use a towel.", " Fill it with water. "), 0)
    assert first["winogrande"].contexts[1] == "The cup did not fit into the box because the box"
    assert first["winogrande"].endings == (" was too small.",) * 2
    washing = read_questions("hellaswag", str(tmp_path / "hellaswag.jsonl"))[1]
    assert washing.contexts[0] == "Personal Care: How to wash your hands. Use water. Turn the tap."
    # Brackets that nothing closes stay, and take no time.
    path = write(tmp_path, "open", changed(HELLASWAG[0], activity_label="[a] b", ctx_a="[" * 10**6, ctx_b=""))
    assert read_questions("hellaswag", str(path))[0].contexts[0] == f" b: {'[' * 10**6}"


class Uniform:
    """A model to which all bytes are as likely: a choice's log-likelihood is that of its bytes."""

    def __init__(self) -> None:
        self.read: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        self.read.append(tokens)
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, 256))

    __call__ = forward


def local_tasks(folder: Path, length: int = 512) -> list[LocalTask]:
    questions = {name: read_questions(name, str(write(folder, name, RECORDS[name][0]))) for name in FILE_TASKS}
    tokenizer = ByteTokenizer().hugging_face()
    return [LocalTask.encode(name, listed, tokenizer, length) for name, listed in questions.items()]


def questions_of(tasks: list[LocalTask]) -> list[Any]:
    return [choices for task in tasks for choices in task.choices]


def test_scores_by_hand(tmp_path: Path):
    """The shortest choice is the likeliest; per character it is the longest of ASCII.

    For the space in front is predicted and not counted: (bytes + 1) / characters is least there.
    """
    model, tasks = Uniform(), local_tasks(tmp_path)
    done: list[int] = []
    found = log_likelihoods(model, questions_of(tasks), tokens=512, share=False, progress=done.append)
    scores = {name: metric for task in tasks for name, metric in task.metrics(task.values(found)).items()}
    assert {name: metric.items for name, metric in scores.items()} == {
        "arc_challenge acc": (1, 0),  # a cup; sand
        "arc_challenge acc_norm": (0, 0),  # a shadow; music, the first of four
        "arc_easy acc": (1, 0, 1),  # and ice
        "arc_easy acc_norm": (0, 0, 0),  # and ice cold milk
        "boolq acc": (0, 1),  # no
        "hellaswag acc": (0, 0),  # is a tin; Sing
        "hellaswag acc_norm": (1, 1),  # eats what; Take, as long as Leave in characters, but not in bytes
        "piqa acc": (1, 0),  # the shortest
        "piqa acc_norm": (0, 1),  # the longest
        "winogrande acc": (0, 0),  # the first of two alike
    }
    assert scores["arc_easy acc"].value == pytest.approx(2 / 3)
    assert scores["arc_easy acc"].error == pytest.approx(1 / 3)  # deviations 1/3, 1/3, -2/3, over n - 1, over n
    assert [task.chance for task in tasks[:3]] == pytest.approx([4 / 15, 47 / 180, 1 / 2])  # 3, 5, 4; 3, 5; 2 choices
    choices = sum(map(len, questions_of(tasks)))
    assert done[-1] == choices
    assert sum(map(len, model.read)) == choices
    assert all(batch.numel() <= 512 for batch in model.read)
    assert len(model.read) < choices
    model.read.clear()
    one_token = [Choice(inputs=(1, 2, 3), targets=(token,)) for token in (4, 5)]
    log_likelihoods(model, [one_token], tokens=512, share=False)
    assert [batch.tolist() for batch in model.read] == [[[1, 2, 3]]], "endings of one token: the context is read once"


def test_what_a_tokenizer_puts_behind_a_text_is_not_scored():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "?": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    choice = _choice(tokenizer, "a b", " c a", 512, "here")
    assert (choice.inputs, choice.targets) == ((0, 2, 3, 4), (4, 2))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("length", [40, 512])
def test_log_likelihoods_do_not_depend_on_how_choices_are_read(
    folder: Path, tmp_path: Path, share: bool, length: int, monkeypatch: pytest.MonkeyPatch
):
    """As each choice by itself, whatever shares a batch or a context, also if texts lose their beginning."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tasks = local_tasks(tmp_path, length)
    expected: dict[Any, float] = {}
    for task in tasks:
        for question, encoded in zip(task.questions, task.choices, strict=True):
            for context, ending, choice in zip(question.contexts, question.endings, encoded, strict=True):
                whole = list((context + ending).encode())
                tokens = torch.tensor(whole)[-length - 1 :]
                assert choice.cut == (len(whole) > length + 1)
                size = len((context.rstrip() + "|" + ending).encode()) - len((context.rstrip() + "|").encode())
                size += len(context) - len(context.rstrip())
                with torch.no_grad():
                    logits = model(tokens[None, :-1]).logits[0, -size:]
                expected[choice] = -float(F.cross_entropy(logits, tokens[-size:], reduction="sum"))
    assert [task.cut for task in tasks] == [
        sum(any(choice.cut for choice in choices) for choices in task.choices) for task in tasks
    ]
    assert any(task.cut for task in tasks) == (length == 40)
    seen: list[Any] = []
    forward = model.forward

    @functools.wraps(forward)
    def watched(tokens: torch.Tensor, **options: Any) -> Any:
        seen.append((tokens.shape, options["logits_to_keep"]))
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", watched)
    found = log_likelihoods(model, questions_of(tasks), tokens=600, share=share)
    assert found.keys() == expected.keys()
    assert all(found[choice] == pytest.approx(expected[choice], rel=1e-5) for choice in found)
    assert sum(shape.numel() for shape, _ in seen) <= (1.15 if share else 1.25) * sum(
        sum(len(inputs) for inputs in {choice.inputs for choice in choices}) for choices in questions_of(tasks)
    )
    if share and length == 512:
        assert sum(shape.numel() for shape, _ in seen) < 0.75 * sum(len(choice.inputs) for choice in expected)
        assert sum(len(kept) * shape[0] for shape, kept in seen) < 0.7 * sum(shape.numel() for shape, _ in seen)


def test_contexts_are_shared_only_by_models_that_compute_the_same(folder: Path):
    from transformers import (
        AutoModelForCausalLM,
        BloomConfig,
        BloomForCausalLM,
        FalconConfig,
        FalconForCausalLM,
        Lfm2Config,
        Lfm2ForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    assert shares_contexts(AutoModelForCausalLM.from_pretrained(folder).eval(), 512)
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }  # fmt: skip
    windowed = MistralForCausalLM(MistralConfig(**sizes, sliding_window=64)).eval()
    assert [shares_contexts(windowed, length) for length in (64, 65)] == [True, False]
    assert not shares_contexts(BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=4)), 64)
    hybrid = Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
    assert not shares_contexts(Lfm2ForCausalLM(hybrid).eval(), 64)
    falcon = FalconConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    assert not shares_contexts(FalconForCausalLM(falcon).eval(), 64)


def test_differences_by_hand():
    exact, other = [[math.log(3), 0.0], [0.0, 1.0]], [[0.0, math.log(3)], [0.5, 1.5]]
    found = differences(exact, other)
    assert found["same_answers"] == Metric.mean([0.0, 1.0])
    # softmax 3/4, 1/4 against 1/4, 3/4: (3/4 - 1/4) log 3; the same for both sums moved by a half
    assert found["divergence"].items == pytest.approx((math.log(3) / 2, 0), abs=1e-15)
    assert found["change"].items == pytest.approx((math.log(3), 0.5))
    assert found["change"].error == pytest.approx((math.log(3) - 0.5) / 2)
    question = Question.of("a", ["b", "c"], 0)
    task = LocalTask(name="arc_easy", questions=[question], choices=[[Choice(inputs=(1,), targets=(2,))] * 2])
    assert {name: metric.value for name, metric in task.metrics([[math.nan, math.nan]]).items()} == {
        "arc_easy acc": 0.0, "arc_easy acc_norm": 0.0,
    }  # fmt: skip
    broken = differences(exact, [[math.nan, math.nan], [0.0, 1.0]])
    assert math.isnan(broken["divergence"].value)
    assert broken["same_answers"].value == 0.5


def test_shares_kept_have_errors_of_pairs():
    exact, other = Metric.mean([1, 1, 1, 0]), Metric.mean([1, 1, 0, 0])
    share = kept({"a acc": other}, {"a acc": exact})
    # a - 2/3 b is 1/3, 1/3, -2/3, 0, of mean 0: their variance is 6/9 over 3
    assert share == pytest.approx((2 / 3, math.sqrt(6 / 27 / 4) / 0.75))
    assert kept({"a acc": exact}, {"a acc": exact}) == (1, 0)
    both = kept({"a acc": other, "b acc": exact}, {"a acc": exact, "b acc": exact})
    assert both is not None
    assert both[0] == pytest.approx(1.25 / 1.5)
    assert kept({"a acc": other}, {"a acc": Metric.mean([0, 0])}) is None
    unpaired = kept({"a f1": Metric(value=0.5)}, {"a f1": Metric(value=1.0)})
    assert unpaired == (0.5, None)
    assert Metric.mean([1.0]) == Metric(value=1.0, error=None, items=(1.0,))


def test_the_command_scores_files_with_and_without_low_bit_sums(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tasks = [f"{name}={write(tmp_path, name, RECORDS[name][0])}" for name in FILE_TASKS]
    common = f"--text {folder / 'text.txt'} --length 32 --sequences 2 --tp 2 --format int8 --limit 2 --small 0"
    output = tmp_path / "rows.json"
    files = f"--json {output} --png {tmp_path}/rows.png"
    done = invoke("evaluate", str(folder), *common.split(), "--task", ",".join(tasks), *files.split())
    assert done.exit_code == 0, done.output
    assert (tmp_path / "rows.png").stat().st_size > 5000
    exact, int8 = json.loads(output.read_text())["rows"]
    assert {name.partition(" ")[0] for name in exact["scores"]} == set(FILE_TASKS)
    assert len(exact["scores"]) == 10
    assert exact["scores_kept"] == 1
    assert exact["scores_kept_error"] == 0
    for name, value in int8["scores"].items():
        assert value in (0, 0.5, 1)
        assert int8["scores_error"][name] == (0.5 if value == 0.5 else 0)
        if exact["scores"][name]:
            assert int8["score_kept"][name] == value / exact["scores"][name]
        else:
            assert name not in int8["score_kept"]
        task = name.partition(" ")[0]
        differences = {key: int8[key][task] for key in ("same_answers", "divergence", "change")}
        for i, (one, two) in enumerate(zip(exact["questions"][task], int8["questions"][task], strict=True)):
            assert (one["same_answers"], one["divergence"], one["change"]) == (1, 0, 0)
            assert one["answer"] == two["answer"] < len(two["log_likelihoods"])
            pairs = zip(one["log_likelihoods"], two["log_likelihoods"], strict=True)
            assert two["change"] == pytest.approx(sum(abs(a - b) for a, b in pairs) / len(two["log_likelihoods"]))
            assert two["change"] > 0, i
        asked = int8["questions"][task]
        for key, value in differences.items():
            assert value == pytest.approx(sum(each[key] for each in asked) / len(asked))
            assert int8[f"{key}_error"][task] >= 0
        assert 0 <= differences["divergence"] < 0.1
    assert int8["chance"]["hellaswag"] == 0.25
    assert int8["cut"] == dict.fromkeys(FILE_TASKS, 2)
    line = "task boolq: 2 of 2 questions have more than 32 tokens (length): the beginning of their text is not read"
    assert line in caplog.messages
    assert "Choices compared with those of bf16" in done.stdout
    assert "chance" in done.stdout
    assert "Zero-shot scores, ± standard errors" in done.stdout
    assert "arc_challenge" in done.stdout
    assert "mean" in done.stdout


def changed(record: dict[str, Any], **fields: Any) -> Records:
    """The record with other fields; without those that are None."""
    return [{key: value for key, value in {**record, **fields}.items() if value is not None}]


WRONG: list[tuple[str, Records, str]] = [
    ("arc_easy", [], "has no questions; allowed: at least one"),
    ("arc_easy", changed(ARC[0], answerKey=None), "line 1 is not a valid question of arc_easy (no 'answerKey');"),
    ("arc_easy", changed(ARC[0], answerKey="E"), "line 1 is not a valid question of arc_easy ('E' is not in list)"),
    ("arc_easy", changed(ARC[0], answerKey=1), "(1 is not in list)"),
    ("arc_easy", changed(ARC[0], choices=["a"]), "line 1 is not a valid question"),
    ("arc_challenge", changed(ARC[0], choices={"text": ["a", "b"], "label": ["A", "B"]}), "instead of 3 to 5 texts"),
    ("arc_challenge", changed(ARC[0], choices={"text": ["a"] * 3, "label": ["A"]}), "['A'] instead of 3 texts"),
    ("arc_easy", changed(ARC[0], question={"stem": "s", "choices": [1]}), "line 1 is not a valid question"),
    ("arc_easy", changed(ARC[0], question=3), "(3 instead of a text that is not empty)"),
    ("hellaswag", changed(HELLASWAG[0], endings=["a"] * 3), "instead of 4 texts"),
    ("hellaswag", changed(HELLASWAG[0], endings=["a", "b", "", "d"]), "('' instead of a text that is not empty)"),
    ("hellaswag", [{**HELLASWAG[0], "ctx_a": None}], "line 1 is not a valid question"),
    ("hellaswag", changed(HELLASWAG[0], label=True), "('True' is not in list)"),
    ("hellaswag", changed(HELLASWAG[0], label=""), "with the answer, which test splits lack"),
    ("winogrande", changed(WINOGRANDE[0], sentence="No gap."), "the sentence has no _"),
    ("winogrande", changed(WINOGRANDE[0], answer=2), "(2 is not in list)"),
    ("winogrande", changed(WINOGRANDE[0], option2=" "), "(' ' instead of a text that is not empty)"),
    ("piqa", changed(PIQA[0], label=-1), "('-1' is not in list); allowed: the form of its publisher or the"),
    ("piqa", WINOGRANDE, "line 1 is not a valid question of piqa (no 'sol1')"),
    ("boolq", changed(BOOLQ[0], label=-1), "(-1 is not in list)"),
    ("boolq", [{**BOOLQ[0], "passage": None}], "(None instead of a text that is not empty)"),
    (
        "boolq",
        changed(BOOLQ[0], passage="\ud800"),
        "line 1: passage has half an emoji or other character, '\\ud800'; all",
    ),
    ("boolq", [*BOOLQ, {"passage": "p"}], "line 3 is not a valid question of boolq (no 'question')"),
]


@pytest.mark.parametrize(("name", "records", "line"), WRONG)
def test_a_wrong_question_is_named_by_its_line(name: str, records: Records, line: str, tmp_path: Path):
    path = write(tmp_path, "wrong", records)
    with pytest.raises(ConfigError) as caught:
        read_questions(name, str(path))
    assert f"task {name}={path}" in str(caught.value)
    assert line in str(caught.value)


def test_a_wrong_row_of_parquet_is_named(tmp_path: Path):
    path = write(tmp_path, "wrong", changed(BOOLQ[0], label=7), ".parquet")
    with pytest.raises(ConfigError, match=r"row 1 is not a valid question of boolq \(7 is not in list\)"):
        read_questions("boolq", str(path))
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"wrong.parquet is not parquet \(.*\); allowed: a parquet file"):
        read_questions("boolq", str(path))


def test_a_small_file_that_expands_is_read_no_further_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Equal texts take no room in parquet."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the extra lowbit[datasets]")
    from pyarrow import parquet

    def column(text: str, rows: int) -> Any:
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))

    def expanding(rows: int) -> str:
        texts = {"passage": column("warm " * 1000, rows), "question": column("is it", rows)}
        table = pyarrow.table(texts | {"label": pyarrow.array([0] * rows, pyarrow.int64())})
        parquet.write_table(table, tmp_path / "boolq.parquet", store_schema=False, row_group_size=rows)
        return str(tmp_path / "boolq.parquet")

    path, pool = expanding(100_000), pyarrow.default_memory_pool()
    assert Path(path).stat().st_size < 10_000
    before = pool.max_memory()
    assert len(read_questions("boolq", path, 3)) == 3
    assert pool.max_memory() < before + (32 << 20), "500 MB would be all texts"
    monkeypatch.setattr(questions, "_MOST_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="boolq.parquet has more than 1048576 bytes of questions; allowed"):
        read_questions("boolq", path)
    monkeypatch.setattr(questions, "_MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"has \d+ bytes in a group of rows; allowed: at most 1000"):
        read_questions("boolq", path, 3)
    (tmp_path / "boolq.jsonl").write_text("\n".join(map(json.dumps, BOOLQ * 4)))
    assert len(read_questions("boolq", str(tmp_path / "boolq.jsonl"), 2)) == 2
    with pytest.raises(ConfigError, match=r"boolq.jsonl has more than 1000 bytes of questions; allowed: up to that, o"):
        read_questions("boolq", str(tmp_path / "boolq.jsonl"))
    (tmp_path / "boolq.jsonl").write_text("{" + " " * 1000)
    with pytest.raises(ConfigError, match="has more than 1000 bytes"):  # before the first line is read
        read_questions("boolq", str(tmp_path / "boolq.jsonl"))
    (tmp_path / "boolq.jsonl").write_text(json.dumps(BOOLQ[0]) + '\n{"passage": ')
    with pytest.raises(ConfigError, match=r"boolq.jsonl line 2 is not JSON \(.*\); allowed: an object on each line"):
        read_questions("boolq", str(tmp_path / "boolq.jsonl"))
    (tmp_path / "boolq.jsonl").write_bytes(json.dumps(BOOLQ[0]).encode() + b" " * (1 << 20))
    with pytest.raises(ConfigError, match="line 1 has more than 1048576 bytes; allowed: a question on each line"):
        read_questions("boolq", str(tmp_path / "boolq.jsonl"), 1)


def test_files_are_named_by_the_settings_and_compared_by_their_contents(folder: Path, tmp_path: Path):
    from lowbit_lab.evaluate.run import Evaluation

    def facts(path: Path) -> dict[str, str]:
        return Evaluation(evaluation_config(folder, tasks=(f"boolq={path}",)))._facts()

    here, there = write(tmp_path, "here", BOOLQ), write(tmp_path, "there", BOOLQ)
    assert facts(here) == facts(there)
    assert facts(here) != facts(write(tmp_path, "other", BOOLQ[:1]))
    settings = EvaluationConfig(model="m", tasks=("arc_easy=a=b.jsonl", "lambada"))
    assert settings.task_files == {"arc_easy": "a=b.jsonl"}
    assert settings.harness_tasks == ("lambada",)


YAML = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
}


def test_scores_are_those_of_lm_eval(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its own tasks read the same files: the same scores and standard errors."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: the extra lowbit[tasks]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: the extra lowbit[tasks]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = {name: write(tmp_path, name, RECORDS[name][0]) for name in FILE_TASKS}
    for name, path in files.items():
        theirs = Path(lm_eval.__file__).parent / "tasks" / YAML[name]
        (tmp_path / f"{name}.yaml").write_text(
            f"include: {theirs}\ntask: their_{name}\ndataset_path: json\ndataset_name: null\ndataset_kwargs:\n"
            f"  data_files: {{validation: {path}}}\ntraining_split: null\nvalidation_split: validation\n"
            "test_split: null\n"
        )
    tasks = (*(f"{name}={path}" for name, path in files.items()), *(f"their_{name}" for name in files))
    settings = evaluation_config(
        folder, length=64, tps=(2,), formats=("int8",), tasks=tasks, task_folder=str(tmp_path), dtype="float32"
    )  # fmt: skip
    with pytest.raises(ConfigError, match="task is 'nonsense'; allowed"):
        run(EVALUATE, dataclasses.replace(settings, tasks=("nonsense",)))
    for row in run(EVALUATE, settings).rows:
        for field in ("scores", "scores_error", "score_kept", "score_kept_error"):
            values = row[field]
            theirs = {name: value for name, value in values.items() if name.startswith("their_")}
            ours = {f"their_{name}": value for name, value in values.items() if name not in theirs}
            assert ours == pytest.approx(theirs), field
