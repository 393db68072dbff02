"""What tests evaluate: a tiny Llama with a byte tokenizer, a tiny BERT with one of words, and a few questions."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from lowbit_run.train.config import ModelConfig
from lowbit_run.train.model import build_model
from lowbit_run.train.pretrained import ByteTokenizer

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


Records = list[dict[str, Any]]
"""Questions of our own in the format of a zero-shot task."""


def _arc(question: str, answer: str, labels: str, *texts: str) -> dict[str, Any]:
    return {"id": "own", "question": question, "choices": {"text": [*texts], "label": [*labels]}, "answerKey": answer}


def _hellaswag(label: str, activity: str, a: str, b: str, *endings: str) -> dict[str, Any]:
    return {"activity_label": activity, "ctx_a": a, "ctx_b": b, "endings": [*endings], "label": label}


ARC: Records = [
    _arc("Which of these falls when a cat pushes it off a table?", "A", "ABC", "a cup", "the moon", "a shadow"),
    _arc("What do plants need in order to grow?", "3", "12345", "music", "paint", "light", "sand", "glass"),
    _arc("Water that is very cold becomes", "D", "ABCD", "steam", "a gas", "ice cold milk", "ice"),
]
HELLASWAG: Records = [
    _hellaswag(
        "0", "Feeding a dog", "A man opens a tin.", "the dog",
        "eats what is in it.", "opens a shop.", "[substeps] reads  the tin.", "[title] is a tin.",
    ),
    _hellaswag(
        "1", "Personal Care", "[header] How to wash your hands [title] Use water. [step] Turn the tap.", "",
        "Sing.", "Take the soap, and rub.", "Leave at once – really.", "Eat the soap.",
    ),
]  # fmt: skip
_GAP = "The cup did not fit into the box because the _ was too small."
WINOGRANDE: Records = [
    {"sentence": _GAP, "option1": "cup", "option2": "box", "answer": "2"},
    {"sentence": "Mary gave Anna a book, and _ thanked her.", "option1": "Mary", "option2": "Anna", "answer": "2"},
]
_ICE = "Ice -- Ice is water that has frozen. It is colder than water."
_CAT = "Cat -- The cat is a mammal. Its young are born alive."
BOOLQ: Records = [
    {"question": "is ice made of water", "passage": _ICE, "idx": 0, "label": 1},
    {"question": "do cats lay eggs", "passage": _CAT, "idx": 1, "label": 0},
]
PIQA: Records = [
    {"goal": "How do I dry a cup?", "sol1": "Use a towel.", "sol2": "Fill it with water. ", "label": 0},
    {"goal": "Open a tin", "sol1": "Sing to it.", "sol2": "Turn the key.", "label": 1},
]


def _published(record: dict[str, Any]) -> dict[str, Any]:
    """A question of the hub as its publisher has it."""
    if "choices" in record:
        pairs = zip(record["choices"]["text"], record["choices"]["label"], strict=True)
        choices = [{"text": text, "label": label} for text, label in pairs]
        return {"question": {"stem": record["question"], "choices": choices}, "answerKey": record["answerKey"]}
    if "endings" in record:
        return {**record, "label": int(record["label"])}
    if "passage" in record:
        return {"question": record["question"], "answer": bool(record["label"]), "passage": record["passage"]}
    return {"qID": "own", **record}


RECORDS: dict[str, list[Records]] = {
    name: [records, list(map(_published, records))]
    for name, records in {
        "arc_easy": ARC, "arc_challenge": ARC[:2], "boolq": BOOLQ, "hellaswag": HELLASWAG, "piqa": PIQA,
        "winogrande": WINOGRANDE,
    }.items()
}  # fmt: skip
"""By task: the records of the hub, and those of the publisher, of the same questions."""
