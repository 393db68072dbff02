"""`GradientStorage`: accumulate gradients in a codec's payloads instead of in `.grad`, and average them as stored."""

import bisect
import hashlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lowbit import escape
from lowbit.codecs import BlockFloat8, Cast
from lowbit.codecs.base import Codec, Summable
from lowbit.codecs.checks import FLOATS
from lowbit.collectives.calls import Pending
from lowbit.collectives.reduce import TIMEOUT, all_gather, average_coded, average_coded_bytes, check_call
from lowbit.escape import shown
from lowbit.gradients.optimizers import check_optimizer, finish, storages, under_way, watch_optimizers
from lowbit.gradients.stored import (
    Stored,
    StoredGradient,
    as_shard,
    local,
    named,
    parts,
    placed,
    portions,
    sums_of,
    total,
)
from lowbit.wire.agreement import agree
from lowbit.wire.checksum import sealed_bytes
from lowbit.wire.pytorch import unwrapped_group

log = escape.logger(__name__)

Gradient = tuple[Stored, Tensor]
_UNCODED = Cast()

BUCKET = 4 << 20
"""Most elements of a call; its payloads take (3 + 1 / ranks) bytes per element. Larger parameters are cut."""


class StoredElements:
    """A range of elements of stored gradients on one device, one after the other, each padded to whole units."""

    def __init__(self, codec: Summable, gradients: Sequence[tuple[Stored, torch.Size]], start: int, stop: int) -> None:
        self.numel, self._first, self._codec = stop - start, start, codec
        self._gradients = gradients
        self._ends = list(itertools.accumulate(_padded(codec, (shape for _, shape in gradients))))
        payload = gradients[0][0].payload
        assert payload is not None
        self.device = payload.device

    def put(self, piece: slice, box: Tensor) -> None:
        box.zero_()  # for padding, and for gradients that this rank does not have
        size = piece.stop - piece.start
        for stored, shape, start, at, count in self._within(piece):
            if stored.held and stored.payload is not None:
                payload, numel = stored.payload, shape.numel()
                if self._codec.sized(shape)[1]:  # too few elements for the format: the payload is plain numbers
                    x = self._codec.decode(payload, shape=(numel,))
                    numel = self._codec.unit
                    payload = self._codec.encode(functional.pad(x, (0, numel - x.numel())))
                self._codec.copy_units(payload, start, box, at, count, numel=(numel, size))

    def take(self, piece: slice, payload: Tensor) -> None:
        size = piece.stop - piece.start
        for stored, shape, start, at, count in self._within(piece):
            assert stored.payload is not None
            if not self._codec.sized(shape)[1]:
                self._codec.copy_units(payload, at, stored.payload, start, count, numel=(size, shape.numel()))
                continue
            unit = self._codec.unit
            coded = torch.zeros(self._codec.nbytes((unit,)), dtype=torch.uint8, device=payload.device)
            self._codec.copy_units(payload, at, coded, 0, unit, numel=(size, unit))
            self._codec.encode(self._codec.decode(coded, shape=(unit,))[:count], out=stored.payload)

    def _within(self, piece: slice) -> Iterator[tuple[Stored, torch.Size, int, int, int]]:
        """Yield gradients in a piece, their shapes, first elements in it, positions in the piece, and counts."""
        start, stop = self._first + piece.start, self._first + piece.stop
        for index in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            stored, shape = self._gradients[index]
            begin = self._ends[index - 1] if index else 0
            if begin >= stop:
                return
            skipped = max(0, start - begin)
            count = min(shape.numel(), stop - begin) - skipped
            if count > 0:
                yield stored, shape, skipped, begin + skipped - start, count


def average(
    codec: Summable, gradients: Sequence[Gradient], group: dist.ProcessGroup, *, timeout: float, checksums: bool
) -> None:
    """Replace gradients, each with a tensor of its shape and device, by their means; those of no rank stay missing."""
    states = [(stored.held, stored.factor) for stored, _ in gradients]
    mine = torch.tensor(states, dtype=torch.float32, device=gradients[0][1].device)
    by_rank = mine.new_empty(group.size(), *mine.shape)
    all_gather(by_rank, mine, _UNCODED, group, timeout=timeout, checksums=checksums)
    means: list[tuple[Stored, Tensor, float]] = []
    for (stored, x), of_ranks in zip(gradients, by_rank.transpose(0, 1).tolist(), strict=True):
        if factors := [factor for held, factor in of_ranks if held]:
            means.append((stored, x, stored.prepare(codec, x.shape, x.device, factors)))
    pending: list[Pending] = []
    for _, together in itertools.groupby(means, key=lambda mean: mean[1].device):
        some = [(stored, x.shape) for stored, x, _ in together]
        for start, stop in _buckets(codec, [shape for _, shape in some]):
            elements = StoredElements(codec, some, start, stop)
            pending.append(
                average_coded(
                    elements.put, elements.take, codec, group, numel=elements.numel, device=elements.device,
                    timeout=timeout, checksums=checksums,
                )
            )  # fmt: skip
    for each in pending:
        each.wait()
    for stored, _, factor in means:
        stored.factor, stored.held = factor, True


