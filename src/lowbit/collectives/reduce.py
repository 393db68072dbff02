"""`all_reduce`, `reduce_scatter` and `all_gather` in few bits.

Arguments are checked in the caller: an error on the calls' thread would end the group.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs.base import Codec, Summable
from lowbit.codecs.checks import check_choice, check_float, check_int, check_timeout, check_written, is_traced, readable
from lowbit.collectives import algorithms
from lowbit.collectives.algorithms import CHUNK, SMALL, Put, Shards, Take
from lowbit.collectives.calls import TIMEOUT, CollectiveCall, Pending, Transport, queue_of
from lowbit.collectives.exchange import PayloadExchange
from lowbit.escape import shown
from lowbit.wire import pytorch
from lowbit.wire.checksum import check_checksums, sealed_bytes
from lowbit.wire.pytorch import unwrapped_group

P = ParamSpec("P")
T = TypeVar("T")
Op = Literal["sum", "avg"]
Algorithm = Literal["two_shot", "one_shot", "auto"]


def show_overflow(x: Tensor) -> None:
    """Make sums that float16 could not hold infinite: codecs saturate, and loss scaling would not see it."""
    if x.dtype == torch.float16:
        most = torch.finfo(torch.float16).max
        x.masked_fill_(x >= most, torch.inf).masked_fill_(x <= -most, -torch.inf)


def described(x: Tensor) -> str:
    """Format dtype and shape."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def check_summable(codec: object) -> Summable:
    """Return the codec if it can encode flat pieces of any tensor in any order; otherwise raise a TypeError."""
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {shown(codec)}; allowed: a codec such as lowbit.codecs.GroupInt(bits=8)")
    if not isinstance(codec, Summable) or codec.shaped:
        reason = "keeps state between messages" if codec.stateful else "is made for the tokens of activations"
        raise TypeError(
            f"codec is {codec}, which {reason}: it cannot be summed; allowed: a codec without state whose format "
            "does not depend on the tensor's shape, such as GroupInt or Cast"
        )
    return codec


def check_flat(codec: object) -> None:
    """Raise unless the codec can be summed and accepts flat pieces of any length, such as gradients."""
    grain = check_summable(codec).grain
    if grain > 1:
        raise ValueError(
            f"codec is {codec}, for rows of {grain} elements; allowed for gradients: formats for any length, "
            "such as GroupInt"
        )


def check_call(
    codec: object,
    *,
    op: object = "sum",
    algorithm: object = "two_shot",
    transport: object = "auto",
    small: object = SMALL,
    chunk: object = CHUNK,
    timeout: object = TIMEOUT,
    checksums: object = True,
) -> Summable:
    """Check the arguments of a collective, except its tensors; returns the codec."""
    summable = check_summable(codec)
    check_checksums(checksums)
    check_choice("op", op, ("sum", "avg"))
    check_choice("algorithm", algorithm, ("two_shot", "one_shot", "auto"))
    check_choice("transport", transport, ("auto", "messages", "collectives"))
    check_int("small", small, 0, 1 << 60)
    check_int("chunk", chunk, 16, 1 << 30, multiple=16)
    check_timeout(timeout)
    return summable


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Hide a function from `torch.compile`, so that it checks tensors in memory.

    PyTorch's own decorator would import the compiler at once.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            hide: Any = torch.compiler.disable
            return hide(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def check_tensor(name: str, x: Tensor, codec: Summable, group: dist.ProcessGroup) -> None:
    """Raise unless the codec, which may be made for a number of ranks and for whole rows, can encode `x` here."""
    check_float(name, x)
    ranks, devices = group.size(), sorted({device.type for device in group._device_types})
    if x.device.type not in devices:
        raise ValueError(f"{name} is on {x.device}; allowed in this group: {', '.join(devices)}")
    if is_traced(x):
        raise TypeError(f"{name} is traced, and has no memory; allowed: plain tensors, outside torch.func")
    if codec.ranks not in (None, ranks):
        raise ValueError(f"codec is {codec}; allowed in a group of {ranks}: one for {ranks} ranks")
    if x.numel() % codec.grain or (x.dim() > 1 and codec.grain > 1 and x.shape[-1] != codec.grain):
        raise ValueError(
            f"{name} is {described(x)}; allowed with {codec}: (..., {codec.grain}), or flat in multiples of it"
        )


def _check_target(name: str, x: Tensor) -> None:
    check_written(name, x)
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, which is off now; "
            "allowed: a tensor made outside it, or a call inside it"
        )


