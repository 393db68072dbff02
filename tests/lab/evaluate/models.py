"""A checkpoint that tests evaluate: a tiny Llama of two layers with a byte tokenizer."""

from pathlib import Path

from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model
from lowbit.train.pretrained import ByteTokenizer

TEXT = "The cat sat on the mat; 12 dogs, however, did not. Whether they would? Perhaps.\n" * 40


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
