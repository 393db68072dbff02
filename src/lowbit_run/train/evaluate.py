"""Compute the held-out loss in the pipeline, with any codecs at the boundaries or none."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import Cast, Codec, Session, StatefulCodec
from lowbit.codecs.foreign import open_session
from lowbit.pipeline import LowBitStage
from lowbit.wire.checksum import sealed_bytes
from lowbit.wire.messages import Expected, Messages, Sent
from lowbit_run.train.answers import IGNORED, Answers
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.data import Windows
from lowbit_run.train.layout import PipelineLayout
from lowbit_run.train.model import StageModule, next_token_loss

_ROUND_BYTES = 1 << 27
"""Most float32 activations that a rank sends or receives in a round; up to two rounds are under way each way."""
SUMS_BYTES = 32
_NO_TOKEN = -1  # what the last stage sends in place of a token at the end of a text


class _Batch(NamedTuple):
    """Windows that are evaluated together: int64 (windows, sequence)."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None


@dataclass(frozen=True)
class _Round:
    """Batches that all pass a stage, one after the other, before they pass the next stage.

    Attributes:
        arriving: activations that this rank has yet to receive, and the sessions that decode them, by stage and batch.
        sums: `_sums_of` each batch, to receive from the rank of the last stage; own_sums: the same, on that rank.
        sent: messages that may still be under way.
    """

    batches: Sequence[_Batch]
    arriving: dict[tuple[int, int], tuple[Session, Expected]]
    sums: list[Expected]
    own_sums: list[Tensor] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)


class Evaluated(Protocol):
    """The stages of a rank that are evaluated: those of a `Pipeline`, or of a model that only answers."""

    config: TrainConfig
    layout: PipelineLayout
    modules: dict[int, StageModule]
    device: torch.device

    @property
    def width(self) -> int: ...
    @property
    def lowbit_stages(self) -> Mapping[int, LowBitStage]: ...


