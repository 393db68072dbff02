"""`lowbit.integrations.megatron` under Megatron-Core's own schedules, without CUDA.

Of Megatron's, what asks for a GPU is replaced by the CPU: `torch.zeros(device="cuda")` in the schedules,
`torch.cuda.current_device` and `torch.cuda.synchronize` in its own communicator.
"""

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("megatron.core")

from benchmarks.megatron_layers import core
from lowbit.codecs import AQSGD, Cast, GroupInt, TransformQuant
from lowbit.collectives import AgreementError
from lowbit.integrations import EngineError, megatron
from lowbit.integrations.megatron import LowBitP2PCommunicator
from tests.processes import Failure, Ranks, on_ranks
from tests.refused import refused

ModelType = core("enums").ModelType
schedules, p2p_communication = core("pipeline_parallel.schedules"), core("pipeline_parallel.p2p_communication")
ProcessGroupCollection = core("process_groups_config").ProcessGroupCollection
SEQUENCE, BATCH, WIDTH, MICRO_BATCHES, VOCABULARY = 12, 2, 32, 4, 64
SHAPE, EXACT = (SEQUENCE, BATCH, WIDTH), Cast(dtype=torch.float32)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of this module alone."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def config_of(**changes: Any) -> Any:
    settings = {
        "num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 2, "pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.float32, "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    return core("transformer.transformer_config").TransformerConfig(**settings | changes)


class Part(nn.Module):
    """Half a model, as Megatron's schedules call it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.vp_stage = None
        first = dist.get_rank() == 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = None if first else nn.Linear(WIDTH, VOCABULARY)
        self.input: Any = None
        self.to(config.pipeline_dtype)

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.T) if self.embedding is not None else self.input
        x = x + self.body(x)
        return x if self.head is None else self.head(x)


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    zeros = torch.zeros

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return zeros(*args, device="cpu" if device == "cuda" else device, **kwargs)

    with (
        mock.patch.object(torch, "zeros", on_cpu),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield


def trained(codecs: dict[str, Any] | None, *, steps: int = 3, evaluate: bool = False, **changes: Any) -> Any:
    """Train by Megatron's 1F1B: losses, a hash of the weights, and the communicator. `codecs`: None for Megatron's."""
    config = config_of(**changes)
    world = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    model = Part(config)
    kind = p2p_communication.P2PCommunicator if codecs is None else LowBitP2PCommunicator
    link = kind(world, config, **codecs or {})
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroupCollection(tp=alone, cp=alone, pp=world, embd=None, pos_embd=None, dp_cp=alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    losses: list[float] = []

    def step_of(batches: Iterator[Tensor], part: Part) -> Any:
        tokens = next(batches)

        def loss_of(output: Tensor) -> Any:
            loss = nn.functional.cross_entropy(output.float().flatten(0, 1), tokens.T.flatten())
            return loss, float(loss)

        return part(tokens), loss_of

    with without_cuda():
        for step in range(steps):
            lengths = [SEQUENCE + (i if config.variable_seq_lengths else 0) for i in range(MICRO_BATCHES)]
            batches = [torch.randint(VOCABULARY, (BATCH, length), generator=generator) for length in lengths]
            last = evaluate and step == steps - 1
            with torch.no_grad() if last else contextlib.nullcontext():
                told = schedules.forward_backward_pipelining_without_interleaving(
                    forward_step_func=step_of, data_iterator=iter(batches), model=model,
                    num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=last,
                    p2p_communicator=link, pg_collection=groups,
                )  # fmt: skip
            losses += told
            optimizer.step()
            optimizer.zero_grad()
    weights = b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
    return SimpleNamespace(losses=losses, weights=hashlib.sha256(weights).hexdigest(), link=link)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, torch.float32),
        ({"batch_p2p_comm": False}, torch.float32),
        ({"variable_seq_lengths": True}, torch.float32),
        ({"deallocate_pipeline_outputs": True}, torch.bfloat16),
        ({}, torch.float16),
    ],
)
@on_ranks
def test_exact_formats_train_bit_for_bit_as_megatron_does(changes: dict[str, Any], dtype: torch.dtype):
    own = trained(None, pipeline_dtype=dtype, **changes)
    ours = trained({"forward": Cast(dtype=dtype)}, pipeline_dtype=dtype, **changes)
    assert len(own.losses) == 3 * MICRO_BATCHES * dist.get_rank()
    assert (own.losses, own.weights) == (ours.losses, ours.weights)


@pytest.mark.parametrize(
    ("codecs", "changes"),
    [
        ({}, {}),
        ({"forward": GroupInt(bits=4, group=32)}, {"variable_seq_lengths": True}),
        ({}, {"pipeline_dtype": torch.bfloat16, "batch_p2p_comm": False}),
    ],
)
@on_ranks
def test_few_bits_train_nearly_as_megatron_does(codecs: dict[str, Any], changes: dict[str, Any]):
    """The last step is an evaluation, which leaves the state of stateful codecs alone."""
    own, ours = (trained(each, evaluate=True, **changes) for each in (None, codecs))
    traffic = ours.link.traffic
    if dist.get_rank():
        assert ours.losses != own.losses
        assert ours.losses == pytest.approx(own.losses, abs=0.1)  # of messages of 768 elements: single ones are noisy
        assert 1.5 < traffic.backward_bits < 9
        assert traffic.forward_bits == 0
    else:
        assert 2 < traffic.forward_bits < 9  # a checksum is 64 bits behind 768 elements
        assert traffic.backward_bits == 0


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks
def test_methods_of_interleaved_schedules(overlap: bool):
    """A ring, with activations both ways round."""
    config = config_of(batch_p2p_comm=not overlap, overlap_p2p_comm=overlap, virtual_pipeline_model_parallel_size=2)
    codec = GroupInt(bits=8, group=32)
    link = LowBitP2PCommunicator(dist.group.WORLD, config, forward=codec, backward=codec)
    assert link.virtual_pipeline_model_parallel_size == 2
    sent = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    own, other = sent[dist.get_rank()], codec.round_trip(sent[1 - dist.get_rank()])
    for method in (link.send_forward_recv_forward, link.send_backward_recv_backward):
        received = method(own, True, SHAPE, overlap_p2p_comm=overlap)
        if overlap:
            received, handles = received
            for handle in [*handles.values(), *handles.values()]:
                handle.wait()
        assert torch.equal(received, other)
        assert received.requires_grad


@on_ranks
def test_ranks_with_other_formats_are_told_before_the_first_byte():
    codec = GroupInt(bits=4 + dist.get_rank(), group=32)
    with pytest.raises(AgreementError, match=r"forward codec: GroupInt\(bits=4.*GroupInt\(bits=5"):
        LowBitP2PCommunicator(dist.group.WORLD, config_of(), forward=codec, timeout=20)


def damaging() -> None:
    link = LowBitP2PCommunicator(dist.group.WORLD, config_of(), forward=EXACT)
    if dist.get_rank():
        link.recv_forward(SHAPE, False)
        return
    seal = link._checksums.seal

    def damage(message: Tensor, *place: int) -> None:
        seal(message, *place)
        message[5] += 1

    link._checksums.seal = damage
    link.send_forward(torch.ones(SHAPE), False)


def test_a_changed_payload_is_noticed(ranks: Ranks):
    outcome = ranks.outcomes(damaging)[1]
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.text[:37]) == ("DamagedError", "the activation of rank 0 is damaged: ")


def test_wrong_settings_and_tensors_are_refused(alone: dist.ProcessGroup):
    def link(codecs: dict[str, Any], **changes: Any) -> Any:
        config = config_of()
        for name, value in changes.items():  # after its own checks, which know of some of them
            setattr(config, name, value)
        return lambda: LowBitP2PCommunicator(alone, config, **codecs)

    made, double = link({})(), torch.ones(1, 1, WIDTH, dtype=torch.float64)
    nothing = {"tensor_send_next": None, "tensor_send_prev": None, "recv_next": False}
    refused(
        (link({"forward": "int4"}), TypeError, "forward is 'int4'; allowed: a codec"),
        (link({"forward": AQSGD()}), ValueError, "needs the ids of samples"),
        (link({}, virtual_pipeline_model_parallel_size=2), ValueError, "and there are 2 virtual stages; allowed"),
        (link({"forward": TransformQuant()}, variable_seq_lengths=True), ValueError, "shapes vary"),
        (link({"forward": EXACT}, use_ring_exchange_p2p=True), ValueError, "use_ring_exchange_p2p is True"),
        (link({"forward": EXACT}, pipeline_dtype=torch.float64), ValueError, "pipeline_dtype is torch.float64"),
        (link({"timeout": 0}), ValueError, "timeout is 0"),
        (link({"checksums": 1}), TypeError, "checksums is 1"),
        (lambda: made.send_forward(double, False), ValueError, "send is torch.float64; allowed: .*float32"),
        (lambda: made._communicate(**nothing, recv_prev=True, tensor_shape=None), ValueError, "tensor_shape is None"),
    )


def test_another_megatron_is_one_error(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.delattr(p2p_communication, "P2PCommunicator")
        with pytest.raises(EngineError, match=r"megatron-core .* has no megatron.core.*P2PCommunicator; lowbit works"):
            importlib.reload(megatron)
    importlib.reload(megatron)
