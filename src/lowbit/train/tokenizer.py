"""Tokenizers: plain bytes, or a Hugging Face tokenizer in a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lowbit.config import ConfigError
from lowbit.train.pretrained import hint, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    """A tokenizer for training. size: entries of the vocabulary."""

    size: int

    def encode(self, document: bytes) -> np.ndarray:
        """Return the token ids of a document: one dimension, unsigned integers."""
        ...

    def hugging_face(self) -> PreTrainedTokenizerBase:
        """Return the same tokenizer as Hugging Face's class, to save with a model."""
        ...


class ByteTokenizer:
    """A tokenizer whose tokens are bytes; a token's id is the byte's value."""

    size = 256

    def encode(self, document: bytes) -> np.ndarray:
        """Return the bytes themselves, uint8."""
        return np.frombuffer(document, dtype=np.uint8)

    def hugging_face(self) -> PreTrainedTokenizerBase:
        """Return a byte-level tokenizer without merges, with the same ids."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # Byte-level tokenizers write each byte as a printable character (GPT-2's table).
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        vocabulary = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        fast = Fast(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False)


class FolderTokenizer:
    """A Hugging Face tokenizer; documents end with its end-of-text token, if it has one."""

    def __init__(self, folder: str, *, key: str = "data.tokenizer") -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of many kinds; panics of the package tokenizers are not an `Exception`
            raise ConfigError(f"{key} {folder!r} cannot be loaded: {reason(error)}") from error
        self.size = len(self._tokenizer)

    def encode(self, document: bytes) -> np.ndarray:
        """Return token ids, uint32; bytes that are not UTF-8 become the replacement character."""
        text = document.decode("utf-8", errors="replace")
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
        return np.asarray(ids, dtype=np.uint32)

    def hugging_face(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer as it was loaded."""
        return self._tokenizer


def load_tokenizer(name: str, *, key: str = "data.tokenizer") -> Tokenizer:
    """Load the tokenizer with this name; `key` is the setting, for errors.

    Raises:
        ConfigError: neither "bytes" nor a folder with a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_dir():
        raise ConfigError(f"{key} is {name!r}; allowed: bytes, or a folder that exists{hint(name)}")
    return FolderTokenizer(name, key=key)


def definition(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return vocabulary and rules as text; `repr` shows the folder instead."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return fast.to_str() if fast is not None else repr(sorted(tokenizer.get_vocab().items()))
