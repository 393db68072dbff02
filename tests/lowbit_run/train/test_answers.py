import codecs
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lowbit_run.config import ConfigError
from lowbit_run.train import from_mapping, train
from lowbit_run.train.answers import (
    BYTE_END,
    IGNORED,
    TextPart,
    TextSample,
    encode,
    fit,
    fit_held_out,
    pack,
    read_samples,
)  # fmt: skip
from lowbit_run.train.data import Data, Order, load_data
from lowbit_run.train.model import build_model
from lowbit_run.train.prepare import prepare
from lowbit_run.train.pretrained import ByteTokenizer, FolderTokenizer
from tests.lowbit_run.train.runs import ONE, RESUME, again, answering, losses, tiny
from tests.processes import Ranks
from tests.refused import refused

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\x03\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def chat_tokenizer(folder: Path, template: str = CHATML) -> PreTrainedTokenizerBase:
    """Bytes, whose end-of-text token is byte 3, with a chat template."""
    tokenizer = ByteTokenizer().hugging_face()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(3)  # pyright: ignore
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    inner = FolderTokenizer(str(folder)).hugging_face()
    assert inner.eos_token_id == 3
    return inner


def talk(*said: tuple[str, Any]) -> dict[str, Any]:
    """A sample of messages, by role."""
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def load(tmp_path: Path, lines: list[Any], **data: Any) -> Data:
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    values = {"format": "jsonl", "text": str(path), "held_out_share": 0.0, "sequence": 16, "batch": 1, **data}
    return load_data(from_mapping({"data": values, "pipeline": {"microbatches": 1}}).data)


def test_a_model_learns_the_answer_and_its_end_and_nothing_else(tmp_path: Path):
    data = load(tmp_path, [{"prompt": "ab", "completion": "cd"}], packing=False)
    inputs, targets = data.train.batch(torch.tensor([0]))
    assert inputs[0, :4].tolist() == list(b"abcd")
    assert targets[0].tolist() == [IGNORED, *b"cd", BYTE_END, *[IGNORED] * 12]
    assert data.train.positions(torch.tensor([0])) is None
    assert data.train.learned(torch.tensor([0])) == 3


def test_a_window_holds_several_samples_whose_places_count_anew(tmp_path: Path):
    data = load(tmp_path, [{"prompt": "ab", "answer": "cd"}, {"prompt": "e", "answer": "f"}])
    inputs, targets = data.train.batch(torch.tensor([0]))
    positions = data.train.positions(torch.tensor([0]))
    assert positions is not None
    assert inputs[0, :6].tolist() == list(b"abcdef")
    assert targets[0, :6].tolist() == [IGNORED, *b"cd", BYTE_END, ord("f"), BYTE_END]
    assert positions[0].tolist() == [0, 1, 2, 3, 0, 1, *range(10)]
    assert "2 samples in 1 windows of 16 tokens, 6 tokens a window, 5 of them learned" in data.described()


@pytest.mark.parametrize("size", [7, 16, 40])
def test_packing_keeps_every_sample_once_and_no_window_overflows(size: int):
    generator = random.Random(size)
    lengths = [generator.randint(1, size) for _ in range(300)]
    windows = pack(lengths, size)
    assert sorted(i for window in windows for i in window) == list(range(300))
    assert max(sum(lengths[i] for i in window) for window in windows) <= size
    assert len(windows) <= 1.25 * math.ceil(sum(lengths) / size)
    assert [window[0] for window in windows] == sorted(window[0] for window in windows)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_samples_in_one_window_do_not_see_each_other(tmp_path: Path, family: str):
    config = tiny(tmp_path, model={"family": family}).model
    model = build_model(config, vocab=256, sequence=16, seed=0).eval()
    lines = [{"prompt": "abc", "answer": "de"}, {"prompt": "f", "answer": "gh"}, {"prompt": "ij", "answer": "k"}]
    packed = load(tmp_path, lines).train
    alone = load(tmp_path, lines, packing=False).train
    with torch.no_grad():
        inputs, targets = packed.batch(torch.arange(len(packed)))
        positions = packed.positions(torch.arange(len(packed)))
        logits = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
        together = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        inputs, targets = alone.batch(torch.arange(3))
        each = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert len(packed) == 1
    assert float(together) == pytest.approx(float(each), rel=1e-6)


