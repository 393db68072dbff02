"""An embedding tied to the output matrix, in a pipeline: one weight, on the first stage and on the last.

The output matrix needs the whole weight in every step, and its gradient is dense. The embedding reads only the rows of
tokens that occur, and only these have a gradient there. So the last stage owns the weight: before a step it sends the
first stage the rows of the step's tokens, and gets their gradients after the last backward pass. Only the last stage
has optimizer states for the weight. The first stage's other rows are outdated, but nothing reads them.

Both ends know the tokens of every step from the data, so only values are sent, in sizes that both know. For weights,
the values are the changes since a row was last sent plus the coding error of that time, so that an update that is small
compared with the weight is not rounded away. In fp32, whole rows are sent, and a run has the losses of one process.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowbit.codecs import Cast, Codec
from lowbit.collectives.reduce import check_flat, check_summable
from lowbit.wire.checksum import sealed_bytes
from lowbit.wire.messages import Expected, Messages, Sent
from lowbit_run.train.boundaries import codec_of
from lowbit_run.train.config import PipelineConfig
from lowbit_run.train.gradients import ReplicaGroups
from lowbit_run.train.metrics import TIED, Work
from lowbit_run.train.model import StageModule

if TYPE_CHECKING:
    from lowbit_run.train.prepare import Prepared

_EXACT = Cast(dtype=torch.float32)
_PIECE_BYTES = 8 << 20  # of float32 in a message, which bounds every wait
_DISTINCT, _GROWTH = 2.43, 0.717  # of WikiText-2 in SmolLM2's tokens, within 15 % for 512 to 65,536 tokens


def tied_codec(config: PipelineConfig) -> Codec:
    """Return the codec of a tied embedding's rows."""
    codec_of("pipeline.tied_rows", config.tied_rows, check_flat)
    return codec_of("pipeline.tied_rows", config.tied_rows, check_summable)


def expected_rows(tokens: int, vocab: int) -> int:
    """Estimate the number of distinct tokens in a text of `tokens` tokens; at most `vocab`."""
    return min(tokens, vocab, round(_DISTINCT * tokens**_GROWTH))


def row_bytes(rows: int, width: int, codec: Codec, *, checksums: bool = True) -> int:
    """Return the bytes of rows in one direction, with their checksums."""
    whole, rest = divmod(rows, piece := _piece(width))
    sizes = [codec.nbytes((count, width)) for count in [piece] * whole + [rest]]
    return sum(sealed_bytes(size, checksums) for size in sizes)


