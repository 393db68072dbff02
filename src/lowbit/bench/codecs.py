"""`lowbit bench codecs`: what formats cost in time, in bits and in accuracy, beside a copy and eager PyTorch.

Speeds are gigabytes of input a second, from cold caches; a copy of the same tensor takes its turn in every round. A
copy moves every byte twice, coding less than that: so the share of the copy's rate counts bytes read and written.

Formats with memory go through a session at either end, message after message; their error is the first message's, which
knows nothing yet (`lowbit bench spectrum` lets them learn).
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit import ops
from lowbit.bench import samples, timing
from lowbit.bench.published import PublishedProcedure
from lowbit.bench.report import Report, Row, machine
from lowbit.codecs import Codec, FeatureInt4, Session, TAHQuant, parse
from lowbit.ranks.checksum import CHECKSUM_BYTES, Checksums
from lowbit.train.config import ModelConfig
from lowbit.train.model import StageModule, build_model

DATA = ("gaussian", "student-t", "outliers", "real")
DTYPES = ("float32", "bfloat16", "float16")
REFERENCE_ROUNDS = LAYER_ROUNDS = 3
HEAD = 128  # width of a layer's attention heads, if the channels can be divided by it
FITTED = "feature-int4"
EXTRA_NAMES = {
    "tah-quant-token": dataclasses.replace(TAHQuant.published(), allocation="token"),
    "published-procedure": PublishedProcedure(allocation="tile"),
    "published-procedure-token": PublishedProcedure(allocation="token"),
}
"""Besides what `lowbit.codecs.parse` takes, and `FITTED`: allocation by token, and the procedure of the
paper's research code."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Args:
        codecs: formats by name or in full, but for those that need sample ids; also feature-int4 (FeatureInt4 with
            ranges, and channels / 64 outliers, from the very tensors that it then codes), tah-quant-token (allocation
            by token), and published-procedure and published-procedure-token (what the paper's research code does: its
            errors and bits, not its speed).
        dtypes: of the tensors: float32, bfloat16, float16.
        device: cpu or cuda.
        threads: numbers of threads to measure with on the CPU; 0: all cores.
        data: what the tensors hold: gaussian, student-t (heavy tails anywhere), outliers (few large channels), real
            (activations between the layers of a language model).
        shape: sequences, tokens and channels of a tensor; real activations keep their channels, and their tokens are
            repeated to as many elements.
        rounds: turns of each operation.
        reference: measure eager PyTorch too, on the first kind of data.
        layer: compare with forward and backward of a Llama's decoder layer too, on the first kind of data: as wide as
            the tensor, random weights, in the tensor's dtype.
        activations: where the real ones come from: a .pt or .safetensors file, or a local Hugging Face folder; absent:
            a small Llama that is first trained on Python's standard library.
        train_steps: of that Llama.
    """

    codecs: tuple[str, ...] = (
        "bf16", "fp8", "int8", "GroupInt(bits=6, group=32, symmetric=True)", "int4", "tah-quant", "tah-quant-published",
        "tah-quant-token", "published-procedure", "published-procedure-token", FITTED,
    )  # fmt: skip
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    device: str = "cpu"
    threads: tuple[int, ...] = (1, 0)
    data: tuple[str, ...] = DATA
    shape: tuple[int, int, int] = (1, 1024, 4096)
    rounds: int = 15
    reference: bool = True
    layer: bool = False
    activations: str = ""
    train_steps: int = 60

    def __post_init__(self) -> None:
        for field, allowed in (("dtypes", DTYPES), ("data", DATA)):
            values = getattr(self, field)
            if not values or set(values) - set(allowed):
                raise ValueError(f"{field} is {values}; allowed: {', '.join(allowed)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}; allowed: 'cpu', 'cuda'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but PyTorch finds no GPU here")
        cores = _cores()
        if not self.threads or not all(0 <= count <= cores for count in self.threads):
            raise ValueError(f"threads is {self.threads}; allowed: 0 (all cores) to {cores}")
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape is {self.shape}; allowed: three sizes of at least 1")
        for name in set(self.codecs) - {FITTED}:
            if isinstance(codec := _codec(name), Codec):
                codec.nbytes(self.shape)  # or an error that says what does not fit
        if self.layer:
            _layer_config(self.shape[-1])
        for field in ("rounds", "train_steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: at least 1")


def run(settings: Settings) -> Report:
    """Measure every codec on every kind of data, in every dtype and with every number of threads.

    Returns:
        A report whose rows have `codec`, `device`, `dtype`, `threads`, `data`, `shape`; `encode_gb_s`, `decode_gb_s`,
        `copy_gb_s` (medians), `encode_best_gb_s` (the fastest round), `encode_spread` (interquartile range over median)
        and the same of the others; `encode_share_of_copy`, `decode_share_of_copy` (medians of what the rounds gave);
        `encode_share_of_rate`, `decode_share_of_rate` (the same, of bytes read and written); `reference_encode_gb_s`,
        `reference_decode_gb_s` (eager PyTorch); `checksum_gb_s` (of the payload, not of the input: what a transport's
        checksum of it takes) and `checksum_share` (of both ends' checksums over encoding and decoding; medians);
        `layer_seconds` (median) and `share_of_layer` (medians of encoding and
        of decoding over it); `bits_per_element` (every byte counted) and `relative_error` (root mean square of the
        error over that of the tensor).

    Raises:
        ValueError, OSError: activations that cannot be had.
    """
    from rich.console import Console
    from rich.progress import track

    plan = (row for data in settings.data for row in _rows(settings, data))
    total = math.prod(map(len, (settings.data, settings.dtypes, settings.codecs, _counts(settings))))
    console = Console(stderr=True)
    rows = list(track(plan, "measuring codecs", total=total, console=console, transient=True))
    return Report(command="bench codecs", settings=settings, machine=machine(), rows=rows)


def _rows(settings: Settings, data: str) -> Iterator[Row]:
    if data == "real":
        tensors = samples.real(settings.activations, steps=settings.train_steps)
    else:
        tensors = [samples.drawn(data, settings.shape)]
    timed = samples.filled(tensors, math.prod(settings.shape))
    first = data == settings.data[0]
    layer = _layer(timed) if settings.layer and first else None
    for dtype in (getattr(torch, name) for name in settings.dtypes):
        inputs = _Inputs(timed.to(settings.device, dtype))
        layer = layer.to(settings.device, dtype) if layer else None
        for name in settings.codecs:
            codec = _fitted(tensors) if name == FITTED else _codec(name)
            about = {
                "codec": name, "device": settings.device, "dtype": str(dtype).removeprefix("torch."), "data": data,
                "shape": list(timed.shape), **_accuracy(codec, [t.to(settings.device, dtype) for t in tensors]),
            }  # fmt: skip
            for count in _counts(settings):
                speed = {}
                if isinstance(codec, Codec):
                    with timing.threads(count):
                        speed = _speed(
                            codec,
                            inputs,
                            settings.rounds,
                            reference=settings.reference and first,
                            layer=layer,
                        )
                yield about | {"threads": count} | speed


class _Inputs:
    """Equal tensors, more than the caches hold, with room for what is made of them."""

    def __init__(self, x: Tensor) -> None:
        self.count = timing.buffers_for(x.numel() * x.element_size(), x.device)
        self.tensors = [x.clone() for _ in range(self.count)]
        self.outs = [torch.zeros_like(x) for _ in range(self.count)]
        self.nbytes = x.numel() * x.element_size()


def _speed(codec: Codec, inputs: _Inputs, rounds: int, *, reference: bool, layer: nn.Module | None) -> dict[str, float]:
    """Speeds and their spreads."""
    xs, outs = inputs.tensors, inputs.outs
    encode, decode, size = (_session_of if codec.stateful else _without_session)(codec, inputs)

    def copy(i: int) -> None:
        outs[i].copy_(xs[i])

    operations = {"copy": copy, "encode": encode, "decode": decode}
    operations["checksum"] = _checksum(size, inputs.count, xs[0].device)
    if reference:
        operations |= {
            "reference_encode": _eagerly(encode),
            "reference_decode": _eagerly(decode),
        }
    fewer = {name: REFERENCE_ROUNDS for name in operations if name.startswith("reference")}
    if layer is not None:
        operations["layer"], fewer["layer"] = _there_and_back(layer, xs), LAYER_ROUNDS
    seconds = timing.in_turn(operations, rounds=rounds, buffers=inputs.count, fewer=fewer, device=xs[0].device)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    coding, checksum = medians["encode"] + medians["decode"], medians.pop("checksum")
    found = {"checksum_gb_s": size / checksum / 1e9, "checksum_share": 2 * checksum / coding}
    if layer is not None:
        found["layer_seconds"] = medians.pop("layer")
        found["share_of_layer"] = coding / found["layer_seconds"]
    found |= {f"{name}_gb_s": inputs.nbytes / s / 1e9 for name, s in medians.items()}
    for name in ("copy", "encode", "decode"):
        found[f"{name}_best_gb_s"] = inputs.nbytes / min(seconds[name]) / 1e9
        found[f"{name}_spread"] = timing.spread(seconds[name])
    for name in ("encode", "decode"):
        shares = [c / s for c, s in zip(seconds["copy"], seconds[name], strict=True)]
        found[f"{name}_share_of_copy"] = share = statistics.median(shares)
        found[f"{name}_share_of_rate"] = share * (1 + size / inputs.nbytes) / 2
    return found


def _checksum(size: int, count: int, device: torch.device) -> timing.Operation:
    """What a transport does to a payload of so many bytes at either end, on the host or on the GPU."""
    checksums, room = Checksums("bench"), size + CHECKSUM_BYTES
    messages = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(count)]
    seal = checksums.seal_there if device.type == "cuda" else checksums.seal
    return lambda i: seal(messages[i], i)


def _without_session(codec: Codec, inputs: _Inputs) -> tuple[timing.Operation, timing.Operation, int]:
    """Encoding, decoding, and the bytes of a payload."""
    xs, outs = inputs.tensors, inputs.outs
    payloads = [codec.encode(xs[0])]
    payloads += [payloads[0].clone() for _ in xs[1:]]

    def encode(i: int) -> None:
        codec.encode(xs[i], out=payloads[i])

    def decode(i: int) -> None:
        codec.decode(payloads[i], shape=xs[i].shape, out=outs[i])

    return encode, decode, len(payloads[0])


def _session_of(codec: Codec, inputs: _Inputs) -> tuple[timing.Operation, timing.Operation, int]:
    """The same of a codec with memory: what is decoded is what was encoded last, once."""
    xs, outs = inputs.tensors, inputs.outs
    sender, receiver = _ends(codec, xs[0])
    sent: list[Tensor] = []

    def encode(i: int) -> None:
        sent.append(sender.encode(xs[i]))

    def decode(i: int) -> None:
        receiver.decode(sent.pop(), out=outs[i])

    return encode, decode, sender.nbytes()


def _ends(codec: Codec, x: Tensor) -> tuple[Session, Session]:
    sender, receiver = (codec.open(shape=x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return sender, receiver


def _layer_config(channels: int) -> ModelConfig:
    """A Llama of one layer.

    Raises:
        ConfigError: an odd number of channels.
    """
    return ModelConfig(dim=channels, layers=1, heads=channels // math.gcd(channels, HEAD))


def _layer(x: Tensor) -> nn.Module:
    """A decoder layer for tensors such as x (sequences, tokens, channels)."""
    _, tokens, channels = x.shape
    model = build_model(_layer_config(channels), vocab=2, sequence=tokens, seed=0)
    return StageModule(model, layers=range(1), first=False, last=False).decoder


def _there_and_back(layer: nn.Module, xs: Sequence[Tensor]) -> timing.Operation:
    """Forward and backward, with gradients for the input and all weights."""

    def run(i: int) -> None:
        x = xs[i].detach().requires_grad_()
        y = layer(inputs_embeds=x, use_cache=False).last_hidden_state
        torch.autograd.grad(y, [x, *layer.parameters()], xs[i])

    return run


def _eagerly(operation: timing.Operation) -> timing.Operation:
    def run(i: int) -> None:
        with ops.backend("reference"):
            operation(i)

    return run


def _accuracy(codec: Codec | PublishedProcedure, tensors: Sequence[Tensor]) -> dict[str, float]:
    """Bits of an element and relative error, means over tensors that count alike."""
    errors = [relative_error(t, _crossed(codec, t)) for t in tensors]
    bits = [codec.bits_per_element(t.shape) for t in tensors]
    return {
        "bits_per_element": statistics.fmean(bits),
        "relative_error": statistics.fmean(errors),
    }


def _crossed(codec: Codec | PublishedProcedure, x: Tensor) -> Tensor:
    """What the other end sees of `x`; of a codec with memory, as its first message."""
    if not isinstance(codec, Codec) or not codec.stateful:
        return codec.round_trip(x)
    sender, receiver = _ends(codec, x)
    return receiver.decode(sender.encode(x))


def relative_error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |x|, Euclidean norms in float64 (0 for two zero tensors)."""
    x, y = x.double(), y.double()
    size = x.norm().item()
    return (x - y).norm().item() / size if size else y.norm().item()


def _codec(name: str) -> Codec | PublishedProcedure:
    """A codec by name.

    Raises:
        ValueError: unknown, or one that codes what changed since a sample's last visit, or that a warm-up settles:
            there is neither here.
    """
    found = EXTRA_NAMES.get(name) or parse(name)
    if isinstance(found, Codec) and found.needs_key:
        raise ValueError(f"codec is {name!r}, which needs samples that come back; allowed: other codecs")
    if isinstance(found, Codec) and not found.settled:
        raise ValueError(
            f"codec is {name!r}, which a pipeline's warm-up settles; allowed: codecs that leave nothing to choose"
        )
    return found


def _fitted(tensors: Sequence[Tensor]) -> FeatureInt4:
    return FeatureInt4.fit([torch.cat([t.float().flatten(0, -2) for t in tensors])])


def _counts(settings: Settings) -> list[int]:
    """Numbers of threads to measure with, each once; a GPU's rows say 1, the one that feeds it."""
    if settings.device == "cuda":
        return [1]
    return list(dict.fromkeys(count or _cores() for count in settings.threads))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