def _check_errors(errors: Tensor, tensor: Tensor) -> None:
    check_float("errors", errors)
    _check_target("errors", errors)
    like = errors.dtype == torch.float32 and errors.shape == tensor.shape and errors.device == tensor.device
    if not like or not errors.is_contiguous():
        where = f"float32 {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"errors is {described(errors)} on {errors.device}; allowed: contiguous {where}")
    if errors.data_ptr() in _memory(tensor) or tensor.data_ptr() in _memory(errors):
        raise ValueError("errors shares memory with tensor; allowed: a tensor with memory of its own")


def _memory(x: Tensor) -> range:
    """Addresses from the first element to the last."""
    elements = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return range(x.data_ptr(), x.data_ptr() + elements * x.element_size())


@uncompiled
def all_reduce(
    tensor: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None = None,
    op: Op = "sum",
    algorithm: Algorithm = "two_shot",
    async_op: bool = False,
    *,
    chunk: int = CHUNK,
    small: int = SMALL,
    timeout: float = TIMEOUT,
    errors: Tensor | None = None,
    transport: Transport = "auto",
    checksums: bool = True,
) -> Pending | None:
    """Replace a tensor, in place, by its sum or mean over all ranks; bit-identical on all of them.

    Quantization and sums follow AGoQ (arXiv 2605.00539): partial sums are float32, in the order of the ranks, and are
    never quantized more than once. For n elements of b bits, each of W ranks sends 2 (W - 1) / W n b / 8 bytes with
    two_shot (PyTorch's own all-reduce: the same with b = 32), and (W - 1) n b / 8 bytes with one_shot, which is for two
    ranks or for tensors so small that a second round trip costs more than the bytes. The checksum of each message (a
    chunk for a rank) adds 8 bytes.

    Deviations and additions: chunks are encoded while others are sent; PyTorch's own all-reduce sums a tensor of fewer
    than `small` elements in float32, without the codec. With one rank the tensor is unchanged. NaN or infinity in a
    codec group on any rank gives NaN on all ranks; sums of 65504 or more in float16 are infinite.

    Calls on one group run one after the other on a thread. Gloo sends them as messages, independent of other work in
    the group; on other backends a call with `async_op` must not overlap other uses of the group: give it its own group.
    Payload memory is kept between calls: two_shot takes (3 + 1 / W) n b / 8 bytes for the largest tensor.

    Args:
        tensor: float32, bfloat16 or float16, any shape and strides, but no two elements in the same memory; the same
            shape and dtype on all ranks. Strided tensors are copied.
        codec: a stateless format that does not depend on the tensor's shape, such as `GroupInt`; or a `FeatureInt` for
            this number of ranks, of any rank: shards and chunks are then whole rows.
        group: the ranks; None: the default group. A group that `torch.distributed` has not made, or a wrapper such as
            torchft's `ProcessGroupGloo`, works as well. op: "sum" or "avg".
        algorithm: "two_shot", "one_shot", or "auto": one_shot for two ranks and for small payloads.
        async_op: return a `Pending` at once; do not touch the tensor before its `wait()` has returned.
        chunk: most elements of a chunk, a multiple of 16.
        small: tensors with fewer elements are summed in float32.
        timeout: seconds after which a missing or failed peer is an error.
        errors: float32, contiguous, shape of `tensor`: filled with the quantization error of this rank's part, for
            error feedback: add it to the next tensor. Zeros for small tensors.
        transport: "messages" (Gloo between CPUs), PyTorch's "collectives", or "auto": messages if possible.
        checksums: whether an 8-byte checksum follows each payload; the same on all ranks. Sums by PyTorch itself
            (small tensors) have none. With messages, damaged payloads are never decoded; otherwise
            `tensor` may already hold damaged values when the error is raised.

    Raises:
        TypeError: a codec that cannot be summed, or a tensor of another dtype, layout or class, such as a DTensor.
        ValueError: another argument that is not allowed. The group can be used after these two.
        AgreementError: the ranks do not make the same call; the same text on all of them. The group cannot be used any
            more.
        DamagedError: a payload did not arrive as it was sent.
        PeerError: a rank ended or does not answer. The group cannot be used any more. With the transport "collectives"
            the error does not name the rank, and outside Gloo it is PyTorch's own, after the time limit of the group.
    """
    group = unwrapped_group(group)
    ranks = group.size()
    codec = check_call(
        codec, op=op, algorithm=algorithm, transport=transport, small=small, chunk=chunk, timeout=timeout,
        checksums=checksums,
    )  # fmt: skip
    check_tensor("tensor", tensor, codec, group)
    _check_target("tensor", tensor)
    if errors is not None:
        _check_errors(errors, tensor)
    flat = _packed("tensor", tensor)
    rest = None if errors is None else errors.detach().view(-1)
    coded = ranks > 1 and tensor.numel() >= max(1, small)
    algorithm = _chosen(algorithm, tensor.numel(), codec, ranks)
    divisor = ranks if op == "avg" else 1
    kind = algorithms.two_shot if algorithm == "two_shot" else algorithms.one_shot
    sums = partial(kind, codec=codec, chunk=chunk, divisor=divisor)

    def work(exchange: PayloadExchange) -> None:
        if coded:
            sums(flat, exchange=exchange, errors=rest)
            if divisor == 1:
                show_overflow(flat)
        else:
            if ranks > 1 and flat.numel():
                total = flat.float()
                pytorch.wait_within(pytorch.all_reduce_sum(total, group), group, timeout, total.device)
                flat.copy_(total.div_(divisor) if divisor > 1 else total)
            if rest is not None:
                rest.zero_()
        _copy_back(flat, tensor)

    facts = _facts("all_reduce", tensor, codec, op=op, chunk=chunk, small=small, algorithm=algorithm)
    facts |= {"error feedback": "no" if errors is None else "yes"}
    call = CollectiveCall(
        facts=facts, group=group, device=tensor.device, timeout=timeout, work=work, transport=transport,
        layer=codec.layer(), checksums=checksums,
    )  # fmt: skip
    return _started(call, async_op)


