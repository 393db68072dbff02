"""Few bits between the machines of Transformers' pipeline-parallel inference, `DistributedConfig(pp_size=...)`.

Transformers cuts a model's layers into stages. In each forward pass a stage sends its hidden states to the next in the
model's dtype, and the last stage sends the logits to all others. `low_bit_pipeline_` replaces Transformers' stage:

- Hidden states travel as payloads of a codec, with checksums and a time limit. The size follows from the shape, which
  Transformers derives from the inputs. So receives can be posted before their messages are sent (`Incoming`):
  chunks of a prompt travel while the stages compute.
- While `generate` chooses one token at a time, only the last stage chooses, and sends token ids instead of logits. The
  other stages get scores that allow only this token. Only the last stage samples, so seeds of ranks may differ.
- Otherwise (a call of the model, beam search, `output_logits`) logits travel whole and unchanged.
- In a cache, the layers of other stages are Transformers' `DummyLayer`. Transformers asks the first layer how long the
  cache is. If that belongs to another stage, the cache would always look empty, and padding masks would be wrong.
"""

import functools
import hashlib
import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit import __version__
from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.checks import check_dtype
from lowbit.codecs.foreign import open_session
from lowbit.escape import shown
from lowbit.integrations import engine
from lowbit.pipeline.arguments import check_numbers, dtype_of
from lowbit.wire import pytorch
from lowbit.wire.agreement import agree
from lowbit.wire.checksum import agreed_facts, check_checksums
from lowbit.wire.messages import Expected, Messages, Sent
from lowbit.wire.traffic import Traffic

__all__ = ["LowBitPipelineStage", "low_bit_pipeline_"]

from_transformers = functools.partial(engine, package="transformers", extra="train", tested="5.23.0")
_STAGE = "PipelineStage.communicate", "PipelineStage.broadcast_from_last", "PipelineStage.layer_range_for_rank"
_pipeline = from_transformers("transformers.distributed.pipeline_parallel", *_STAGE, "pipeline_parallel_naive_forward")
_Stage: Any = _pipeline.PipelineStage
_caches = from_transformers("transformers.cache_utils", "DummyLayer", "Cache")

AHEAD = 2
"""Number of receives that are posted ahead."""
SPLIT = 1 << 16
"""Bytes of a payload from which on the ranks that share a stage each send a part of it."""
_MOST_SENT = 4  # messages on their way that a sender keeps
_SIZE_BYTES = 24  # of the message that announces logits: three int64
_SIMPLE = ("greedy_search", "sample")  # modes of `generate` that choose one token at a time
_STRANGE = ("assistant_model", "custom_generate")  # arguments of `generate` that use logits in other ways


def low_bit_pipeline_(
    model: nn.Module, codec: Codec | None = None, *, timeout: float = 120.0, checksums: bool = True
) -> "LowBitPipelineStage":
    """Send the hidden states between the stages of a Transformers model as payloads of a codec.

    Call it on every rank, after `from_pretrained(..., distributed_config=DistributedConfig(pp_size=...))`; another call
    replaces the codec. If the codec does not make hidden states smaller, as for a few tokens of a narrow model, they
    travel in the model's dtype; both ends derive that from the shape.

    Args:
        model: a causal language model that Transformers has cut into stages, in evaluation mode.
        codec: format of the hidden states, without state between messages. None: 8 bits in groups of 64.
        timeout: seconds after which a rank that does not answer is an error.
        checksums: append 8 bytes to each payload, by which the receiver detects damage; the same on all ranks.

    Returns:
        This rank's stage, which counts what it sends; its `remove` restores Transformers' own.

    Raises:
        TypeError, ValueError: an invalid argument, or a model without stages.
        AgreementError: the ranks contradict each other, or one did not come in time; the same text on every rank.
    """
    codec = check_stateless(GroupInt(bits=8, group=64) if codec is None else codec)
    check_numbers(0, timeout)
    check_checksums(checksums)
    own = getattr(model, "_pp_stage", None)
    if not isinstance(own, _Stage):
        raise ValueError(
            f"model is {type(model).__name__} without pipeline stages; allowed: one that was loaded with "
            "distributed_config=DistributedConfig(pp_size=2), or more"
        )
    _check_mode(model)
    check_dtype(dtype_of(model))
    if isinstance(own, LowBitPipelineStage):
        own.remove()
        own = own.own
    return LowBitPipelineStage(own, model, codec, float(timeout), checksums)


