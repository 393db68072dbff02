"""Megatron-Core in few bits: a communicator for its pipeline schedules, which sends payloads instead of tensors.

Megatron's schedules take the communicator as an argument (`p2p_communicator=`), and call its methods for everything
that stages send to each other. `LowBitP2PCommunicator` overrides the one method that all of these call.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit import __version__
from lowbit.codecs.base import Codec, Session
from lowbit.codecs.checks import FLOATS
from lowbit.codecs.defaults import RECOMMENDED
from lowbit.codecs.foreign import open_session
from lowbit.escape import shown
from lowbit.integrations import engine
from lowbit.pipeline import Traffic
from lowbit.pipeline.arguments import check_numbers, default_backward
from lowbit.wire import pytorch
from lowbit.wire.agreement import agree
from lowbit.wire.checksum import Checksums, agreed_facts, check_checksums, damaged
from lowbit.wire.failure import FailureBoard
from lowbit.wire.mailbox import Mailbox, Route, Sent
from lowbit.wire.pytorch import next_round, rank_names
from lowbit.wire.tags import ENGINES

__all__ = ["LowBitP2PCommunicator"]

_p2p = engine(
    "megatron.core.pipeline_parallel.p2p_communication", "P2PCommunicator", "_batched_p2p_ops", "_p2p_ops",
    package="megatron-core", extra="megatron", tested="0.16.1",
)  # fmt: skip
_SIDES = ("prev", "next")
_WORDS = {"forward": "activation", "backward": "gradient"}
_PATIENCE = 1800.0  # seconds for a message over Gloo, as PyTorch's groups allow by default


class LowBitP2PCommunicator(_p2p.P2PCommunicator):
    """Megatron's `P2PCommunicator` that sends activations and gradients in few bits.

    Pass it to a schedule as `p2p_communicator=`, with the `pg_collection` that Megatron then requires. All else is
    Megatron's: order of messages, `batch_p2p_comm`, overlap, timers. Received tensors have `config.pipeline_dtype`.

    With a stateful codec, such as `TransformQuant`, both ends keep a session for each direction, which follows the
    order of messages. With virtual stages the communicator does not learn to which of them a message belongs, so only
    codecs without state are allowed there, such as `TAHQuant` and `GroupInt`.

    Create it on all ranks of the group at once: they compare their formats before the first byte.

    Args:
        pp_group: the ranks of the pipeline.
        config: Megatron's `ModelParallelConfig` (`TransformerConfig`) of the model.
        forward: format of activations.
        backward: format of gradients; None: the default backward format of `forward`.
        timeout: seconds to wait for the other ranks when the communicator is created.
        checksums: append 8 bytes to each payload, by which the receiver detects damage.

    Attributes:
        traffic: what this rank has sent.

    Raises:
        TypeError, ValueError: an unsuitable codec or setting, which the text names.
        AgreementError: the ranks have different formats.
        DamagedError: (in any pass) a message from a neighbour arrived damaged.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,
        *,
        forward: Codec = RECOMMENDED,
        backward: Codec | None = None,
        timeout: float = 120.0,
        checksums: bool = True,
    ) -> None:
        check_numbers(0, timeout)
        check_checksums(checksums)
        super().__init__(pp_group, config)
        codecs = {"forward": forward, "backward": default_backward(forward) if backward is None else backward}
        self._check(codecs)
        if config.use_ring_exchange_p2p:
            raise ValueError(
                "use_ring_exchange_p2p is True; allowed: False, because a ring exchanges tensors of one size"
            )
        if config.pipeline_dtype not in FLOATS:
            raise ValueError(f"pipeline_dtype is {config.pipeline_dtype}; allowed: {', '.join(map(str, FLOATS))}")
        self.traffic = Traffic()
        self._checksums = Checksums("megatron", enabled=checksums)
        self._sessions = {(name, end): _sessions(codec) for name, codec in codecs.items() for end in ("out", "in")}
        self._numbers = {lane: itertools.count(1) for lane in self._sessions}  # of messages
        facts = {f"{name} codec": f"{codec} [{codec.fingerprint()}]" for name, codec in codecs.items()}
        facts |= {"lowbit version": __version__, "pipeline_dtype": str(config.pipeline_dtype)}
        agree(pp_group, facts | agreed_facts(checksums), timeout, topic="Megatron's pipeline")
        self._mailbox: Mailbox | None = None  # only for Gloo: its messages need tags, which Megatron does not set
        if _device().type == "cpu" and pytorch.carries(pp_group, "gloo", _device()):
            number = next_round(pp_group, "engines")
            board = FailureBoard(pp_group, f"engine/{number}", rank_names(pp_group), _PATIENCE)
            self._mailbox = Mailbox(pp_group, self._checksums, board)
            self._channels = ENGINES.channels(number)

    def _check(self, codecs: dict[str, Codec]) -> None:
        stages = self.virtual_pipeline_model_parallel_size or 1
        varying = self.config.variable_seq_lengths or self.config.mtp_standalone
        shapes = "keeps state between messages of one shape, and shapes vary (variable_seq_lengths or mtp_standalone)"
        for name, codec in codecs.items():
            if not isinstance(codec, Codec):
                raise TypeError(f"{name} is {shown(codec)}; allowed: a codec such as lowbit.codecs.TransformQuant()")
            for fact, problem in {
                "needs the ids of samples, which Megatron's schedules do not pass on": codec.needs_key,
                f"keeps state between messages, and there are {stages} virtual stages": codec.stateful and stages > 1,
                shapes: codec.stateful and varying,
            }.items():
                if problem:
                    text = f"{name} is {codec}, which {fact}"
                    raise ValueError(f"{text}; allowed: formats without, such as GroupInt(bits=6)")

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int] | None,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Override Megatron's method: send and receive payloads; activations go to the next stage, gradients back."""
        config, device = self.config, _device()
        shapes = {"prev": tensor_shape, "next": tensor_shape}
        if config.variable_seq_lengths or config.mtp_standalone:
            found = self._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
            shapes = dict(zip(_SIDES, found, strict=True))
        leaving = {
            "prev": self._packed("backward", tensor_send_prev, self.prev_rank),
            "next": self._packed("forward", tensor_send_next, self.next_rank),
        }
        arriving: dict[str, _IncomingTensor] = {}
        for side, wanted in zip(_SIDES, (recv_prev, recv_next), strict=True):
            if wanted:
                direction, peer = ("forward", self.prev_rank) if side == "prev" else ("backward", self.next_rank)
                arriving[side] = _IncomingTensor(self, direction, peer, shapes[side], device)
        if self._mailbox is not None:
            requests: Any = {f"send_{side}": message for side, message in leaving.items() if message is not None}
            requests |= {f"recv_{side}": None for side in arriving}
        else:
            operations = _p2p._batched_p2p_ops if config.batch_p2p_comm else _p2p._p2p_ops
            requests = operations(
                **{f"tensor_send_{side}": leaving[side] for side in _SIDES},
                **{f"tensor_recv_{side}": arriving[side].message if side in arriving else None for side in _SIDES},
                group=self.pp_group, prev_pipeline_rank=self.prev_rank, next_pipeline_rank=self.next_rank,
            )  # fmt: skip
        if wait_on_reqs or config.batch_p2p_comm:
            for request in requests if isinstance(requests, list) else requests.values():
                if request is not None:
                    request.wait()
            for each in arriving.values():
                each.finish()
            requests = None
        else:
            requests = {
                name: _Request(
                    request, leaving.get(name.removeprefix("send_")), arriving.get(name.removeprefix("recv_"))
                )
                for name, request in requests.items()
            }
        if config.batch_p2p_comm and config.batch_p2p_sync and device.type == "cuda":
            torch.cuda.synchronize()
        received = [arriving[side].tensor if side in arriving else None for side in _SIDES]
        return received[0], received[1], requests

    def _packed(self, direction: str, x: Tensor | None, peer: Any) -> Tensor | Sent | None:
        """Encode a tensor into a message; over Gloo, also start to send it."""
        if x is None:
            return None
        if x.dtype != self.config.pipeline_dtype:
            raise ValueError(f"a tensor to send is {x.dtype}; allowed: pipeline_dtype ({self.config.pipeline_dtype})")
        session = self._sessions[direction, "out"](shape=x.shape, dtype=x.dtype, device=x.device)
        message = torch.empty(session.nbytes() + self._checksums.room, dtype=torch.uint8, device=x.device)
        session.encode(x, out=message[: session.nbytes()], training=torch.is_grad_enabled())
        self.traffic.count(direction, len(message), x.numel())
        place = self.pp_group.rank(), direction == "backward", next(self._numbers[direction, "out"])
        if self._mailbox is not None:
            (sent,) = self._mailbox.send(message, place, self._route(direction, peer, dist.get_rank(), place[-1]))
            return sent
        self._checksums.seal_there(message, *place)
        return message

    def _route(self, direction: str, peer: int, sender: int, number: int) -> Route:
        """The route of a message to or from a peer, with its name for errors."""
        half = len(self._channels) // 2
        channel = self._channels[number % half + half * (direction == "backward")]
        about = f"the {_WORDS[direction]} of rank {sender}"
        return Route(dist.get_group_rank(self.pp_group, peer), channel, about)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _sessions(codec: Codec) -> Callable[..., Session]:
    """Make a function that opens a session of this codec for each shape, and then returns it again."""
    return functools.cache(functools.partial(open_session, codec))