def test_a_conversation_is_learned_where_the_assistant_speaks(tmp_path: Path):
    chat_tokenizer(tmp_path / "chat")
    line = talk(("system", "s"), ("user", "u"), ("assistant", "A"), ("user", "v"), ("assistant", "B"))
    data = load(tmp_path, [line], tokenizer=str(tmp_path / "chat"), sequence=80)
    inputs, targets = data.train.batch(torch.tensor([0]))
    rendered = b"<system>s\x03\n<user>u\x03\n<assistant>A\x03\n<user>v\x03\n<assistant>B\x03"
    assert bytes(inputs[0, : len(rendered) - 1].tolist()) == rendered[:-1]
    assert [i for i in targets[0].tolist() if i != IGNORED] == list(b"A\x03B\x03"), "each with its end"
    assert data.notes == ()


def test_a_template_that_rewrites_earlier_answers_teaches_the_last(tmp_path: Path):
    """As Qwen 3's does, which drops what the assistant thought."""
    rewriting = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'][-1:])")
    chat_tokenizer(tmp_path / "chat", rewriting)
    line = talk(("user", "u"), ("assistant", "xA"), ("user", "v"), ("assistant", "yB"))
    data = load(tmp_path, [line], tokenizer=str(tmp_path / "chat"), sequence=80)
    _, targets = data.train.batch(torch.tensor([0]))
    assert [i for i in targets[0].tolist() if i != IGNORED] == list(b"yB\x03")
    assert data.notes == (
        "1 of 1 conversations are learned for their last answer only: "
        "the chat template writes earlier answers differently",
    )


def test_a_folder_tokenizer_begins_and_ends_a_prompt_with_its_answer(tmp_path: Path):
    chat_tokenizer(tmp_path / "chat")
    sample = TextSample((TextPart("ab", False), TextPart("c", True)))
    [encoded] = encode([sample], FolderTokenizer(str(tmp_path / "chat")))
    assert encoded.ids.tolist() == [*b"abc", 3]
    assert encoded.learned.tolist() == [False, False, True, True]
    ByteTokenizer().hugging_face().save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match="data.tokenizer has no end-of-text token, which ends an answer; allowed"):
        load(tmp_path, [{"prompt": "a", "answer": "b"}], tokenizer=str(tmp_path / "endless"))


def test_what_is_too_long_is_cut_and_said_with_numbers(tmp_path: Path):
    lines = [{"prompt": "a" * p, "answer": "b" * n} for p, n in [(5, 5), (10, 10), (20, 1)]]
    data = load(tmp_path, lines, packing=False)
    assert data.notes == (
        "2 of 3 samples are longer than data.sequence (16) and lose their ends: 9 of 54 tokens",
        "1 of 3 samples have no answer left and are not used",
    )
    assert data.train.learned(torch.tensor([1])) == 7
    sample = TextSample((TextPart("a" * 20, False), TextPart("b", True)))
    held_out, note = fit_held_out(encode([sample], ByteTokenizer()), 16)
    assert (held_out, note) == ([], ["1 of 1 held-out samples are longer than data.sequence (16) and are not used"])
    assert fit([], 16) == ([], [])
    few = load(tmp_path, lines[:1], max_bytes=60, held_out=(str(tmp_path / "samples.jsonl"),))
    assert (len(few.train), len(few.held_out)) == (1, 1)
    assert "trained on as well" in few.notes[0]
    short = load(tmp_path, lines, max_bytes=80)
    assert short.notes[0].startswith("samples of 99 bytes were not read: data.max_bytes is 80")