class HeldOutEvaluation:
    """Forward passes outside the training schedule that change neither training's codec states nor its counters.

    Args:
        pipeline: this rank's stages, whose codecs' states evaluation uses.
        group: Gloo group of the pipeline, not the one of the training traffic.

    Raises:
        DamagedError, PeerError: (in `loss`) as `Messages`.
    """

    def __init__(self, pipeline: Evaluated, group: dist.ProcessGroup | None) -> None:
        run = pipeline.config.run
        self._layout, self._modules, self._stages = pipeline.layout, pipeline.modules, pipeline.lowbit_stages
        self._width, self._device = pipeline.width, pipeline.device
        self._trained = torch.Size((pipeline.config.rows, pipeline.config.data.sequence, pipeline.width))
        self._messages = Messages(group, "evaluation", timeout=run.timeout_seconds, checksums=run.checksums)
        self._legs: list[list[int]] = []  # runs of stages without a message in between
        for stage in self._modules:
            if stage and not self._layout.crosses(stage - 1):
                self._legs[-1].append(stage)
            else:
                self._legs.append([stage])

    def scores(
        self, windows: Windows | Answers, *, batch: int, batches: int, codecs: Sequence[Codec] | None = None
    ) -> tuple[float, float]:
        """Return the mean loss of learned tokens in nats, and exact match; the same numbers on every rank.

        Exact match is the share of samples whose answers greedy decoding would write token for token, including the
        end: each token is the likeliest after the prompt and the tokens before it. Both are NaN without windows, and
        exact match is NaN for text without answers.

        Args:
            windows: held-out text or samples; batch: windows at a time; batches: most batches (0: all).
            codecs: one for each boundary; None: float32. A codec that learns from message to message uses the state of
                training's codec at that boundary if it is the same (float32 during its warm-up), and otherwise starts
                empty in each batch.
        """
        total = torch.zeros(4, dtype=torch.float64)
        for sums in self.sums(windows, batch=batch, batches=batches, codecs=codecs):
            total += sums
        return float(total[0] / total[1]), float(total[2] / total[3])

    @torch.no_grad()
    def sums(
        self, windows: Windows | Answers, *, batch: int, batches: int, codecs: Sequence[Codec] | None = None
    ) -> list[Tensor]:
        """Return `_sums_of` each batch, float64 (4,), the same on every rank; arguments as for `scores`."""
        chosen = codecs or (Cast(dtype=torch.float32),) * (self._layout.stages - 1)
        ids = evaluated(windows, batch=batch, batches=batches)
        if not len(ids):
            return []
        with self._evaluating():
            return list(self._sums(windows, ids.split(batch), chosen))

    def _sums(self, windows: Windows | Answers, batches: Sequence[Tensor], codecs: Sequence[Codec]) -> Iterator[Tensor]:
        """Yield `_sums_of` each batch of window ids, the same on every rank.

        All batches of a round pass a stage before the next one, so the latency of a distant neighbour counts once per
        round, not once per batch. The next round begins while the last stages work on this one.
        """
        nbytes = len(batches[0]) * windows.sequence * self._width * torch.float32.itemsize
        size = max(2, _ROUND_BYTES // (nbytes * self._layout.stages_per_rank))
        starts = range(0, len(batches), size)
        rounds = (self._open(windows, batches[i : i + size], codecs) for i in starts)
        begun = deque[_Round]()
        # Two rounds at a time: a round's receives must be posted before its senders begin.
        for current, _ in pairwise(chain(rounds, (None,))):
            assert current is not None
            self._pass(current, codecs)
            begun.append(current)
            # In a V-shaped layout, the first rank ends a round before it begins the next. The others wait for its sums
            # meanwhile, so that no wait is longer than a batch takes on some rank.
            while len(begun) > (not self._layout.v_shaped):
                yield from self._close(begun.popleft())
        for each in begun:
            yield from self._close(each)

    def _open(self, windows: Windows | Answers, ids: Sequence[Tensor], codecs: Sequence[Codec]) -> _Round:
        """Begin a round: post receives for all activations and sums, in the order of each neighbour's sends."""
        batches = [_Batch(*windows.batch(each), windows.positions(each)) for each in ids]
        arriving = {
            (leg[0], index): self._expect(leg[0] - 1, batch, codecs[leg[0] - 1])
            for leg in self._legs
            for index, batch in enumerate(batches)
            if leg[0]
        }
        last = self._layout.rank_of(self._layout.stages - 1)
        expected = len(batches) if last != self._messages.rank else 0
        return _Round(batches, arriving, [self._messages.expect(SUMS_BYTES, last, "sums") for _ in range(expected)])

    def _expect(self, boundary: int, batch: _Batch, codec: Codec) -> tuple[Session, Expected]:
        session = self._session(boundary, codec, (*batch.inputs.shape, self._width), outgoing=False)
        source = self._layout.rank_of(boundary)
        return session, self._messages.expect(session.nbytes(), source, f"boundary {boundary}")

    def _arrived(self, stage: int, batch: _Batch, session: Session, message: Expected) -> Tensor:
        x = session.decode(message.wait().to(self._device), training=False)
        predicted = self._predicted(stage, batch, session, outgoing=False)
        return x if predicted is None else x + predicted

    def _send(self, stage: int, batch: _Batch, x: Tensor, codec: Codec) -> Sent:
        session = self._session(stage, codec, x.shape, outgoing=True)
        predicted = self._predicted(stage, batch, session, outgoing=True)
        rest = x.float() if predicted is None else x.float() - predicted
        return self._messages.send(session.encode(rest, training=False), self._layout.rank_of(stage + 1))

    def _predicted(self, stage: int, batch: _Batch, session: Session, *, outgoing: bool) -> Tensor | None:
        """Return what the token anchor of training predicts, if there is one; both ends know the ids."""
        if stage not in self._stages or session.is_plain:
            return None
        return self._stages[stage].predicted(batch.inputs, outgoing=outgoing, width=self._width)

    def _pass(self, current: _Round, codecs: Sequence[Codec]) -> None:
        """Run this rank's stages, one after the other, on all batches of a round."""
        for leg in self._legs:
            for index, batch in enumerate(current.batches):
                if leg[0]:
                    x = self._arrived(leg[0], batch, *current.arriving.pop((leg[0], index)))
                else:
                    x = batch.inputs.to(self._device)
                results = self._results(leg, x, batch)
                if leg[-1] == self._layout.stages - 1:
                    sums = torch.stack(results).sum(0)
                    current.own_sums.append(sums)
                    others = (rank for rank in range(self._messages.ranks) if rank != self._messages.rank)
                    current.sent.extend(self._messages.send(sums, rank) for rank in others)
                    continue
                current.sent.append(self._send(leg[-1], batch, torch.cat(results), codecs[leg[-1]]))

    def _results(self, leg: Sequence[int], x: Tensor, batch: _Batch) -> list[Tensor]:
        """Return activations, or `_sums_of` the last stage's logits, for as many windows at a time as in training."""
        results: list[Tensor] = []
        for start in range(0, len(x), self._trained[0]):
            rows = slice(start, start + self._trained[0])
            part = x[rows]
            positions = None if batch.positions is None else batch.positions[rows].to(self._device)
            for stage in leg:
                part = self._modules[stage](part) if positions is None else self._modules[stage](part, positions)
            if leg[-1] == self._layout.stages - 1:
                part = _sums_of(part, batch.targets[rows].to(self._device), positions)
            results.append(part)
        return results

    @torch.no_grad()
    def continued(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        codecs: Sequence[Codec],
        vocab: int,
        ends: Collection[int] = (),
        seconds: float = math.inf,
        follow: Callable[[Tensor], None] = lambda ids: None,
    ) -> list[int]:
        """Return at most `count` token ids after a prompt, each the likeliest; the same on every rank.

        Every token takes a whole pass, without a cache, so that any layout of stages can do it. All passes have one
        shape: causal models do not see what follows the last token.

        Args:
            prompt, codecs: as on all ranks. vocab: of ids that may be chosen. ends: ids that end the text.
            seconds: after which the last stage chooses no more tokens.
            follow: called with ids, int64 (n,), before a pass has them for the first time.
        """
        ids, size, last = list(prompt), len(prompt) + count, self._layout.rank_of(self._layout.stages - 1)
        begin, new = time.monotonic(), torch.tensor(prompt)
        with self._evaluating():
            while len(ids) < size:
                follow(new)
                inputs = torch.tensor([ids + [0] * (size - len(ids))])
                logits = self._logits(_Batch(inputs, inputs, None), codecs)
                if logits is None:
                    token = int(self._messages.expect(8, last, "token").wait().view(torch.int64))
                else:
                    token = int(logits[0, len(ids) - 1, :vocab].argmax())
                    if token in ends or time.monotonic() - begin > seconds:
                        token = _NO_TOKEN
                    others = [rank for rank in range(self._messages.ranks) if rank != self._messages.rank]
                    for sent in [self._messages.send(torch.tensor([token]), rank) for rank in others]:
                        sent.wait()
                if not 0 <= token < vocab:
                    break
                ids.append(token)
                new = torch.tensor([token])
        return ids[len(prompt) :]

    def _logits(self, batch: _Batch, codecs: Sequence[Codec]) -> Tensor | None:
        """Run this rank's stages on a batch; returns the logits on the rank with the last stage."""
        x, sent = batch.inputs.to(self._device), list[Sent]()
        for leg in self._legs:
            if leg[0]:
                x = self._arrived(leg[0], batch, *self._expect(leg[0] - 1, batch, codecs[leg[0] - 1]))
            for stage in leg:
                x = self._modules[stage](x)
            if leg[-1] < self._layout.stages - 1:
                sent.append(self._send(leg[-1], batch, x, codecs[leg[-1]]))
        for each in sent:
            each.wait()
        return x if self._layout.stages - 1 in self._modules else None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        before = [(module, module.training) for module in self._modules.values()]
        for module, _ in before:
            module.eval()
        try:
            yield
        finally:
            for module, training in before:
                module.train(training)

    def _close(self, done: _Round) -> Iterator[Tensor]:
        """Yield the sums of a round's batches, and wait until all messages of the round have been sent."""
        yield from done.own_sums
        for message in done.sums:
            yield message.wait().view(torch.float64)
        for sent in done.sent:
            sent.wait()

    def _session(self, boundary: int, codec: Codec, shape: Sequence[int], *, outgoing: bool) -> Session:
        """Return training's session if it serves all shapes (float32 while it is empty), or a new one."""
        stage = self._stages.get(boundary if outgoing else boundary + 1)
        same = stage is not None and stage.forward_codec(outgoing=outgoing) == codec
        if stage is not None and same and isinstance(codec, StatefulCodec) and codec.shared_by(shape) is not None:
            if not stage.in_warmup:  # training's shape first: a set rate must suit it, but not a smaller last batch
                stage.forward_session(outgoing=outgoing, shape=self._trained, dtype=torch.float32)
                return stage.forward_session(outgoing=outgoing, shape=shape, dtype=torch.float32)
            codec = Cast(dtype=torch.float32)
        if codec.needs_key:  # it has no state for these samples, and sends them uncoded
            codec = Cast(dtype=torch.float32)
        return open_session(codec, shape=shape, dtype=torch.float32, device=self._device, about=f"boundary {boundary}")


def evaluated(windows: Windows | Answers, *, batch: int, batches: int) -> Tensor:
    """Return the ids of the windows that an evaluation takes: at most `batches` batches (0: all)."""
    return torch.arange(min(len(windows), batch * batches) if batches else len(windows))


def evaluation_bytes(
    layout: PipelineLayout, codecs: Sequence[Codec], shapes: Sequence[tuple[int, int, int]], *, checksums: bool = True
) -> float:
    """Return the bytes that a pipeline sends to evaluate batches of these shapes through these codecs."""
    crossing = [codec for boundary, codec in enumerate(codecs) if layout.crosses(boundary)]
    coded = [codec.nbytes(shape) for codec in crossing for shape in shapes]
    sums = len(shapes) * (layout.ranks - 1) * sealed_bytes(SUMS_BYTES, checksums)
    return float(sums + sum(sealed_bytes(nbytes, checksums) for nbytes in coded))


def _sums_of(logits: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
    """Return the sum of losses, and the numbers of learned tokens, of samples answered right, and of samples.

    float64, on the CPU. Text without answers counts no samples.
    """
    loss = next_token_loss(logits, targets, "sum")
    learned = targets != IGNORED
    sums = [float(loss), int(learned.sum()), 0, 0]
    if not bool(learned.all()):
        begins = torch.zeros_like(targets) if positions is None else (positions.to(targets.device) == 0).long()
        begins[:, 0] = 1
        sample = begins.flatten().cumsum(0) - 1
        wrong = (logits.argmax(-1) != targets).flatten()
        answers, learned = int(sample[-1]) + 1, learned.flatten()
        asked = torch.bincount(sample[learned], minlength=answers)
        mistakes = torch.bincount(sample[learned & wrong], minlength=answers)
        sums[2:] = [int(((asked > 0) & (mistakes == 0)).sum()), int((asked > 0).sum())]
    return torch.tensor(sums, dtype=torch.float64)
