"""Samples are encoded as a whole, by tokenizers that are built as those of each family."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lowbit_run.config import ConfigError
from lowbit_run.train import from_mapping
from lowbit_run.train.answers import BYTE_END, IGNORED, TextPart, TextSample, encode, read_samples
from lowbit_run.train.data import load_data
from lowbit_run.train.pretrained import ByteTokenizer, FolderTokenizer

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
SAID = ("it is blue", "hello, 2004-07-24", "no (yes) is blue", "it", "is a fine blue")
CORPUS = [*SAID, *map(str.title, SAID), "a0123456789bcdefghijklmnopqrstuvwxyz"] * 20
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def bpe(*, normalizer: Any = None, pre: Any = None) -> Fast:
    """As SentencePiece's BPE: a space is a ▁ in front of a word, and unknown characters are bytes."""
    tokenizer = Fast(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[UNKNOWN, BEGIN, END, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre
    return tokenizer


def legacy() -> Fast:
    """Llama 2's: every text between added tokens gets a ▁."""
    return bpe(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def metaspace(scheme: str) -> Fast:
    return bpe(pre=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


def gemma() -> Fast:
    return bpe(normalizer=normalizers.Replace(" ", "▁"), pre=pre_tokenizers.Split(" ", "merged_with_previous"))


def unigram() -> Fast:
    """T5's: white space at the ends and more than one space are dropped, characters are decomposed."""
    tokenizer = Fast(models.Unigram())
    spaces = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), *spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = [UNKNOWN, BEGIN, END]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token=UNKNOWN, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 2)])
    return tokenizer


def byte_level(*, prefix: bool = False, trim: bool = False) -> Fast:
    """GPT-2's; trim: offsets leave out the space in front of a word, as Llama 3's do."""
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [UNKNOWN, BEGIN, END]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim, add_prefix_space=prefix)
    return tokenizer


def word_piece() -> Fast:
    tokenizer = Fast(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[UNKNOWN, BEGIN, END], show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "🙂"], trainer)
    return tokenizer


def begun(tokenizer: Fast, *front: str) -> Fast:
    """Every text begins with these tokens."""
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in front])
    ids = [(token, tokenizer.token_to_id(token)) for token in front]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{' '.join(front)} $A", special_tokens=ids)
    return tokenizer


def roles(tokenizer: Fast, **options: bool) -> Fast:
    """The template's roles are tokens, which take white space along as `options` say: Phi 3's have rstrip."""
    tokenizer.add_special_tokens([AddedToken(f"<|{role}|>", **options) for role in ("user", "assistant")])
    return tokenizer


FAMILIES: dict[str, Callable[[], Fast]] = {
    "llama 2": lambda: begun(legacy(), BEGIN),
    "mistral": lambda: begun(metaspace("first"), BEGIN),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "gemma": lambda: begun(gemma(), BEGIN),
    "phi 3": lambda: begun(roles(legacy(), rstrip=True), BEGIN),
    "lstrip": lambda: roles(metaspace("first"), lstrip=True),
    "glm": lambda: begun(roles(byte_level()), "[gMASK]", "<sop>"),
    "t5": unigram,
    "gpt 2": byte_level,
    "llama 3": lambda: roles(byte_level(trim=True)),
    "roberta": lambda: byte_level(prefix=True, trim=True),
    "prefix": lambda: byte_level(prefix=True),
    "wordpiece": word_piece,
}


def saved(folder: Path, fast: Fast) -> FolderTokenizer:
    names = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return FolderTokenizer(str(folder))


def pair(prompt: str, answer: str) -> TextSample:
    return TextSample((TextPart(prompt, False), TextPart(answer, True)))


