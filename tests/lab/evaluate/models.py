"""Checkpoints that tests evaluate: a tiny Llama with a byte tokenizer, and a tiny BERT with one of words."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model
from lowbit.train.pretrained import ByteTokenizer

TEXT = "The cat sat on the mat; 12 dogs, however, did not. Whether they would? Perhaps.\n" * 40
WORDS = sorted(set(TEXT.lower().replace(";", " ;").replace(",", " ,").replace("?", " ?").replace(".", " .").split()))


def write_checkpoint(folder: Path) -> Path:
    """The folder, with model and tokenizer in it, and a text beside it."""
    shape = ModelConfig(dim=32, layers=2, heads=4, ffn=64)
    model = build_model(shape, vocab=256, sequence=64, seed=0)
    for parameter in model.parameters():  # larger than at the start of training, so that errors show
        parameter.data.mul_(2)
    model.save_pretrained(folder)
    ByteTokenizer().hugging_face().save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def write_encoder(folder: Path, head: str = "") -> Path:
    """A folder with a tiny BERT, its tokenizer, and a text beside them."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *WORDS, *map(str, range(40))]))}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.normalizer, fast.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=fast, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    (BertForMaskedLM if head else BertModel)(BertConfig(**sizes)).save_pretrained(folder)
    lines = [
        f"The {i} cats sat on the {i % 7} mats; {i % 3} dogs did not, whether they would or not." for i in range(40)
    ]
    (folder / "text.txt").write_text("\n\n".join(lines))
    return folder