SAID = ("user", "u")
STRICT = (
    "{% for m in messages %}{% if 'judge' in m['role'] %}{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{% if m['role'] != 'tool' %}{{ m['role'] + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


def test_a_line_that_is_no_sample_is_named(tmp_path: Path):
    tokenizer, path = chat_tokenizer(tmp_path / "chat", STRICT), tmp_path / "samples.jsonl"

    def read(line: bytes, tokenizer: PreTrainedTokenizerBase | None = tokenizer) -> Any:
        path.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line)
        return read_samples([path], limit=10**6, tokenizer=tokenizer)

    samples: list[tuple[Any, str]] = [
        ([1], r"is \[1\]; allowed: an object with prompt and completion"),
        ({"prompt": "a"}, "has the fields prompt; allowed: an object with prompt and completion"),
        ({"\ud83d\x1b": 1}, r"has the fields .ud83d.x1b; allowed: an object"),
        ({"prompt": "a", "answer": "b", "completion": "c"}, "has the fields prompt, answer, completion; "),
        ({"prompt": "a", "answer": ""}, ".* answer is ''; allowed: text that is not empty"),
        ({"prompt": "a", "completion": 3}, ".* completion is 3; allowed: text that is not empty"),
        ({"prompt": None, "answer": "b"}, ".* prompt is None; allowed: text that is not empty"),
        (talk(), r".* messages is \[\]; allowed: a list of messages"),
        ({"messages": [{"role": "user"}]}, ".* message 1 is {'role': 'user'}; allowed: an object with role and"),
        (talk(SAID), ".* the last of 1 messages is of role 'user'; all"),
        (talk(SAID, ("assistant", " ")), ".* message 2, of the assistant, is empty; allowed: text that is not empty"),
        (talk(("tool", "T"), ("assistant", "A")), ".* leaves out message 1, of role 'tool'; allowed: roles that the"),
        (
            {"prompt": "a", "answer": "b\ud83d"},
            r".* answer has half an emoji or other character, '.ud83d'; allowed: wh",
        ),
        (talk(("user\udc00", "u"), ("assistant", "A")), ".* message 1 has half an emoji"),
        (talk(SAID, ("assistant", "A")) | {"tools": [{"name": "\ud83d"}]}, ".* tools has half an emoji"),
        (talk(("judge", "T"), ("assistant", "A")), ".* refuses the messages: unknown role judge"),
        (talk(SAID, ("assistant", "A")) | {"completion": "B"}, "has the fields messages, completion; allowed: "),
        (
            {"prompt": "u", "completion": "A", "weight": 0},
            "has the weight 0; allowed: 1, or none",
        ),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "A", "weight": 0}]},
            ".* message 2, of the assistant, has the weight 0; allowed: 1, or none",
        ),
        (talk(("judge\x1b", "T"), ("assistant", "A")), r".* refuses the messages: unknown role judge.x1b"),
    ]
    where = f"^{path} line 2:? ?"
    texts = refused(
        *((partial(read, json.dumps(sample).encode()), ConfigError, where + text) for sample, text in samples),
        (partial(read, b"{"), ConfigError, f"{where}is not JSON .Expecting"),
        (partial(read, b'{"prompt": "\xff"}'), ConfigError, rf"{where}is not UTF-8 \(byte 12\); allowed: an object"),
        (
            partial(read, json.dumps(talk(SAID, ("assistant", "A"))).encode(), None), ConfigError,
            f"{where}has messages, and the tokenizer has no chat template; allowed",
        ),
    )  # fmt: skip
    assert not any("\n" in text for text in texts)


WRITTEN = {
    "tools": "{{ tools | tojson if tools }}",
    "tool_calls": "{% for m in messages %}{{ m['tool_calls'] | tojson if m['tool_calls'] }}{% endfor %}",
}


@pytest.mark.parametrize("left_out", WRITTEN)
def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path, left_out: str):
    """As those of models that use none, which would learn to call nothing and to know the results."""
    calling: Any = talk(SAID, ("assistant", "A"), ("tool", "1"), ("assistant", "B"))
    calling["tools"] = [{"type": "function", "function": {"name": "plus"}}]
    calling["messages"][1]["tool_calls"] = [{"name": "minus", "arguments": {"a": 1}}]
    nothing: Any = talk(SAID, ("assistant", "A")) | {"tools": []}
    nothing["messages"][1]["tool_calls"] = None
    path = tmp_path / "samples.jsonl"

    def read(template: str, line: Any) -> int:
        path.write_text(json.dumps(line))
        return len(read_samples([path], limit=10**6, tokenizer=chat_tokenizer(tmp_path / "chat", template))[0])

    assert read("".join(WRITTEN.values()) + CHATML, calling) == read(CHATML, nothing) == 1
    others = "".join(text for key, text in WRITTEN.items() if key != left_out)
    name = {"tools": "tools: 'plus'", "tool_calls": "tool_calls of message 2: 'minus'"}[left_out]
    text = f"line 1: the chat template leaves out {name}; allowed: a tokenizer whose template writes them$"
    refused((lambda: read(others + CHATML, calling), ConfigError, text))


def test_a_byte_order_mark_is_skipped(tmp_path: Path):
    path, line = tmp_path / "samples.jsonl", b'{"prompt": "a", "answer": "b"}\r\n'
    path.write_bytes(2 * (codecs.BOM_UTF8 + line))
    samples, left_out = read_samples([path], limit=10**6, tokenizer=None)
    assert ([sample.parts[0].text for sample in samples], left_out) == (["a", "a"], 0)