class TiedWeights:
    """Lets the first stage's copy of a tied embedding follow the last's; does nothing if it is not tied.

    Two copies on one rank, as in V-shaped schedules, get the sum of their gradients and stay equal without messages.

    Every rank makes one, since messages are numbered. It renames parameters: a copy that follows loses its name, and is
    in no checkpoint and no saved model; the last stage's copy gets the name of the original.

    Args:
        modules: this rank's modules, by stage. replicas: the pipelines, each of which has its own two copies.
        tied: whether the model ties its embedding, and trains it.

    Attributes:
        copies: of the weight on this rank. follower: the one that follows another rank's, if any.
        state: the weight as the first stage has it, by its name, the same on both ranks; empty if rows are exact.
        peer: rank of the run with the other copy, or None.
        sent: bytes and elements that this rank has sent since the last step began.
    """

    def __init__(
        self,
        prepared: "Prepared",
        modules: dict[int, StageModule],
        replicas: ReplicaGroups,
        *,
        tied: bool,
    ) -> None:
        layout, codec, run = prepared.layout, prepared.tied_rows, prepared.config.run
        last = layout.stages - 1
        self._first_rank, self._last_rank = layout.rank_of(0), layout.rank_of(last)
        self._codec, self._checksums = codec, run.checksums
        self._messages: Messages | None = None
        self._sent: list[Sent] = []
        self._expected: list[Expected] = []
        self._ids, self._format = torch.empty(0, dtype=torch.int64), codec  # rows under way
        self.copies: list[nn.Parameter] = []
        self.follower: nn.Parameter | None = None
        self.state: dict[str, Tensor] = {}
        self.peer: int | None = None
        self.sent = Work()
        if not tied or layout.stages == 1:
            return
        if 0 in modules:
            self.copies.append(modules[0].decoder.get_input_embeddings().weight)  # pyright: ignore
        if last in modules:
            self.copies.append(modules[last].head.weight)  # pyright: ignore
        if self._first_rank == self._last_rank:
            return
        self._messages = Messages(replicas.side, TIED, timeout=run.timeout_seconds, checksums=run.checksums)
        ends = {self._first_rank: self._last_rank, self._last_rank: self._first_rank}
        if replicas.place in ends:
            self.peer = replicas.members(replicas.index)[ends[replicas.place]]
        if not self.copies:
            return
        (copy,) = self.copies
        if 0 in modules:
            self.follower, name = copy, modules[0].names.pop(copy)
        else:
            module = modules[last]
            module.names[copy] = name = module.aliases.pop(module.names[copy])
        if codec != _EXACT:
            self.state[name] = copy.detach() if 0 in modules else copy.detach().clone()

    @property
    def apart(self) -> bool:
        """Whether one copy follows the other, on another rank."""
        return self._messages is not None

    def begin_step(self, tokens: Tensor, *, exact: bool) -> None:
        """Bring the first stage's rows of a step's tokens up to date; `sum_gradients` sends their gradients back.

        Args:
            tokens: int64, any shape, the same on both ranks. exact: send weights and gradients in float32.

        Raises:
            DamagedError, PeerError: as `Messages`.
        """
        self.sent = Work()
        if self._messages is None or not self.copies:
            return
        self._ids, self._format = tokens.unique(), _EXACT if exact else self._codec
        if self.follower is None:
            self._expected = self._expect(self._first_rank, "gradients")
            (weight,), rows = self.copies, next(iter(self.state.values()), None)
            whole = rows is None or self._format == _EXACT
            self._send(weight, self._first_rank, since=None if whole else rows)
            if whole and rows is not None:
                for ids in self._pieces(weight):
                    rows[ids] = weight.detach()[ids]
        else:
            self._take_weights()

    @contextlib.contextmanager
    def exact(self, tokens: Tensor) -> Iterator[None]:
        """Make the first stage's rows of these tokens exact for the `with` block, and restore them after it.

        Args, Raises: as `begin_step`.
        """
        if self._messages is None or not self.copies:
            yield
            return
        self._ids, self._format = tokens.unique(), _EXACT
        if self.follower is None:
            self._send(self.copies[0], self._first_rank)
            yield
            return
        ids = self._ids.to(self.follower.device)
        before = self.follower.detach()[ids]
        self._take_weights()
        try:
            yield
        finally:
            self.follower.data[ids] = before

    def _take_weights(self) -> None:
        (weight,) = self.copies
        for ids, rows in self._rows(self._expect(self._last_rank, "weights")):
            weight.data[ids] = rows if self._format == _EXACT else weight.data[ids].add_(rows)

    def sum_gradients(self) -> None:
        """Add up the gradients of both copies; if one follows, on the last stage's rank."""
        for copy in self.copies:
            copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
        gradients = [copy.grad for copy in self.copies if copy.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif self._messages is None or not gradients:
            return
        elif self.follower is not None:
            self._send(gradients[0], self._last_rank)
            self.follower.grad = None
        else:
            for ids, rows in self._rows(self._expected):
                gradients[0].index_add_(0, ids, rows)

    def _send(self, whole: Tensor, to: int, *, since: Tensor | None = None) -> None:
        """Send rows, or their changes since the state `since` of the peer, which is then updated."""
        assert self._messages is not None
        while self._sent:  # of the previous step
            self._sent.pop().wait()
        for ids in self._pieces(whole):
            rows = whole.detach()[ids]
            if since is None:
                payload = self._format.encode(rows)
            else:
                payload = self._format.encode(rows - since[ids])
                since[ids] += self._format.decode(payload, shape=rows.shape, dtype=rows.dtype)
            self._sent.append(self._messages.send(payload, to))
            self.sent.tied_bytes += sealed_bytes(payload.numel(), self._checksums)
            self.sent.tied_elements += rows.numel()

    def _expect(self, source: int, about: str) -> list[Expected]:
        assert self._messages is not None
        (weight,) = self.copies
        sizes = [self._format.nbytes((ids.numel(), weight.shape[1])) for ids in self._pieces(weight)]
        return [self._messages.expect(size, source, about) for size in sizes]

    def _rows(self, expected: list[Expected]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield received rows with their ids, a piece at a time."""
        (weight,) = self.copies
        for ids, message in zip(self._pieces(weight), expected, strict=True):
            payload = message.wait().to(weight.device)
            yield ids, self._format.decode(payload, shape=(ids.numel(), weight.shape[1]), dtype=weight.dtype)

    def _pieces(self, whole: Tensor) -> Iterator[Tensor]:
        yield from self._ids.to(whole.device).split(_piece(whole.shape[1]))


def _piece(width: int) -> int:  # rows in a message
    return max(1, _PIECE_BYTES // (4 * width))
