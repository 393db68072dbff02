"""Loss on held-out text, through the pipeline, with any codecs at the boundaries or none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowbit.codecs import Cast, Codec, Session
from lowbit.collectives.messages import Messages, Sent
from lowbit.pipeline import LowBitStage
from lowbit.train.data import Windows
from lowbit.train.model import StageModule
from lowbit.train.plan import Plan


class Evaluation:
    """Forward passes outside the training schedule, so that its codecs' states and counters stay as they are.

    Args:
        plan: where the stages are; modules: this rank's, by stage.
        stages: this rank's pipeline stages, whose codecs may have learned something that evaluation uses.
        width: elements of an activation; device: where the modules are.
        group: of the pipeline, apart from the training traffic; Gloo carries it, wherever the modules are.
        timeout: seconds after which a peer that does not answer is an error. checksums: of what crosses.

    Raises:
        DamagedError: (in `loss`) what a neighbour sent did not arrive as it was.
        PeerError: (in `loss`) a neighbour ended or does not answer.
    """

    def __init__(
        self,
        plan: Plan,
        modules: dict[int, StageModule],
        *,
        stages: Mapping[int, LowBitStage],
        width: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        timeout: float = 120.0,
        checksums: bool = True,
    ) -> None:
        self._stages = stages
        self._plan, self._modules, self._width = plan, modules, width
        self._device, self._group = device, group
        self._messages = Messages(group, "evaluation", timeout=timeout, checksums=checksums)

    @torch.no_grad()
    def loss(
        self, windows: Windows, *, batch: int, batches: int, codecs: Sequence[Codec] | None = None
    ) -> float:
        """Mean loss of a token, the same number on every rank; NaN if there are no windows.

        Args:
            windows: held-out text; batch: windows at a time; batches: how many of them at most (0: all).
            codecs: one for each boundary; None: float32. A codec that learns from message to message uses what training
                has taught it, if training uses the same at that boundary, and float32 as long as that has its warm-up;
                any other starts with nothing in each batch.
        """
        chosen = codecs or (Cast(dtype=torch.float32),) * (self._plan.stages - 1)
        count = math.ceil(len(windows) / batch)
        total = torch.zeros(2, dtype=torch.float64)
        with self._evaluating():
            for index in range(min(count, batches) if batches else count):
                ids = torch.arange(index * batch, min(len(windows), (index + 1) * batch))
                total += self._batch(windows, ids, chosen)
        dist.all_reduce(total, group=self._group)
        return float(total[0] / total[1])

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """No dropout, and float32 in the codecs' hands whatever the training boundary takes."""
        before = [(module, module.training, module.wire) for module in self._modules.values()]
        for module in self._modules.values():
            module.eval()
            module.wire = torch.float32
        try:
            yield
        finally:
            for module, training, wire in before:
                module.train(training)
                module.wire = wire

    def _batch(self, windows: Windows, ids: Tensor, codecs: Sequence[Codec]) -> Tensor:
        """Sum of losses and number of tokens, where the last stage is; zeros elsewhere."""
        inputs, targets = (t.to(self._device) for t in windows.batch(ids))
        key = tuple(ids.tolist())
        shape = (*inputs.shape, self._width)
        sends: list[Sent] = []
        result = torch.zeros(2, dtype=torch.float64)
        x = inputs
        for index, module in self._modules.items():
            if index and self._plan.crosses(index - 1):
                x = self._receive(index - 1, shape, codecs[index - 1], key)
            x = module(x)
            if module.last:
                losses = F.cross_entropy(
                    x.float().flatten(0, 1), targets.flatten(), reduction="sum"
                )
                result = torch.tensor([float(losses), targets.numel()], dtype=torch.float64)
            elif self._plan.crosses(index):
                sends.append(self._send(index, x, codecs[index], key))
        for sent in sends:
            sent.wait()
        return result

    def _send(self, boundary: int, x: Tensor, codec: Codec, key: tuple[int, ...]) -> Sent:
        session = self._session(boundary, codec, x.shape, outgoing=True)
        chosen = key if codec.needs_key else None
        payload = session.encode(x.float(), key=chosen, training=False)
        return self._messages.send(payload, self._plan.rank_of(boundary + 1))

    def _receive(
        self, boundary: int, shape: tuple[int, ...], codec: Codec, key: tuple[int, ...]
    ) -> Tensor:
        session = self._session(boundary, codec, shape, outgoing=False)
        chosen = key if codec.needs_key else None
        source = self._plan.rank_of(boundary)
        payload = self._messages.receive(session.nbytes(chosen), source, f"boundary {boundary}")
        return session.decode(payload.to(self._device), key=chosen, training=False)

    def _session(
        self, boundary: int, codec: Codec, shape: Sequence[int], *, outgoing: bool
    ) -> Session:
        """One with what training has taught the boundary; a fresh one where that belongs to samples or another codec.

        During the warm-up, which has taught nothing yet, it is one at full precision instead.
        """
        stage = self._stages.get(boundary if outgoing else boundary + 1)
        taught = stage is not None and stage.forward_codec(outgoing=outgoing) == codec
        if stage is not None and taught and codec.shared_by(shape) is not None:
            if not stage.in_warmup:
                return stage.forward_session(outgoing=outgoing, shape=shape, dtype=torch.float32)
            codec = Cast(dtype=torch.float32)
        return codec.open(shape=shape, dtype=torch.float32, device=self._device)