def written(tokenizer: Any, ids: Any) -> str:
    """Characters of these tokens without white space."""
    return re.sub(r"▁|Ġ|Ċ|##|\s|<0x0A>", "", "".join(tokenizer.convert_ids_to_tokens(ids))).lower()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_are_those_of_the_whole_text_and_the_answers_are_learned(family: str, tmp_path: Path):
    tokenizer = saved(tmp_path, FAMILIES[family]())
    inner: Any = tokenizer.hugging_face()
    # The tokens of 🙂 end at the same character: none of them is the answer's.
    for prompt in ("It is ", "it is", "a 🙂", "a 🙂 ", "it\n\n", "  it  is  "):
        for answer in ("2004-07-24", " blue (Fine)", "hello", "  no\n"):
            [sample] = encode([pair(prompt, answer)], tokenizer)
            whole = inner(prompt + answer)["input_ids"]
            assert sample.ids.tolist() == [*whole, *[inner.eos_token_id] * (whole[-1] != inner.eos_token_id)]
            learned = written(inner, sample.ids[sample.learned])
            assert learned.endswith((answer + END).replace(" ", "").strip().lower().replace("\n", ""))
            assert len(learned) <= len(answer + END) + 2 * prompt[-1].isalnum(), "a token that both share, at most"
    for turns in range(1, 6):
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": SAID[i // 2] + "🙂 " * (1 - i % 2)}
            for i in range(2 * turns)
        ]
        (tmp_path / "lines").write_text(json.dumps({"messages": messages}))
        [sample] = encode(read_samples([tmp_path / "lines"], limit=10**6, tokenizer=inner)[0], tokenizer)
        assert sample.ids.tolist() == inner.apply_chat_template(messages, return_dict=True)["input_ids"]
        expected = "".join(said + END for said in SAID[:turns]).replace(" ", "")
        assert written(inner, sample.ids[sample.learned]) == expected


def test_a_token_is_of_the_part_in_which_it_ends(tmp_path: Path):
    """So that the beginning of an answer is learned even if it is a token with the end of the prompt."""
    tokenizer = saved(tmp_path / "gpt", byte_level(trim=True))
    inner: Any = tokenizer.hugging_face()
    whole, spaced, apart = encode([pair("it is ", "blue"), pair("it is", " blue"), pair("it is ", "(")], tokenizer)
    assert inner.convert_ids_to_tokens(whole.ids[whole.learned]) == ["Ġblue", END]
    assert (whole.ids.tolist(), whole.learned.tolist()) == (spaced.ids.tolist(), spaced.learned.tolist())
    assert (whole.splits, spaced.splits, apart.splits) == (True, False, True)
    lines = [{"prompt": "it is ", "answer": "blue"}, {"prompt": "it is", "answer": " blue"}]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    data = {"format": "jsonl", "text": str(tmp_path / "lines"), "tokenizer": str(tmp_path / "gpt"), "batch": 1}
    loaded = load_data(
        from_mapping({"data": data | {"held_out_share": 0.0, "sequence": 8}, "pipeline": {"microbatches": 1}}).data
    )
    assert loaded.notes == (
        "1 of 2 samples have an answer that begins inside a token, such as a word whose space ends the prompt: "
        "the prompt alone is encoded differently; move such spaces to answers",
    )
    assert int((loaded.train.batch(torch.tensor([0]))[1] != IGNORED).sum()) == 4
    phi = saved(tmp_path / "phi", roles(legacy(), rstrip=True))
    sample = TextSample((TextPart("<|user|>", False), TextPart("\n blue", True)), plain=False)
    [sample] = encode([sample], phi)
    assert written(phi.hugging_face(), sample.ids[sample.learned]) == "blue", "without <|user|>, which takes the spaces"
    [dropped] = encode([pair("it is ", "blue")], saved(tmp_path / "bert", word_piece()))
    assert not dropped.splits, "the tokenizer drops the space anyway"
    letters = begun(Fast(models.BPE({END: 0, UNKNOWN: 1, "x": 2, "y": 3}, [])), BEGIN)  # cannot write "a"
    assert encode([pair("x", "y")], saved(tmp_path / "few", letters))[0].ids.tolist() == [4, 2, 3, 0]
    [raw] = encode([pair("é🙂", "ü")], ByteTokenizer())
    assert raw.ids[raw.learned].tolist() == [*"ü".encode(), BYTE_END]


def test_a_tokenizer_that_cannot_locate_its_tokens_is_refused(tmp_path: Path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="data.tokenizer is a ByT5Tokenizer, which .*allowed: a folder"):
        encode([pair("a", "b")], tokenizer)
    assert tokenizer.encode(b"a").tolist() == [ord("a") + 3, 1], "texts need no places"