def test_settings_that_contradict_each_other_and_files_taken_as_text(tmp_path: Path):
    sample, held_out = {"prompt": "a" * 9, "answer": "b"}, (str(tmp_path / "samples.jsonl"),)
    refused(
        (lambda: from_mapping({"data": {"format": "jsonl"}}), ConfigError, "jsonl and data.text is empty; allowed: f"),
        (lambda: load(tmp_path, [sample], batch=2), ConfigError, "has 1 samples to train on, 1 windows of 16 tokens"),
        (lambda: load(tmp_path, [sample], sequence=9, held_out=held_out), ConfigError, "data.held_out has no sample"),
    )
    raw = load(tmp_path, [{"prompt": "a" * 90, "answer": "b"}], format="text")
    assert "data.format is text" in raw.notes[0]
    first, second = (load(tmp_path, [{"prompt": "a", "answer": x}]) for x in "bc")
    assert first.fingerprint() != second.fingerprint()


def test_every_token_counts_the_same_in_any_micro_batch_and_replica(ranks: Ranks, tmp_path: Path):
    """Windows hold other numbers of answers' tokens; a mean of means would weigh them differently."""
    config = answering(tmp_path, data={"packing": False})
    data = load_data(config.data)
    model = build_model(config.model, vocab=256, sequence=24, seed=0)
    ids = Order(samples=len(data.train), batch=8, seed=0).ids(0)
    inputs, targets = data.train.batch(ids)
    counts = {int((row != IGNORED).sum()) for row in targets}
    assert len(counts) > 2
    with torch.no_grad():
        whole = float(cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten()))
    alone = losses(again(config, pipeline=ONE))
    assert alone[0] == pytest.approx(whole, rel=1e-6)
    assert losses(again(config, pipeline=ONE | {"microbatches": 1})) == pytest.approx(alone, rel=1e-5)
    assert ranks.run(losses, config) == [alone, alone]
    two = again(config, pipeline=ONE | {"data_parallel": 2, "microbatches": 2}, gradients={"all_reduce": "fp32"})
    assert ranks.run(losses, two)[0] == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("family", "schedule", "per_rank"), [("llama", "1F1B", 1), ("gpt2", "ZBVZeroBubble", 2)])
def test_packed_samples_train_alike_on_any_layout(
    ranks: Ranks, tmp_path: Path, family: str, schedule: str, per_rank: int
):
    pipeline = {"schedule": schedule, "stages_per_rank": per_rank, "microbatches": 4}
    config = answering(tmp_path, model={"family": family}, pipeline=pipeline, data={"batch": 4})
    alone = losses(again(config, pipeline=ONE))
    assert ranks.run(losses, config) == [pytest.approx(alone, rel=1e-6)] * 2


@pytest.mark.slow
def test_exact_match_is_what_greedy_decoding_writes(ranks: Ranks, tmp_path: Path):
    """The score of one pass over the expected answers equals that of answers which Transformers generates."""
    config = answering(
        tmp_path, pipeline={"ranks": 2}, optimizer={"lr": 1e-2, "lr_warmup_steps": 5},
        run={"steps": 150, "save_model": True, "eval_batches": 0}, data={"batch": 8},
    )  # fmt: skip
    lines = [
        json.dumps({"prompt": f"{a}{b}=", "answer": a * (1 + "abcdef".index(b))}) for a in "xyzw" for b in "abcdef"
    ]
    random.Random(1).shuffle(lines)
    Path(config.data.text[0]).write_text("\n".join(lines * 2))
    summary = ranks.run(train, config)[0]
    folder = tmp_path / "run" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = [json.loads(line) for line in (lines * 2)[-int(0.2 * 48) :]]
    right = 0
    for sample in held_out:
        prompt = tokenizer(sample["prompt"], return_tensors="pt")["input_ids"]
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=BYTE_END,
            pad_token_id=BYTE_END,
        )[0, prompt.shape[1] :]  # fmt: skip
        right += tokenizer.decode(written[:-1]) == sample["answer"] and int(written[-1]) == BYTE_END
    assert summary.exact_match == right / len(held_out)
    assert summary.exact_match > 0.1
    assert summary.exact_match_before == 0
    assert summary.exact_match_codecs == summary.exact_match, "FP32 at the boundary"
    assert summary.held_out_loss_before > summary.held_out_loss


def test_a_resume_knows_its_samples(tmp_path: Path):
    config = answering(tmp_path, pipeline=ONE, run={"checkpoint_every": 1, "steps": 2})
    train(config)
    longer = again(config, run=RESUME | {"steps": 3, "allow_change": ["run.steps"]})
    summary = train(longer)
    assert (summary.steps_here, summary.exact_match_before) == (1, 0.0)
    for data, key in [({"packing": False}, "data.packing was True and is False now"), ({"format": "text"}, "data.for")]:
        with pytest.raises(ConfigError, match=key):
            prepare(again(longer, data=data), ranks=1)
