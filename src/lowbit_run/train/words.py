"""A few words that the model writes after a prompt, so that people see what training has changed."""

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from lowbit.escape import shown
from lowbit_run.train.answers import BYTE_END, IGNORED, Answers
from lowbit_run.train.config import AUTO, TrainConfig
from lowbit_run.train.data import Data
from lowbit_run.train.pretrained import ByteTokenizer, encode_prompt

if TYPE_CHECKING:
    from lowbit_run.train.trainer import Trainer

_COUNT = 24  # most tokens to write
_BEGINNING, _LONGEST = 24, 104  # tokens of held-out text, and most tokens of any other prompt
_SAMPLES = 100  # windows in which to look for a short prompt
_SECONDS = 4.0  # that the first step waits for words
_SHOWN = 100  # characters


class Words:
    """Writes after the prompt of a run, `run.prompt`; every rank makes one.

    Attributes:
        missing: why there is no prompt; empty if there is one, or none is wanted.
    """

    def __init__(self, trainer: "Trainer") -> None:
        config, data = trainer.members.config, trainer.members.prepared.data
        self._trainer, self.missing = trainer, ""
        self._count = min(_COUNT, config.data.sequence // 2)
        self._prompt = _prompt_of(config, data, min(_LONGEST, config.data.sequence - self._count))
        if config.run.prompt and not (self._prompt and self._count):
            self.missing = "the model writes no words: there is no held-out text (run.prompt)"

    def write(self) -> dict[str, str]:
        """Return the prompt and what the model writes, as text of one line each; {} without a prompt.

        The formats between the stages are those of training. All ranks of the first pipeline call it.
        """
        trainer, members = self._trainer, self._trainer.members
        data, config = members.prepared.data, members.config
        if not (self._prompt and self._count) or members.replicas.index:
            return {}
        with contextlib.ExitStack() as rows:
            ids = trainer.evaluation.continued(
                self._prompt, self._count, codecs=trainer.pipeline.codecs.forward, vocab=data.tokenizer.size,
                ends=_ends(data), seconds=min(_SECONDS, config.run.timeout_seconds / 4),
                follow=lambda new: rows.enter_context(trainer.model.tied.exact(new)),
            )  # fmt: skip
        inner = data.tokenizer.hugging_face()
        prompt, words = (str(inner.decode(tokens, skip_special_tokens=True)) for tokens in (self._prompt, ids))
        return {"prompt": shown(prompt[-_SHOWN:]), "words": shown(words[:_SHOWN])}


def _ends(data: Data) -> set[int]:
    if isinstance(data.tokenizer, ByteTokenizer):
        return {BYTE_END} if isinstance(data.train, Answers) else set()
    end: Any = data.tokenizer.hugging_face().eos_token_id
    return {end} - {None}


def _prompt_of(config: TrainConfig, data: Data, most: int) -> list[int]:
    """Return at most `most` tokens: the end of the prompt of a run, or a held-out beginning; [] without either."""
    text, held_out = config.run.prompt, data.held_out
    if text != AUTO:
        return encode_prompt(data.tokenizer.hugging_face(), text)[-most:] if text else []
    if not len(held_out):
        return []
    if not isinstance(held_out, Answers):
        return held_out.batch(torch.tensor([0]))[0][0, : min(_BEGINNING, most)].tolist()
    ids, targets = held_out.batch(torch.arange(min(len(held_out), _SAMPLES)))
    firsts = [int((learned != IGNORED).nonzero()[0]) for learned in targets]
    prompts = [row[: first + 1].tolist() for row, first in zip(ids, firsts, strict=True)]
    return next((prompt for prompt in prompts if len(prompt) <= most), prompts[0])[-most:]