class _IncomingTensor:
    """A message to be received, and its tensor, which `finish` fills."""

    def __init__(
        self, owner: LowBitP2PCommunicator, direction: str, peer: int, shape: Sequence[int] | None, device: torch.device
    ) -> None:
        if shape is None:
            raise ValueError("tensor_shape is None; allowed for a receive: the shape of the tensor")
        dtype, lane = owner.config.pipeline_dtype, (direction, "in")
        self._session = owner._sessions[lane](shape=torch.Size(shape), dtype=dtype, device=device)
        self._checksums = owner._checksums
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device, requires_grad=True)
        self._sender = dist.get_group_rank(owner.pp_group, peer)
        self._place = self._sender, direction == "backward", next(owner._numbers[lane])
        self._about = f"the {_WORDS[direction]} of rank {peer}"
        nbytes = self._session.nbytes()
        if owner._mailbox is not None:
            route = owner._route(direction, peer, peer, self._place[-1])
            self._take: Callable[[], Tensor] = owner._mailbox.expect(route, nbytes, self._place).wait
        else:
            self.message = torch.empty(nbytes + self._checksums.room, dtype=torch.uint8, device=device)
            self._take = self._checked
        self._finished = False

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._session.decode(self._take(), out=self.tensor.detach(), training=torch.is_grad_enabled())

    def _checked(self) -> Tensor:
        if self._checksums.damage_there(self.message, *self._place).item():
            raise damaged(self._about, self._sender)
        return self.message[: self._session.nbytes()]


class _Request:
    """A handle on which Megatron's overlapping schedules wait before they use the tensor."""

    def __init__(self, request: Any, sent: Tensor | Sent | None, arriving: _IncomingTensor | None) -> None:
        self._request, self._sent, self._arriving = request, sent, arriving

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
        self._request = self._sent = None
        if self._arriving is not None:
            self._arriving.finish()
