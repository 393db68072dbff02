from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lowbit.train.pretrained import ByteTokenizer, load_tokenizer

WORDS = {"<unk>": 0, "<end>": 1, "few": 2, "bits": 3}


@pytest.fixture
def folder(tmp_path):
    """A word tokenizer with an end-of-text token, in Hugging Face format."""
    fast = Fast(models.WordLevel(WORDS, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", eos_token="<end>", additional_special_tokens=[]
    )
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_bytes_are_their_own_ids_and_hugging_face_agrees(tmp_path):
    text = "Grüße,\n\t 你好 \x00 it's  1234"
    ByteTokenizer().hugging_face().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ByteTokenizer().encode(text.encode()).tolist()
    assert ids == list(text.encode()) == theirs(text)["input_ids"]
    assert theirs.decode(ids) == text
    assert len(theirs) == ByteTokenizer.size == 256


def test_a_folder_tokenizer_ends_documents(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.size == 4
    assert tokenizer.encode(b"few bits \xff few").tolist() == [2, 3, 0, 2, 1]