def connect_stages_(model: Any, codec: Codec, *, group: Any, timeout: float, checksums: bool) -> "LowBitPipelineStage":
    """Let the ranks of a group call and generate with a model that somebody else has cut, a stage on each.

    Args:
        model: has identities in place of other stages' modules, is in evaluation mode, and has no stage yet.
        group: over Gloo. The others: as for `low_bit_pipeline_`.

    Raises:
        AgreementError: the ranks contradict each other, or one did not come in time; the same text on every rank.
    """
    forward = model.forward
    run = functools.partial(_pipeline.pipeline_parallel_naive_forward, model, forward, inspect.signature(forward))
    model.forward = functools.wraps(forward)(run)
    return LowBitPipelineStage(_Place(group), model, codec, timeout, checksums)


def check_stateless(codec: Any) -> Codec:
    """Return the codec if it can send hidden states in inference."""
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {shown(codec)}; allowed: a codec of lowbit")
    if codec.stateful:
        raise ValueError(
            f"codec is {codec}, which keeps state between messages of one shape; allowed in inference, whose shapes "
            "change: codecs without state, such as GroupInt, TAHQuant, BlockFloat8 or Cast"
        )
    return codec


class _Place(_Stage):
    """A rank's place in a pipeline that has a stage on each rank of a group, as Transformers describes it."""

    def __init__(self, group: Any) -> None:
        self.pp_group, self.pp_rank, self.pp_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.pp_is_first_stage, self.pp_is_last_stage = self.pp_rank == 0, self.pp_rank == self.pp_size - 1
        self.pp_prev_rank = None if self.pp_is_first_stage else self.pp_rank - 1
        self.pp_next_rank = None if self.pp_is_last_stage else self.pp_rank + 1