def average_bytes(
    shapes: Sequence[torch.Size], codec: Summable, *, count: int, rank: int, ranks: int, checksums: bool
) -> int:
    """Return the bytes that a rank sends to average gradients of these shapes on one device, with `count` stored."""
    return (ranks - 1) * sealed_bytes(8 * count, checksums) + sum(
        average_coded_bytes(stop - start, codec, rank=rank, ranks=ranks, checksums=checksums)
        for start, stop in _buckets(codec, shapes)
    )


def _padded(codec: Summable, shapes: Iterable[torch.Size]) -> list[int]:
    return [-(-shape.numel() // codec.unit) * codec.unit for shape in shapes]


def _buckets(codec: Summable, shapes: Sequence[torch.Size]) -> Iterator[tuple[int, int]]:
    numel, step = sum(_padded(codec, shapes)), BUCKET // codec.unit * codec.unit
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


BUCKET_BYTES = 16 << 20


class GradientStorage:
    """Keep gradients in 8 bits between micro-batches, as AGoQ's QuanGrad (arXiv 2605.00539) does.

    As soon as a backward pass has finished a parameter's gradient, it is added to the stored one (decoded, added in
    float32, encoded), and `parameter.grad` becomes a tensor that shows the stored gradient. So gradients of one layer
    at a time exist at full precision; a model's stored ones take 1.008 bytes a parameter (BlockFloat8, blocks of 128).
    Several threads may run backward passes at the same time.

    A training loop needs no change: `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler`, `optimizer.step()` and
    `zero_grad` work, also when a framework calls them. A step of any optimizer decodes the gradients in portions no
    larger than the largest parameter, and the update equals one step with all of them, bit for bit. Step hooks run once
    per portion. The methods of this class do the same without decoding more than one gradient at a time:

        for micro_batch in batch:
            loss(micro_batch).backward()
        storage.average()                       # data parallel only
        norm = storage.clip_(1.0)
        storage.step(optimizer)
        storage.zero_()

    NaN and infinity in a gradient make its block NaN, which shows in `norm`. Embeddings with `sparse=True` are stored
    dense. A parameter without a gradient has none stored either, so that optimizers skip it. Parameters that do not
    require a gradient now are ignored; those frozen later keep their gradients until `zero_`.

    For sharded parameters (DTensor: FSDP2, tensor parallelism) each rank stores the gradient of its own shard; make the
    storage after `fully_shard` or `parallelize_module`. It does not work with `DistributedDataParallel`, whose buckets
    are full-precision copies: use `average` on the plain module.

    A storage lives as long as its parameters, unless `close` ends it.

    Args:
        parameters: a module, or parameters (each counts once, however often it is shared).
        codec: a stateless format; use `BlockFloat8(rounding="stochastic")` to sum more than about 30 micro-batches.
            Results of `put`, `average` and `all_reduce` are always rounded to nearest, so that they are equal on all
            ranks.

    Raises:
        ValueError: a parameter whose gradient another storage keeps.
        TypeError: a parameter of a dtype other than float32, bfloat16 and float16; a codec with state; a module wrapped
            in `DistributedDataParallel`, PyTorch's or Megatron's.
    """

    def __init__(self, parameters: nn.Module | Iterable[nn.Parameter], *, codec: Codec | None = None) -> None:
        codec = BlockFloat8() if codec is None else codec
        if not isinstance(codec, Summable) or codec.shaped:
            raise TypeError(f"codec is {shown(codec)}; allowed: a codec without state that sums, such as BlockFloat8()")
        self.codec = codec
        self._nearest = codec.nearest()
        pairs = named(parameters)
        self._stored = {p: Stored(name) for name, p in pairs if p.requires_grad}
        self._frozen = [(name, p) for name, p in pairs if not p.requires_grad]
        self._module = weakref.ref(parameters) if isinstance(parameters, nn.Module) else lambda: None
        elsewhere = {parameter for storage in list(storages) for parameter in storage._stored}
        for parameter, stored in self._stored.items():
            if parameter.dtype not in FLOATS:
                allowed = ", ".join(map(str, FLOATS))
                raise TypeError(f"parameter {stored.name!r} has dtype {parameter.dtype}; allowed: {allowed}")
            if hasattr(parameter, "main_grad"):
                raise TypeError(
                    f"parameter {stored.name!r} has a main_grad, a full-precision gradient of Megatron's "
                    "DistributedDataParallel; allowed: a model without that wrapper, and average of the storage"
                )
            if parameter in elsewhere:
                allowed = "one storage, or close() of the other first"
                raise ValueError(f"parameter {stored.name!r} is in another GradientStorage; allowed: {allowed}")
        if not self._stored:
            log.warning("GradientStorage keeps nothing: no parameter requires a gradient")
        self._hooks = [p.register_hook(partial(_note_thread, stored)) for p, stored in self._stored.items()]
        self._hooks += [p.register_post_accumulate_grad_hook(self._absorb_last) for p in self._stored]
        self._closed = False
        self._agreed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups that `average` has checked
        watch_optimizers()
        storages.add(self)

    @property
    def nbytes(self) -> int:
        """Total bytes of all payloads."""
        return sum(s.payload.nbytes for s in self._stored.values() if s.payload is not None)

    @property
    def count(self) -> int:
        """Number of parameters whose gradients are stored here."""
        return len(self._stored)

    def absorb(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add `.grad` of parameters (None: all; those not stored here are ignored) to the storage, and free it.

        Backward passes do this automatically, except those that write `.grad` without autograd, such as the weight
        passes of `torch.distributed.pipelining`'s zero-bubble schedules. A gradient that was assigned to `.grad`
        replaces the stored one.

        Raises:
            RuntimeError: a parameter that was frozen when this storage was made requires a gradient now.
        """
        finish()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} requires a gradient, which it did not when this storage was made; "
                    "allowed: a new GradientStorage (close() this one first)"
                )
        for parameter in self._stored if parameters is None else parameters:
            if parameter in self._stored and not self._closed:
                self._absorb(parameter)

    def gradient(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return a parameter's gradient, decoded into a new tensor of `dtype` (None: the parameter's), or None."""
        stored = self._current(parameter)
        value = None if stored is None else stored.value(self.codec, local(parameter).shape, dtype or parameter.dtype)
        return None if value is None else as_shard(value, parameter)

    def gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters (None: all) and their gradients in float32, one at a time; skip those without a gradient."""
        for parameter in self._stored if parameters is None else parameters:
            gradient = self.gradient(parameter, torch.float32)
            if gradient is not None:
                yield parameter, gradient

    def put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Replace a parameter's stored gradient by this one, rounded to nearest.

        Raises:
            ValueError: a parameter that is not stored here, or a gradient of another shape or on another device.
        """
        if parameter not in self._stored or gradient.shape != parameter.shape:
            expected = f"of shape {tuple(parameter.shape)}" if parameter in self._stored else "not stored here"
            raise ValueError(f"gradient has shape {tuple(gradient.shape)}; its parameter is {expected}")
        if gradient.device != parameter.device:
            raise ValueError(f"gradient is on {gradient.device}; its parameter is on {parameter.device}")
        self._put(parameter, local(placed(gradient, parameter)))

    def _put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        stored = self._stored[parameter]
        stored.replace(self._nearest, gradient, parameter.device)
        self._show(parameter, stored)

    def norm(self) -> float:
        """Return the Euclidean norm of all stored gradients together; NaN if any of them contains NaN.

        For sharded parameters it includes all shards, and all ranks must call it.
        """
        squares: dict[Any, list[Tensor]] = {sums_of(parameter): [] for parameter in self._stored}
        for parameter, gradient in self.gradients():
            squares[sums_of(parameter)].append(torch.linalg.vector_norm(local(gradient)).cpu().double().square())
        return math.sqrt(sum(total(parts, *groups) for groups, parts in squares.items()))

    def scale_(self, factor: float) -> None:
        """Multiply all stored gradients, but not later ones, by a factor, which is applied when they are decoded."""
        for parameter in self._stored:
            stored = self._current(parameter)
            if stored is not None:
                stored.factor *= factor

    def clip_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

        Returns:
            The norm before clipping. If it is NaN or infinite, nothing is scaled: check it before `step`.

        Raises:
            ValueError: a negative or NaN `max_norm`.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm}; allowed: at least 0")
        norm = self.norm()
        if math.isfinite(norm) and norm + 1e-6 > max_norm:
            self.scale_(max_norm / (norm + 1e-6))
        return norm

    @torch.inference_mode(False)  # its results in `.grad` must work in the next backward pass
    def average(
        self, group: dist.ProcessGroup | None = None, *, timeout: float = TIMEOUT, checksums: bool = True
    ) -> None:
        """Replace the gradients by their means over ranks: stored payloads are sent, and received ones are stored.

        This is AGoQ's all-reduce (`lowbit.collectives.all_reduce` by two_shot) without decoding and encoding first:
        each rank adds up its share in float32, a chunk at a time, and encodes the mean once. All ranks then store the
        same bytes, and each of W ranks has sent 2 (W - 1) / W bytes per element. A gradient that is missing on some
        ranks counts as zeros there; one that is missing on all stays missing. If factors of `scale_` differ between
        ranks, the gradient is encoded once more. After an error, call `zero_`.

        Args:
            group: the ranks, which store the same parameters in the same format; None: the default group.
            timeout: seconds after which a missing or failed peer is an error.
            checksums: whether an 8-byte checksum follows each message.

        Raises:
            TypeError: a codec whose payloads cannot be cut into parts; allowed: BlockFloat8.
            AgreementError: the ranks store different parameters or formats; the same text on all of them.
            DamagedError, PeerError: as for `lowbit.collectives.all_reduce`.
        """
        if not self._nearest.unit:
            raise TypeError(
                f"codec is {self.codec}, whose payloads cannot be cut into parts; allowed: BlockFloat8, or all_reduce"
            )
        self.absorb()
        group = unwrapped_group(group)
        check_call(self._nearest, timeout=timeout, checksums=checksums)
        if group.size() == 1:
            return
        gradients = [(stored, local(p)) for p, stored in self._stored.items()]
        if group not in self._agreed:
            shapes = repr([(stored.name, *x.shape) for stored, x in gradients])
            digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
            numel = sum(x.numel() for _, x in gradients)
            facts = {
                "codec": self._nearest.identity(),
                "parameters": f"{len(gradients)} of {numel} elements, names and shapes {digest}",
                "checksums": "on" if checksums else "off",
            }
            agree(group, facts, timeout, topic="stored gradients")
            self._agreed.add(group)
        if gradients:
            average(self._nearest, gradients, group, timeout=timeout, checksums=checksums)
        for parameter, stored in self._stored.items():
            if stored.held:
                self._show(parameter, stored)

    def all_reduce(self, reduce: Callable[[Tensor], Any], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Replace the gradients by sums or means over ranks with any method: decoded, a bucket at a time.

        Every rank makes the same calls, whatever gradients it has: one with a flag for each parameter, then one for
        each bucket. A gradient that is missing on some ranks counts as zeros there; one that is missing on all ranks
        stays missing.

        Args:
            reduce: replaces the 1-D float32 tensor that it is called with by the sum or mean over all ranks, at once or
                by the end of `wait()` of its result. At most two buckets are under way.
            bucket_bytes: size of a bucket in float32; a larger parameter has its own bucket.

        Raises:
            ValueError: `bucket_bytes` below 4.
        """
        if bucket_bytes < 4:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; allowed: at least 4")
        self.absorb()
        parameters = list(self._stored)
        if not parameters:
            return
        flags = torch.tensor([float(self._stored[p].held) for p in parameters], device=parameters[0].device)
        _wait(reduce(flags))
        on_some_rank = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag > 0]
        under_way: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        for portion in portions(on_some_rank, bucket_bytes // 4):
            size = sum(local(p).numel() for p in portion)
            flat = torch.zeros(size, dtype=torch.float32, device=portion[0].device)
            for parameter, part in parts(flat, portion):
                self._stored[parameter].write(self.codec, part)
            under_way.append((portion, flat, reduce(flat)))
            if len(under_way) > 1:
                self._take(*under_way.pop(0))
        for started in under_way:
            self._take(*started)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `optimizer.step()` with the stored gradients.

        Few gradients exist at full precision at any time: the optimizer steps for a portion of the parameters at a
        time, and skips the others, which have no gradient meanwhile. All see the same hyperparameters: changes of
        `param_groups` in a step count once. Gradients that are not stored here are also used, and stay unchanged.

        Args:
            optimizer: any that updates parameters independently: all of `torch.optim` except LBFGS and SparseAdam, with
                or without `foreach` and `fused`; 8-bit optimizers of torchao and bitsandbytes.

        Raises:
            TypeError: LBFGS, which updates all parameters jointly; SparseAdam, whose gradients are sparse.
            RuntimeError: as `absorb`; the storage is closed; the optimizer has parameters that have replaced those
                stored here.
        """
        if self._closed:
            raise RuntimeError("this storage is closed: optimizers do not see its gradients; allowed: a new one")
        check_optimizer(optimizer)
        self.absorb()
        optimizer.step()

    def check_step(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether some are stored here; RuntimeError if some of the module's have replaced parameters stored here."""
        module, concerned = self._module(), any(p in self._stored for p in parameters)
        if module is None or all(p in self._stored for p in parameters):
            return concerned
        wanted = set(parameters) - {*self._stored, *(p for _, p in self._frozen)}
        for name, parameter in module.named_parameters():
            if parameter in wanted and parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was replaced or added after this storage was made; "
                    "allowed: GradientStorage after fully_shard, parallelize_module and adapters"
                )
        return concerned

    def zero_(self) -> None:
        """Drop all gradients, also those in `.grad`; the payloads' memory is kept for the next ones."""
        finish()
        for parameter, stored in self._stored.items():
            parameter.grad = None
            stored.drop()

    def close(self) -> None:
        """Let later backward passes leave gradients in `.grad` again; stored gradients stay readable here."""
        if not self._closed:
            for parameter in self._stored:
                self._absorb(parameter)
        self._closed = True
        storages.discard(self)
        for hook in self._hooks:
            hook.remove()
        for parameter, stored in self._stored.items():
            if stored.held:
                parameter.grad = None

    def _absorb_last(self, parameter: Tensor) -> None:
        """End an addition to `.grad`: absorb it, unless another thread may be adding to it, which then absorbs both."""
        stored = self._stored[parameter]  # pyright: ignore[reportArgumentType]
        with stored.lock:  # keeps others from beginning to add
            stored.adding.discard(threading.get_ident())
            if not stored.adding:
                self._absorb(parameter)

    def _absorb(self, parameter: Tensor) -> None:
        finish()
        stored = self._stored[parameter]  # pyright: ignore[reportArgumentType]
        stored.adding.clear()  # of threads whose backward passes failed, or added to nothing
        gradient = parameter.grad
        if gradient is None:
            stored.drop()
            return
        if isinstance(view := local(gradient), StoredGradient):
            if view is stored.view and stored.held:  # backward has added to it
                return
            gradient = view.decode()  # of another parameter; an error if its storage holds a later one
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {stored.name!r} has a graph (create_graph=True): it cannot be stored in few bits; "
                "use torch.autograd.grad for gradients of gradients"
            )
        gradient = placed(gradient, parameter)
        gradient = local(gradient.to_dense() if gradient.is_sparse else gradient)
        stored.drop()
        stored.add(self.codec, gradient, parameter.device)
        self._show(parameter, stored)

    def _current(self, parameter: nn.Parameter) -> Stored | None:
        stored = self._stored.get(parameter)
        if stored is not None and not self._closed and not under_way:
            self._absorb(parameter)
        return stored if stored is not None and stored.held else None

    def _show(self, parameter: Tensor, stored: Stored) -> None:
        """Set `.grad` to the stored gradient, unless the storage is closed."""
        if self._closed:
            return
        if stored.view is None:
            stored.view = StoredGradient(local(parameter), stored, self.codec, self._nearest)
        parameter.grad = as_shard(stored.view, parameter)

    def _take(self, portion: list[nn.Parameter], flat: Tensor, work: Any) -> None:
        _wait(work)
        for parameter, part in parts(flat, portion):
            self._put(parameter, part)


def _note_thread(stored: Stored, gradient: Tensor | None) -> None:
    """Hook before a backward pass adds to `.grad`."""
    if gradient is not None:
        with stored.lock:
            stored.adding.add(threading.get_ident())


def _wait(work: Any) -> None:
    if hasattr(work, "wait"):
        work.wait()