def all_reduce_bytes(
    numel: int,
    codec: Codec,
    *,
    rank: int,
    ranks: int,
    algorithm: Algorithm = "two_shot",
    chunk: int = CHUNK,
    small: int = SMALL,
    checksums: bool = True,
) -> int:
    """Return the bytes that a rank sends in an `all_reduce` of `numel` elements; same arguments.

    For small tensors, which PyTorch sums in float32, return the bytes of a ring all-reduce.
    """
    if ranks == 1 or numel < max(1, small):
        return 2 * (ranks - 1) * 4 * numel // ranks
    codec = check_summable(codec)
    if _chosen(algorithm, numel, codec, ranks) == "one_shot":
        return (ranks - 1) * _shard_bytes(
            Shards(numel=numel, ranks=1, chunk=chunk, grain=codec.grain), codec, 0, checksums
        )
    return _two_shot_bytes(Shards(numel=numel, ranks=ranks, chunk=chunk, grain=codec.grain), codec, rank, checksums)


def average_coded(
    put: Put, take: Take, codec: Summable, group: dist.ProcessGroup, *, numel: int, device: torch.device,
    timeout: float, checksums: bool,
) -> Pending:  # fmt: skip
    """Start to replace a tensor that is stored as payloads by its mean over all ranks; bit-identical on all of them.

    This is `all_reduce` by two_shot without its first encoding: stored payloads are sent, the mean's are stored.

    `numel`: the same on all ranks, of which there must be several; a multiple of the codec's `unit`.
    """
    sums = partial(
        algorithms.two_shot_coded, put, take, codec, numel=numel, chunk=CHUNK, divisor=group.size(), device=device
    )
    facts = {"collective": "average of coded tensors", "tensor": f"{numel} elements", "codec": codec.identity()}
    call = CollectiveCall(facts=facts, group=group, device=device, timeout=timeout, work=sums, checksums=checksums)
    return queue_of(group).submit(call)


def average_coded_bytes(numel: int, codec: Summable, *, rank: int, ranks: int, checksums: bool = True) -> int:
    """Return the bytes that a rank sends in an `average_coded` of `numel` elements."""
    return _two_shot_bytes(Shards(numel=numel, ranks=ranks, chunk=CHUNK, grain=codec.unit), codec, rank, checksums)


def _two_shot_bytes(shards: Shards, codec: Summable, rank: int, checksums: bool) -> int:
    owned = [_shard_bytes(shards, codec, owner, checksums) for owner in range(shards.ranks)]
    return sum(owned) - owned[rank] + (shards.ranks - 1) * owned[rank]


def _shard_bytes(shards: Shards, codec: Summable, owner: int, checksums: bool) -> int:
    sizes = [codec.nbytes((shards.size(owner, k),)) for k in range(shards.chunks)]
    return sum(sealed_bytes(size, checksums) for size in sizes)


