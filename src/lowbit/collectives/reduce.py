"""`all_reduce`, `reduce_scatter` and `all_gather` in few bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import TAHQuant
from lowbit.codecs.base import FLOATS, Codec, check_choice, check_int
from lowbit.collectives import algorithms
from lowbit.collectives.calls import Call, Pending, Transport, line_of, tagged
from lowbit.collectives.checks import check_errors, check_fit, check_pair, check_written, described
from lowbit.collectives.exchange import Wire
from lowbit.collectives.hierarchy import nodes_of, sum_by_nodes
from lowbit.collectives.shards import Shards
from lowbit.ranks import pytorch
from lowbit.ranks.checksum import check_checksums, sealed_bytes
from lowbit.ranks.groups import default_group

Op = Literal["sum", "avg"]
Algorithm = Literal["two_shot", "one_shot", "auto"]

CHUNK = 1 << 20
"""Most elements of a piece. Measured on 4 ranks, 64 MB, 1 Gbit/s and unlimited: smaller ones cost more processor time
than their overlap gives, larger ones leave the link idle."""
SMALL = 1 << 14
"""Elements below which the engine's own collective is used."""
TIMEOUT = 120.0
"""Seconds in which a missing or failed peer is an error."""


def all_reduce(
    tensor: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None = None,
    op: Op = "sum",
    algorithm: Algorithm = "two_shot",
    async_op: bool = False,
    *,
    node_size: int = 1,
    chunk: int = CHUNK,
    small: int = SMALL,
    timeout: float = TIMEOUT,
    errors: Tensor | None = None,
    transport: Transport = "auto",
    checksums: bool = True,
) -> Pending | None:
    """Replace a tensor, in place, by its sum or mean over all ranks; bit-identical on all of them.

    Quantizes and sums as AGoQ (arXiv 2605.00539) does: partial sums are float32, in the order of the ranks, and never
    travel in 8 bits more than once. Bytes that each of W ranks sends, for n elements of b bits: two_shot
    2 (W - 1) / W n b / 8, the engine's own all-reduce with b for 32; one_shot (W - 1) n b / 8, so it is for two ranks
    or for tensors so small that a second round trip costs more than the bytes. Each message, a chunk for a rank, has 8
    bytes more, its checksum.

    Deviations and additions: pieces of `chunk` elements are coded while others travel; a tensor of fewer than `small`
    elements goes through the engine's own all-reduce in float32, without the codec; nodes may be told apart. With one
    rank the tensor stays as it is. NaN or infinity in a group of any rank's elements is NaN there on all.

    Calls on one group go through a thread of its own one after the other. Gloo sends them as messages beside whatever
    else the group does; on other backends a call with `async_op` must not overlap other uses of the group: give it
    one of its own. Memory for payloads is kept between calls: two_shot takes (3 + 1 / W) n b / 8 bytes for the
    largest tensor.

    Args:
        tensor: float32, bfloat16 or float16, any shape and strides; the same shape and dtype on all ranks.
        codec: a format without state that does not depend on the tensor's shape, such as `GroupInt`; or `FeatureInt4`
            for as many ranks, of any rank's part: shards and chunks are then whole rows.
        group: the ranks; None: the default group.
        op: "sum" or "avg". algorithm: "two_shot", "one_shot", or "auto": by ranks and bytes alone, one_shot for two
            ranks and for small payloads.
        async_op: return at once; the tensor must not be touched before `wait()` on what is returned.
        node_size: so many successive ranks share a node, a divisor of the ranks. Sums inside a node travel in float32
            through the engine, and each element leaves a node once, coded. 1: no nodes.
        chunk: most elements of a piece, a multiple of 16. small: see above.
        timeout: seconds in which a missing or failed peer is an error.
        errors: float32, contiguous, shape of `tensor`: filled with what quantization took from this rank's part, for
            error feedback: add it to the next tensor. Zeros for small tensors. Not with nodes.
        transport: "messages" (Gloo between CPUs), "collectives" of the engine, or "auto", the first where it works.
        checksums: whether 8 bytes behind each payload tell if it arrived as it was sent; the same on all ranks. What
            the engine itself adds up (small tensors, sums inside a node) has none. With messages, nothing that is
            damaged is decoded; else `tensor` may hold what came of it by the time that the error is raised.

    Returns:
        A `Pending` with `wait()`; None without `async_op`.

    Raises:
        TypeError: a codec that cannot be summed, a tensor of another dtype.
        ValueError: an argument that cannot be.
        AgreementError: the ranks do not make the same call; the same text on all of them.
        DamagedError: what a rank sent did not arrive as it was.
        PeerError: a rank ended or does not answer. The group is of no use any more. With the transport "collectives" it
            is the engine's own RuntimeError, which does not say who.
    """
    group = group or default_group()
    ranks = dist.get_world_size(group)
    _check(tensor, codec, op, chunk=chunk, timeout=timeout, checksums=checksums)
    check_call(codec, group, algorithm=algorithm, node_size=node_size, small=small)
    check_choice("transport", transport, ("auto", "messages", "collectives"))
    check_fit("tensor", tensor, codec, ranks, node_size)
    check_written("tensor", tensor)
    check_errors(errors, tensor, node_size)
    divisor = ranks if op == "avg" else 1
    facts = _facts("all_reduce", tensor, codec, op=op, chunk=chunk, small=small)
    algorithm = _chosen(algorithm, -(-tensor.numel() // node_size), codec, ranks // node_size)
    facts |= {"algorithm": algorithm, "node size": str(node_size)}
    facts["error feedback"] = "no" if errors is None else "yes"
    flat = tensor.detach().reshape(-1)  # the tensor itself where it is contiguous, else a copy
    rest = None if errors is None else errors.view(-1)
    coded = ranks > 1 and tensor.numel() >= max(1, small)
    kind = algorithms.two_shot if algorithm == "two_shot" else algorithms.one_shot
    sums = partial(kind, codec=codec, chunk=chunk, divisor=divisor)

    def between_nodes(part: Tensor) -> None:
        nodes = nodes_of(group, node_size, timeout).between
        if node_size == ranks:  # a single node: nothing is coded
            part.div_(divisor)
            return
        told = _facts("all_reduce between nodes", part, codec, op=op)
        call = Call(
            facts=told, group=nodes, device=part.device, timeout=timeout,
            work=lambda wire: (sums(part, wire=wire), wire.finish())[0], transport=transport, checksums=checksums,
        )  # fmt: skip
        line_of(nodes).submit(call).wait()

    def work(wire: Wire) -> None:
        if not coded:
            _plain(flat, group, ranks, divisor, rest, timeout)
        elif node_size > 1:
            sum_by_nodes(flat, nodes_of(group, node_size, timeout), between_nodes, timeout)
        else:
            sums(flat, wire=wire, errors=rest)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
        wire.finish()

    return _submit(facts, group, tensor.device, timeout, work, transport, async_op, codec.layer(), checksums)


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
    """Bytes that a rank sends in an `all_reduce` of so many elements, without nodes: known without data.

    Of small tensors, which the engine sums in float32: what a ring sends. Other arguments are those of `all_reduce`.
    """
    if ranks == 1 or numel < max(1, small):
        return 2 * (ranks - 1) * 4 * numel // ranks
    everything = _chosen(algorithm, numel, codec, ranks) == "one_shot"
    shards = Shards(numel=numel, ranks=1 if everything else ranks, chunk=chunk, grain=codec.grain)

    def coded(owner: int) -> int:
        sizes = [codec.nbytes((shards.size(owner, k),)) for k in range(shards.chunks)]
        return sum(sealed_bytes(size, checksums) for size in sizes)

    if everything:
        return (ranks - 1) * coded(0)
    return sum(coded(other) for other in range(ranks) if other != rank) + (ranks - 1) * coded(rank)


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
    """Write this rank's share of the sum or mean of everybody's input; one quantization, sums in float32.

    As `torch.distributed.reduce_scatter_tensor`: rank r gets elements r n to (r + 1) n - 1 of the sum, in row-major
    order. Bytes that each of W ranks sends, with b bits an element: (W - 1) n b / 8,
    and 8 for each message's checksum. With one rank the input is copied.

    Args:
        output: n elements, any float dtype. input: W n elements of the dtype that the codec reads.
        codec, group, op, async_op, chunk, timeout, transport, checksums: as for `all_reduce`.

    Raises:
        As `all_reduce`; ValueError where the numbers of elements do not fit.
    """
    group = group or default_group()
    ranks = dist.get_world_size(group)
    _check(input, codec, op, chunk=chunk, timeout=timeout, name="input", checksums=checksums)
    check_pair("output", output, "input", input, ranks)
    check_fit("output", output, codec, ranks)
    check_fit("input", input, codec, ranks)
    facts = _facts("reduce_scatter", input, codec, op=op, chunk=chunk, output=described(output))
    check_written("output", output)
    flat, target = input.detach().reshape(-1), output.detach().reshape(-1)
    divisor = ranks if op == "avg" else 1

    def work(wire: Wire) -> None:
        if ranks == 1:
            target.copy_(flat)
        else:
            algorithms.reduce_scatter(flat, target, codec, wire, chunk=chunk, divisor=divisor)
        if target.data_ptr() != output.data_ptr():
            output.copy_(target.view(output.shape))
        wire.finish()

    return _submit(facts, group, input.device, timeout, work, transport, async_op, codec.layer(), checksums)


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
    """Write everybody's input, one after the other, as the codec lets it through: the same on all ranks.

    As `torch.distributed.all_gather_into_tensor`. Bytes that each of W ranks sends, for n elements of b bits:
    (W - 1) n b / 8, and 8 for each message's checksum. A rank's own input goes through the codec, too. With one rank
    the input is copied.

    Args:
        output: W n elements, any float dtype. input: n elements.
        codec, group, async_op, chunk, timeout, transport, checksums: as for `all_reduce`.

    Raises:
        As `all_reduce`; ValueError where the numbers of elements do not fit.
    """
    group = group or default_group()
    ranks = dist.get_world_size(group)
    _check(input, codec, "sum", chunk=chunk, timeout=timeout, name="input", checksums=checksums)
    check_pair("input", input, "output", output, ranks)
    check_fit("input", input, codec, ranks)
    check_fit("output", output, codec, ranks)
    facts = _facts("all_gather", input, codec, chunk=chunk, output=described(output))
    check_written("output", output)
    flat, target = input.detach().reshape(-1), output.detach().reshape(-1)

    def work(wire: Wire) -> None:
        if ranks == 1:
            target.copy_(flat)
        else:
            algorithms.all_gather(flat, target, codec, wire, chunk=chunk)
        if target.data_ptr() != output.data_ptr():
            output.copy_(target.view(output.shape))
        wire.finish()

    return _submit(facts, group, input.device, timeout, work, transport, async_op, codec.layer(), checksums)


def check_summable(codec: object) -> Codec:
    """The codec, if flat pieces of any tensor can go through it in any order.

    Raises:
        TypeError: it is none, keeps something between messages, or is made for tokens of activations.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"codec is {codec!r}; allowed: a codec such as lowbit.codecs.GroupInt(bits=8)")
    reason = ""
    if codec.stateful:
        reason = "keeps something between messages"
    elif isinstance(codec, TAHQuant):
        reason = "is made for the tokens of activations"
    if reason:
        raise TypeError(
            f"codec is {codec}, which {reason}: it cannot be summed; allowed: a codec without state whose format "
            "does not depend on the tensor's shape, such as GroupInt or Cast"
        )
    return codec


def _chosen(algorithm: Algorithm, numel: int, codec: Codec, ranks: int) -> Algorithm:
    return algorithms.choose(ranks, codec.nbytes((numel,))) if algorithm == "auto" else algorithm


def _plain(
    flat: Tensor,
    group: dist.ProcessGroup,
    ranks: int,
    divisor: int,
    errors: Tensor | None,
    timeout: float,
) -> None:
    """The engine's own sum, in float32."""
    if ranks > 1 and flat.numel():
        total = flat.float()
        pytorch.finish(dist.all_reduce(total, group=group, async_op=True), group, timeout)
        flat.copy_(total.div_(divisor) if divisor > 1 else total)
    if errors is not None:
        errors.zero_()


def _submit(
    facts: dict[str, str],
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: float,
    work: Callable[[Wire], None],
    transport: Transport,
    async_op: bool,
    layer: str,
    checksums: bool,
) -> Pending | None:
    call = Call(
        facts=facts, group=group, device=device, timeout=timeout, work=work, transport=transport, layer=layer,
        checksums=checksums,
    )  # fmt: skip
    facts["transport"] = "messages" if tagged(call) else "collectives"
    pending = line_of(group).submit(call)
    if async_op:
        return pending
    pending.wait()
    return None


def _facts(name: str, x: Tensor, codec: Codec, **more: object) -> dict[str, str]:
    facts = {"collective": name, "tensor": described(x)}
    facts["codec"] = codec.identity()
    return facts | {key: str(value) for key, value in more.items()}


def check_flat(codec: object) -> None:
    """Raise unless the codec can be summed and takes flat pieces of any length, as gradients are."""
    grain = check_summable(codec).grain
    if grain > 1:
        raise ValueError(
            f"codec is {codec}, for rows of {grain} elements; allowed for gradients: formats for any length, "
            "such as GroupInt"
        )


def check_call(
    codec: object,
    group: dist.ProcessGroup | None,
    *,
    algorithm: object = "two_shot",
    node_size: object = 1,
    small: object = SMALL,
    chunk: object = CHUNK,
    timeout: object = TIMEOUT,
    checksums: object = True,
) -> None:
    """Raise what a collective with these arguments would; None: a group that is not known yet."""
    check_summable(codec)
    check_checksums(checksums)
    check_choice("algorithm", algorithm, ("two_shot", "one_shot", "auto"))
    ranks = dist.get_world_size(group) if group is not None else 1
    check_int("node_size", node_size, 1, ranks)
    if isinstance(node_size, int) and ranks % node_size:
        raise ValueError(f"node_size is {node_size}; allowed: a divisor of the {ranks} ranks")
    check_int("small", small, 0, 1 << 60)
    check_int("chunk", chunk, 16, 1 << 30)
    if isinstance(chunk, int) and chunk % 16:
        raise ValueError(f"chunk is {chunk}; allowed: multiples of 16")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {timeout!r}; allowed: a number of seconds above 0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; allowed: a number of seconds above 0")


def _check(
    x: object, codec: object, op: object, *,
    chunk: int, timeout: float, checksums: bool, name: str = "tensor",
) -> None:  # fmt: skip
    check_call(codec, None, chunk=chunk, timeout=timeout, checksums=checksums)
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {found}; allowed: {', '.join(map(str, FLOATS))}")
    check_choice("op", op, ("sum", "avg"))