class LowBitPipelineStage(_Stage):
    """The stage of Transformers' pipeline that `low_bit_pipeline_` installs.

    Attributes:
        codec: format of the hidden states.
        own: the stage of Transformers that this one replaces.
        traffic: counts hidden states sent (`forward_bytes`, `forward_elements`), seconds spent on coding and waiting,
            and bytes of logits and token ids (`backward_bytes`).
    """

    def __init__(self, own: Any, model: Any, codec: Codec, timeout: float, checksums: bool) -> None:
        self.__dict__.update(vars(own))
        self.own, self.codec, self.traffic = own, codec, Traffic()
        self._dtype = dtype_of(model)  # Transformers passes that of the first parameter, which may have 4 bits
        config = model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        group: Any = own.pp_group
        if "gloo" not in dist.get_backend_config(group):  # host tensors travel by Gloo, next to NCCL's group
            options: Any = {"timeout": timedelta(seconds=timeout), "use_local_synchronization": True}
            group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", **options)
        numbers = f"{config.model_type}, {config.num_hidden_layers} layers, {config.hidden_size} wide"
        facts = {
            "codec": f"{codec} [{codec.fingerprint()}]",
            "model": f"{numbers}, {self._vocabulary} tokens, {self._dtype}",
            "lowbit version": __version__,
            "transformers version": from_transformers("transformers").__version__,
            **agreed_facts(checksums),
        }
        agree(group, facts, timeout, topic="transformers pipeline")
        self._group, self._timeout = group, timeout
        shared = (getattr(model, "_tp_size", None) or 1) > 1
        self._sharing = model._device_mesh.get_group("tp") if shared else None  # ranks that share the stage's layers
        self._shares = Shares(codec, self._sharing, timeout)
        self._messages = Messages(group, "transformers pipeline", timeout=timeout, checksums=checksums)
        self._outgoing = Outgoing(self._messages, self.pp_next_rank)
        self._incoming = Incoming(self._messages, self.pp_prev_rank)
        self._batch, self._tokens = 1, 1  # of the forward pass
        self._simple = False  # no argument of `generate` forbids choosing on the last stage
        self._choosing = False  # the last stage sends tokens, not logits
        self._model = weakref.ref(model)
        model._pp_stage = self
        base = getattr(model, model.base_model_prefix)
        own_only = functools.partial(_own_layers_only, _places_in_cache(base))
        self._hook = base.register_forward_pre_hook(own_only, with_kwargs=True)
        model.generate = self._generating(model.generate)
        model._get_logits_processor = self._choosing_last(model._get_logits_processor)

    def remove(self) -> None:
        """Restore Transformers' own stage; call it on every rank."""
        model = self._model()
        if model is not None and getattr(model, "_pp_stage", None) is self:
            model._pp_stage = self.own
            self._hook.remove()
            for name in ("generate", "_get_logits_processor"):
                model.__dict__.pop(name, None)

    def communicate(
        self,
        operation: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tensor: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor | None:
        """Send hidden states to the next stage, or receive those of the previous one; Transformers calls this.

        Raises:
            RuntimeError: the model trains, or gradients are enabled.
            PeerError: a neighbour ended, or did not answer in time. DamagedError: a message arrived damaged.
        """
        dtype = self._dtype
        _check_mode(self._model())
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients are enabled, and this pipeline has no backward pass; allowed: calls within torch.no_grad()"
            )
        if operation == "recv_forward" and not self.pp_is_first_stage:
            assert shape is not None  # Transformers derives it from the inputs
            self._batch, self._tokens = shape[0], shape[1]
            nbytes = self._shares.nbytes(shape, dtype, device)
            with self.traffic.timing("wait_seconds"):
                payload = self._incoming.receive(nbytes, f"hidden states {tuple(shape)}")
            with self.traffic.timing("codec_seconds"):
                return self._shares.decode(payload, shape, dtype, device)
        if operation == "send_forward" and not self.pp_is_last_stage:
            assert tensor is not None
            self._batch, self._tokens = tensor.shape[0], tensor.shape[1]
            with self.traffic.timing("codec_seconds"):
                payload, elements = self._shares.encode(tensor.detach().to(dtype))
            with self.traffic.timing("wait_seconds"):
                nbytes = self._outgoing.send(payload)
            self.traffic.count("forward", nbytes, elements)
            return None
        return super().communicate(operation, device=device, dtype=dtype, tensor=tensor, shape=shape)

    def broadcast_from_last(self, tensor: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the logits of this pass on every stage; if tokens are sent instead, zeros on all but the last stage.

        Raises:
            PeerError, DamagedError: as `communicate`.
            ValueError: the last stage announces logits of a shape that is impossible in this pass.
        """
        last, dtype = self.pp_size - 1, self._dtype
        if self.pp_is_last_stage:
            assert tensor is not None
            logits = tensor.to(dtype).contiguous()
            if not self._choosing:
                self._to_others(torch.tensor(logits.shape), logits)
            return logits
        if self._choosing:
            return torch.zeros(1, 1, 1, dtype=dtype, device=device).expand(self._batch, 1, self._vocabulary)
        shape = self._messages.receive(_SIZE_BYTES, last, "shape of logits").view(torch.int64).tolist()
        if shape[0] != self._batch or not 0 <= shape[1] <= self._tokens or not 0 < shape[2] <= 2 * self._vocabulary:
            raise ValueError(
                f"the last stage announces logits of {tuple(shape)}; expected at most "
                f"{(self._batch, self._tokens, self._vocabulary)}: do all ranks have the same inputs?"
            )
        logits = torch.empty(shape, dtype=dtype)
        flat = self._messages.receive(logits.numel() * dtype.itemsize, last, "logits")
        logits.view(-1).view(torch.uint8).copy_(flat)
        self._outgoing.drain()
        return logits.to(device)

    def choose(self, scores: Tensor, *, sample: bool) -> Tensor:
        """Choose a token of each sequence on the last stage; return scores that allow only this token on all stages.

        Args:
            scores: (batch, vocabulary), after all processors; on other stages only their shape counts.
            sample: draw by probability, as `generate` would with the same random numbers; False: take the largest.
        """
        if self.pp_is_last_stage:
            if sample:
                devices = [] if scores.device.type == "cpu" else [scores.device]
                with torch.random.fork_rng(devices, device_type=scores.device.type if devices else "cuda"):
                    tokens = torch.multinomial(torch.softmax(scores, -1), 1)
                if self._sharing is not None:  # these ranks have the same scores, but their own random numbers
                    dist.broadcast(tokens, group_src=0, group=self._sharing)
            else:
                tokens = scores.argmax(-1, keepdim=True)
            self._to_others(tokens)
        else:
            payload = self._messages.receive(8 * scores.shape[0], self.pp_size - 1, "tokens")
            tokens = payload.view(torch.int64).view(-1, 1).to(scores.device)
            self._outgoing.drain()
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def _to_others(self, *tensors: Tensor) -> None:
        sent: list[Sent] = []
        for tensor, rank in itertools.product(tensors, range(self.pp_size - 1)):
            sent.append(self._messages.send(tensor, rank))
            self.traffic.count("backward", sent[-1].message.numel(), tensor.numel())
        with self.traffic.timing("wait_seconds"):
            for each in sent:
                each.wait()

    def _generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(generate)

        @functools.wraps(generate)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            self._simple = not any(given.get(name) for name in _STRANGE)
            # A message of an unexpected size would end the process inside Gloo; other tokens would give wrong text.
            agree(self._group, _inputs(given), self._timeout, topic="inputs of generate")
            try:
                return generate(*args, **kwargs)
            finally:
                self._simple = self._choosing = False

        return wrapped

    def _choosing_last(self, processors_of: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(processors_of)
        def wrapped(generation_config: Any, *args: Any, **kwargs: Any) -> Any:
            config, processors = generation_config, processors_of(generation_config, *args, **kwargs)
            shown = config.return_dict_in_generate and (config.output_scores or config.output_logits)
            guided = config.guidance_scale not in (None, 1)  # its processor calls the model
            one_by_one = config.get_generation_mode().value in _SIMPLE and not config.is_assistant
            self._choosing = self._simple and one_by_one and not shown and not guided
            if not self._choosing:
                return processors
            sample = bool(config.do_sample)
            before = processors if self.pp_is_last_stage else ()  # other stages have no logits to process
            return type(processors)([*before, _Choice(self, sample)])

        return wrapped


def _inputs(given: Mapping[str, Any]) -> dict[str, str]:
    """Shapes and digests of all tensors passed to `generate`, which must be the same on all ranks."""
    facts: dict[str, str] = {}
    for name, x in sorted((given | given.get("kwargs", {})).items()):
        if isinstance(x, Tensor):
            digest = hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            facts[name] = f"{tuple(x.shape)}, digest {digest.hexdigest()[:12]}"
    return facts


@dataclass
class _Choice:
    """The last processor of scores in `generate`. A class: the signature of a function's `__call__` takes 1 ms."""

    stage: LowBitPipelineStage
    sample: bool

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.stage.choose(scores, sample=self.sample)


def _places_in_cache(base: Any) -> set[int]:
    """Return the numbers under which a decoder's modules find their keys, values or states in a cache.

    They are those of the innermost modules: a layer may hold several of attention, with other numbers than its own.
    """
    numbered = [module for module in base.modules() if hasattr(module, "layer_idx")]
    return {
        module.layer_idx
        for module in numbered
        if not any(hasattr(each, "layer_idx") for each in module.modules() if each is not module)
    }


def _own_layers_only(held: set[int], module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Leave the layers of other stages out of a cache, so that its length is that of a layer of this stage."""
    cache: Any = kwargs.get("past_key_values")
    if isinstance(cache, _caches.Cache):
        for index, layer in enumerate(cache.layers):
            if index not in held and not isinstance(layer, _caches.DummyLayer):
                cache.layers[index] = _caches.DummyLayer()


def _check_mode(model: Any) -> None:
    if model.training:
        raise RuntimeError("the model is in training mode, and this pipeline is for inference; allowed: model.eval()")


class Outgoing:
    """The sender's end. `peer`: the next stage, or None on the last one."""

    def __init__(self, messages: Messages, peer: int | None) -> None:
        self._messages, self._peer = messages, peer
        self._posted: deque[int] = deque()  # sizes of the receiver's posted receives, in bytes of payload
        self._sent: deque[Sent] = deque()

    def send(self, payload: Tensor) -> int:
        """Start to send and return the bytes that travel; wait only while many messages are on their way."""
        size = room = payload.numel()
        total = 0
        while self._posted and (room := self._posted.popleft()) < size:
            total += self._put(payload[:0], room)
        total += self._put(payload, max(room, size))
        while len(self._posted) < AHEAD:
            self._posted.append(size)
        while len(self._sent) > _MOST_SENT:
            self._sent.popleft().wait()
        return total

    def drain(self) -> None:
        while self._sent:
            self._sent.popleft().wait()

    def _put(self, payload: Tensor, expected: int) -> int:
        assert self._peer is not None  # the last stage sends none
        self._sent.append(self._messages.send(payload, self._peer, expected=expected))
        return self._sent[-1].message.numel()


class Incoming:
    """The receiver's end. `peer`: the previous stage, or None on the first one.

    Gloo sends a message once its receive is posted. If that happened only when the message is needed, the link would be
    idle while the receiver computes, and it would wait for another round trip. So it keeps some receives posted, each
    as large as the last message, and the sender keeps track of them. A shorter message fits: Gloo fills the beginning.
    For each receive that is too small for the next message the sender sends an empty one, and the receiver posts
    another.
    """

    def __init__(self, messages: Messages, peer: int | None) -> None:
        self._messages, self._peer = messages, peer
        self._posted: deque[tuple[int, Expected]] = deque()

    def receive(self, size: int, about: str) -> Tensor:
        """Wait for the next payload, uint8 (size,) on the CPU. `about`: its name in errors."""
        short: list[Expected] = []
        while self._posted and self._posted[0][0] < size:
            short.append(self._posted.popleft()[1])
        found = self._posted.popleft()[1] if self._posted else self._post(size, about)
        while len(self._posted) < AHEAD:
            self._posted.append((size, self._post(size, "hidden states")))
        for expected in short:
            expected.wait(0)
        return found.wait(size)

    def _post(self, size: int, about: str) -> Expected:
        assert self._peer is not None  # the first stage receives none
        return self._messages.expect(size, self._peer, about)


class Shares:
    """Splits the rows of hidden states among the ranks of a `group` that share a stage, and puts them together again.

    These ranks hold the same hidden states, so without this a link would carry them once for each rank.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._codec, self._group, self._timeout = codec, group, timeout
        self.ranks = 1 if group is None else dist.get_world_size(group)

    def encode(self, x: Tensor) -> tuple[Tensor, int]:
        """Encode this rank's share of hidden states (batch, tokens, width); return payload and number of elements."""
        shape = self._shape(x.shape)
        if shape != x.shape:
            rows = x.reshape(-1, x.shape[-1])
            rows = F.pad(rows, (0, 0, 0, shape[1] * self.ranks - len(rows)))
            x = rows.view(self.ranks, *shape)[dist.get_rank(self._group)]
        return open_session(self._codec, shape=x.shape, dtype=x.dtype, device=x.device).encode(x), x.numel()

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        return open_session(self._codec, shape=self._shape(shape), dtype=dtype, device=device).nbytes()

    def decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Decode this rank's share and gather those of the others; return the whole hidden states."""
        part = self._shape(shape)
        session = open_session(self._codec, shape=part, dtype=dtype, device=device)
        if part == torch.Size(shape):
            return session.decode(payload.to(device))
        assert self._group is not None
        payload = payload.to("cpu" if "gloo" in dist.get_backend_config(self._group) else device)
        parts = payload.new_empty(self.ranks * payload.numel())
        work = pytorch.gather(parts, payload, self._group, async_op=True)
        pytorch.wait_within(work, self._group, self._timeout, payload.device)
        states = [session.decode(each.to(device)).view(part[1], -1) for each in parts.view(self.ranks, -1)]
        return torch.cat(states)[: shape[0] * shape[1]].view(shape)

    def _shape(self, shape: tuple[int, ...]) -> torch.Size:
        """Return the shape of what a rank sends: its share of the rows, or everything if that is small."""
        whole = torch.Size(shape)
        if self.ranks == 1 or self._codec.nbytes(whole) < SPLIT:
            return whole
        return torch.Size((1, -(-shape[0] * shape[1] // self.ranks), shape[2]))