@uncompiled
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None = None,
    op: Op = "sum",
    async_op: bool = False,
    *,
    chunk: int = CHUNK,
    timeout: float = TIMEOUT,
    transport: Transport = "auto",
    checksums: bool = True,
) -> Pending | None:
    """Write this rank's share of the sum or mean of all inputs; one quantization, sums in float32.

    As in `torch.distributed.reduce_scatter_tensor`, rank r gets elements r n to (r + 1) n - 1 of the sum, in row-major
    order. Each of W ranks sends (W - 1) n b / 8 bytes, with b bits per element, and 8 for each message's checksum.
    With one rank the input is copied.

    Args:
        output: n elements, float32, bfloat16 or float16; no two in the same memory.
        input: W n elements of the dtype that the codec reads.
        codec, group, op, async_op, chunk, timeout, transport, checksums: as for `all_reduce`.

    Raises:
        ValueError: the numbers of elements do not fit; other errors as of `all_reduce`.
    """
    group = unwrapped_group(group)
    algorithm = partial(algorithms.reduce_scatter, divisor=group.size() if op == "avg" else 1)
    call = _copying_call(
        algorithm, output, input, ("output", "input"), codec, group, op=op, chunk=chunk, timeout=timeout,
        transport=transport, checksums=checksums,
    )  # fmt: skip
    return _started(call, async_op)


@uncompiled
def all_gather(
    output: Tensor,
    input: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    chunk: int = CHUNK,
    timeout: float = TIMEOUT,
    transport: Transport = "auto",
    checksums: bool = True,
) -> Pending | None:
    """Gather the inputs of all ranks, one after the other; the results are equal on all ranks.

    As in `torch.distributed.all_gather_into_tensor`. Each of W ranks sends (W - 1) n b / 8 bytes for n b-bit elements,
    and 8 for each message's checksum. A rank's own input goes through the codec, too. With one rank it is copied.

    Args:
        output: W n elements, float32, bfloat16 or float16; no two in the same memory.
        input: n elements.
        codec, group, async_op, chunk, timeout, transport, checksums: as for `all_reduce`.

    Raises:
        ValueError: the numbers of elements do not fit; other errors as of `all_reduce`.
    """
    call = _copying_call(
        algorithms.all_gather, output, input, ("input", "output"), codec, unwrapped_group(group), chunk=chunk,
        timeout=timeout, transport=transport, checksums=checksums,
    )  # fmt: skip
    return _started(call, async_op)


def _copying_call(
    algorithm: Callable[..., None],
    output: Tensor,
    input: Tensor,
    part_and_whole: tuple[str, str],
    codec: Codec,
    group: dist.ProcessGroup,
    *,
    op: Op = "sum",
    chunk: int,
    timeout: float,
    transport: Transport,
    checksums: bool,
) -> CollectiveCall:
    """Build a call that does not change its input. part_and_whole: "output" and "input", a rank's share first."""
    ranks, (part, whole) = group.size(), part_and_whole
    codec = check_call(codec, op=op, transport=transport, chunk=chunk, timeout=timeout, checksums=checksums)
    tensors = {"output": output, "input": input}
    for name, x in tensors.items():
        check_tensor(name, x, codec, group)
    _check_target("output", output)
    share, all_shares = tensors[part], tensors[whole]
    if share.numel() * ranks != all_shares.numel() or share.device != all_shares.device:
        raise ValueError(
            f"{part} has {share.numel()} elements on {share.device}, "
            f"{whole} {all_shares.numel()} on {all_shares.device}; "
            f"allowed: {ranks} times as many in {whole}, one share for each of the {ranks} ranks"
        )
    flat, target = _packed("input", input), _packed("output", output)

    def work(exchange: PayloadExchange) -> None:
        if ranks == 1:
            target.copy_(flat.clone())  # they may overlap
        else:
            algorithm(flat, target, codec, exchange, chunk=chunk)
        _copy_back(target, output)

    name = "reduce_scatter" if part == "output" else "all_gather"
    return CollectiveCall(
        facts=_facts(name, input, codec, op=op, chunk=chunk, output=described(output)), group=group,
        device=input.device, timeout=timeout, work=work, transport=transport, layer=codec.layer(), checksums=checksums,
    )  # fmt: skip


def _started(call: CollectiveCall, async_op: bool) -> Pending | None:
    pending = queue_of(call.group).submit(call)
    return pending if async_op else pending.wait()


def _chosen(algorithm: Algorithm, numel: int, codec: Summable, ranks: int) -> Algorithm:
    return algorithms.automatic_algorithm(ranks, codec.nbytes((numel,))) if algorithm == "auto" else algorithm


def _packed(name: str, x: Tensor) -> Tensor:
    """Return `x` itself as one dimension if it is contiguous, otherwise a copy: Gloo ignores strides."""
    return readable(name, x).contiguous().view(-1)


def _copy_back(flat: Tensor, x: Tensor) -> None:
    """Write `flat` back to `x` if it is a copy."""
    if flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))


def _facts(name: str, x: Tensor, codec: Summable, **more: object) -> dict[str, str]:
    facts = {"collective": name, "tensor": described(x), "codec": codec.identity()}
    return facts | {key: str(value) for key, value in more.items()}
