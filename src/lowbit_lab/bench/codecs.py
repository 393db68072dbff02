"""`lowbit bench codecs`: speed, bits and accuracy of codecs, compared with a copy and eager PyTorch.

Speeds are gigabytes of input a second, with cold caches; a copy of the same tensor takes its turn in every round. A
copy reads and writes every byte, while coding writes fewer: shares of the copy's rate count bytes read and written.

Stateful formats have a session at either end. Their error is that of the first message, as the table
says (`lowbit bench spectrum` measures later ones).
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor, nn

from lowbit import kernels
from lowbit.codecs import Codec, FeatureInt, Session, parse
from lowbit.codecs.speed import coding_operations
from lowbit.wire.checksum import CHECKSUM_BYTES, Checksums
from lowbit_lab.bench import timing
from lowbit_lab.bench.settings import Device, EachOnce, check_device, check_plain
from lowbit_lab.bench.training import TrainingRecipe, capture, train
from lowbit_lab.charts import Bars
from lowbit_lab.charts.style import row_name
from lowbit_run.config import ConfigError, Positive, section
from lowbit_run.cores import usable_cores
from lowbit_run.report import Column, Command, Row, Table, spread
from lowbit_run.train.config import DataConfig, ModelConfig
from lowbit_run.train.data import load_data
from lowbit_run.train.model import StageModule, build_model, count_layers, vocabulary

DTypeName = Literal["float32", "bfloat16", "float16"]
Data = Literal["gaussian", "student-t", "outliers", "real"]
DEGREES_OF_FREEDOM = 3
OUTLIER_CHANNELS, OUTLIER_SCALE = 0.005, 30.0
SEQUENCE, BATCH = 256, 4
REFERENCE_ROUNDS = LAYER_ROUNDS = 3
HEAD = 128  # width of a layer's attention heads, if it divides the channels
FITTED: dict[str, dict[str, Any]] = {
    "feature-int4": {}, "feature-int4-static": {"gain": "static", "means": False}, "feature-int8": {"bits": 8},
}  # fmt: skip
"""Arguments of `FeatureInt.fit` by the names of formats that are fitted to the tensors that they code."""


@section()
class CodecsBenchmark:
    """Formats and the tensors that they code."""

    codecs: tuple[str, ...] = (
        "bf16", "fp8", "int8", "GroupInt(bits=6, group=32, symmetric=True)", "int4", "transform",
        "tah-quant", "tah-quant-published", "tah-quant-published-token", *FITTED,
    )  # fmt: skip
    """Formats by name or in full, except those that need sample ids. feature-int4, feature-int4-static (the
    published format, without a gain for each token) and feature-int8 are fitted to the tensors that they code.
    tah-quant is our setting of TAH-Quant, tah-quant-published that of the paper's v2 (bits by tile),
    tah-quant-published-token that of its v1 (bits by token)."""
    dtypes: Annotated[tuple[DTypeName, ...], EachOnce] = ("float32", "bfloat16")
    """Data types of the tensors."""
    device: Device = "cpu"
    """Where to measure."""
    threads: Annotated[tuple[int, ...], EachOnce] = (1, 0)
    """Numbers of CPU threads to measure with. 0: all cores."""
    data: Annotated[tuple[Data, ...], EachOnce] = get_args(Data)
    """Values of the tensors: gaussian, student-t (heavy tails), outliers (a few large channels), real (activations
    between the layers of a language model)."""
    shape: tuple[Positive, Positive, Positive] = (1, 1024, 4096)
    """Sequences, tokens and channels of a tensor. Real activations keep their channels and are repeated to this many
    elements."""
    rounds: Positive = 15
    """Turns of each operation."""
    reference: bool = True
    """Also measure the eager PyTorch code, on the first kind of data."""
    layer: bool = False
    """Compare with forward and backward of a Llama layer of the same width, on the first kind of data."""
    activations: str = ""
    """Local Hugging Face folder whose model gives the real activations. If omitted, a small Llama is trained on
    Python's standard library."""
    train_steps: Positive = 60
    """Number of training steps of that Llama."""

    def __post_init__(self) -> None:
        check_device(self.device)
        cores = usable_cores()
        if not all(0 <= count <= cores for count in self.threads):
            raise ConfigError(f"threads is {self.threads}; allowed: 0 (all cores) to {cores}")
        for name in set(self.codecs) - set(FITTED):
            codec_of(name).nbytes(self.shape)  # or an error that says what does not fit
        if self.layer:
            layer_config(self.shape[-1])


def measure(settings: CodecsBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every codec on every kind of data, in every dtype and with every number of threads.

    Yields:
        Rows with `codec`, `device`, `dtype`, `threads`, `data`, `shape`; `encode_gb_s`, `decode_gb_s`,
        `copy_gb_s` (medians), `encode_best_gb_s` (the fastest round), `encode_spread` (interquartile range over median)
        and the same of the others; `encode_share_of_copy`, `decode_share_of_copy` (medians over the rounds);
        `encode_share_of_rate`, `decode_share_of_rate` (the same, of bytes read and written); `reference_encode_gb_s`,
        `reference_decode_gb_s` (eager PyTorch); `checksum_gb_s` (bytes of the payload, not of the input, over the time
        of a transport's checksum) and `checksum_share` (time of both ends' checksums over coding; medians);
        `error_of` ("first message" of a format with state, whose later errors are smaller; None of others),
        `layer_seconds` (median) and `share_of_layer` (medians of encoding and of decoding over it); `bits_per_element`
        (every byte counted) and `relative_error` (root mean square of the error over that of the tensor).
    """
    rows: list[Row] = []
    for data in settings.data:
        for row in _rows(settings, data):
            rows.append(row)
            yield rows


def _rows(settings: CodecsBenchmark, data: str) -> Iterator[Row]:
    if data == "real":
        tensors = real(settings.activations, steps=settings.train_steps)
    else:
        tensors = [drawn(data, settings.shape)]
    timed = filled(tensors, math.prod(settings.shape))
    first = data == settings.data[0]
    layer = decoder_layer(timed) if settings.layer and first else None
    for dtype in (getattr(torch, name) for name in settings.dtypes):
        x = timed.to(settings.device, dtype)
        xs = [x.clone() for _ in range(timing.buffers_for(x.nbytes, x.device))]
        outs = [torch.zeros_like(x) for x in xs]
        layer = layer.to(settings.device, dtype) if layer else None
        for name in settings.codecs:
            codec = (
                codec_of(name)
                if name not in FITTED
                else FeatureInt.fit([torch.cat([t.float().flatten(0, -2) for t in tensors])], **FITTED[name])
            )
            about = {
                "codec": name, "device": settings.device, "dtype": str(dtype).removeprefix("torch."), "data": data,
                "shape": list(timed.shape),
                "bits_per_element": statistics.fmean(codec.bits_per_element(t.shape) for t in tensors),
                "error_of": "first message" if codec.stateful else None,
                "relative_error": statistics.fmean(_error_of(codec, t.to(settings.device, dtype)) for t in tensors),
            }  # fmt: skip
            for count in _counts(settings):
                with timing.threads(count):
                    reference = settings.reference and first
                    speed = speeds(codec, xs, outs, settings.rounds, reference=reference, layer=layer)
                yield about | {"threads": count} | speed


def _error_of(codec: Codec, x: Tensor) -> float:
    """Return the relative error of a tensor, as the first message of a codec with memory."""
    sender, receiver = ends_of(codec, x)
    return relative_error(x, receiver.decode(sender.encode(x)))


def relative_error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |x|, Euclidean norms in float64 (0 for two zero tensors)."""
    x, y = x.double(), y.double()
    size = x.norm().item()
    return (x - y).norm().item() / size if size else y.norm().item()


def codec_of(name: str) -> Codec:
    """A codec by name."""
    codec = parse(name)
    check_plain("codecs", name, codec)
    return codec


def _counts(settings: CodecsBenchmark) -> list[int]:
    """Return the numbers of threads to measure with, each once; for a GPU it is 1, the thread that feeds it."""
    if settings.device == "cuda":
        return [1]
    return list(dict.fromkeys(count or usable_cores() for count in settings.threads))


def _label(row: Row) -> str:
    """Return a codec's name without argument names: "GroupInt(6, 32, True)"."""
    return re.sub(r"\w+=", "", row["codec"])


def _first(*names: str) -> Callable[[Sequence[Row]], list[Row]]:
    """Return a function that selects the rows whose values of these fields are those of the first row."""
    return lambda rows: [row for row in rows if all(row[name] == rows[0][name] for name in names)]


def _errors(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each codec: bits on the first kind of data, and the error on each kind, in the first dtype."""
    errors: dict[str, dict[str, Any]] = {}
    for row in _first("dtype")(rows):
        first = {name: row[name] for name in ("codec", "dtype", "data", "bits_per_element", "error_of")}
        errors.setdefault(row["codec"], first)[row["data"]] = row["relative_error"]
    return list(errors.values())


def _few_bits(rows: Sequence[Row]) -> list[Row]:
    """Return rows of the first dtype and number of threads; only those below 6 bits, if any."""
    first = _first("dtype", "threads")(rows)
    return [row for row in first if row["bits_per_element"] < 6] or first


def _ways(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each of encoding, decoding and copying, in the first dtype and number of threads."""
    rows = _first("data", "dtype", "threads")(rows)
    return [{**row, "way": way, "gb_s": row[f"{way}_gb_s"]} for row in rows for way in ("encode", "decode", "copy")]


def speeds(
    codec: Codec, xs: Sequence[Tensor], outs: Sequence[Tensor], rounds: int, *, reference: bool, layer: nn.Module | None
) -> dict[str, float]:
    """Measure speeds and their spreads on equal tensors, more than the caches hold, with buffers for decoded ones."""
    nbytes, device = xs[0].nbytes, xs[0].device
    encode, decode, size = coding_operations(codec, xs, outs)

    def copy(i: int) -> None:
        outs[i].copy_(xs[i])

    operations = {"copy": copy, "encode": encode, "decode": decode}
    # As a transport computes it at either end, on host or GPU.
    checksums, payload = Checksums("bench"), torch.zeros(size + CHECKSUM_BYTES, dtype=torch.uint8, device=device)
    messages, seal = [payload.clone() for _ in xs], checksums.seal_there if device.type == "cuda" else checksums.seal
    operations["checksum"] = lambda i: seal(messages[i], i)
    if reference:
        eagerly = kernels.backend("reference")
        operations |= {"reference_encode": eagerly(encode), "reference_decode": eagerly(decode)}
    fewer = {name: REFERENCE_ROUNDS for name in operations if name.startswith("reference")}
    if layer is not None:
        operations["layer"], fewer["layer"] = _forward_and_backward(layer, xs), LAYER_ROUNDS
    seconds = timing.in_turn(operations, rounds=rounds, buffers=len(xs), fewer=fewer, device=device)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    coding, checksum = medians["encode"] + medians["decode"], medians.pop("checksum")
    row = {"checksum_gb_s": size / checksum / 1e9, "checksum_share": 2 * checksum / coding}
    if layer is not None:
        row["layer_seconds"] = medians.pop("layer")
        row["share_of_layer"] = coding / row["layer_seconds"]
    row |= {f"{name}_gb_s": nbytes / s / 1e9 for name, s in medians.items()}
    for name in ("copy", "encode", "decode"):
        row[f"{name}_best_gb_s"] = nbytes / min(seconds[name]) / 1e9
        row[f"{name}_spread"] = spread(seconds[name])
    for name in ("encode", "decode"):
        shares = [c / s for c, s in zip(seconds["copy"], seconds[name], strict=True)]
        row[f"{name}_share_of_copy"] = share = statistics.median(shares)
        row[f"{name}_share_of_rate"] = share * (1 + size / nbytes) / 2
    return row


def ends_of(codec: Codec, x: Tensor) -> tuple[Session, Session]:
    """Open sessions of a sender and a receiver of tensors such as `x`."""
    sender, receiver = (codec.open(shape=x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return sender, receiver


def layer_config(channels: int) -> ModelConfig:
    """Return the config of a Llama with one layer.

    Raises:
        ConfigError: an odd number of channels.
    """
    return ModelConfig(dim=channels, layers=1, heads=channels // math.gcd(channels, HEAD))


def decoder_layer(x: Tensor) -> nn.Module:
    """Return a decoder layer for tensors such as x (sequences, tokens, channels)."""
    _, tokens, channels = x.shape
    model = build_model(layer_config(channels), vocab=2, sequence=tokens, seed=0)
    return StageModule(model, layers=range(1), first=False, last=False).decoder


def _forward_and_backward(layer: nn.Module, xs: Sequence[Tensor]) -> timing.Operation:
    """Return an operation: forward and backward, with gradients for the input and all weights."""

    def run(i: int) -> None:
        x = xs[i].detach().requires_grad_()
        y = layer(inputs_embeds=x, use_cache=False).last_hidden_state
        torch.autograd.grad(y, [x, *layer.parameters()], xs[i])

    return run


def drawn(kind: str, shape: Sequence[int], *, seed: int = 0) -> Tensor:
    """Draw a float32 tensor of random numbers.

    Args:
        kind: "gaussian" (standard normal), "student-t" (3 degrees of freedom: heavy tails anywhere) or "outliers"
            (normal, but one channel in 200, the same ones for every token, is 30 times as large, as in large language
            models).
        shape: of the tensor; channels last.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if kind == "gaussian":
        return x
    if kind == "student-t":
        squares = torch.randn(DEGREES_OF_FREEDOM, *shape, generator=generator).square()
        return x / (squares.mean(0)).sqrt()
    if kind == "outliers":
        channels = shape[-1]
        chosen = torch.randperm(channels, generator=generator)[: max(1, round(channels * OUTLIER_CHANNELS))]
        x[..., chosen] *= OUTLIER_SCALE
        return x
    raise ValueError(f"kind is {kind!r}; allowed: 'gaussian', 'student-t', 'outliers'")


def real(source: str, *, steps: int) -> list[Tensor]:
    """Return activations between the layers of a language model, float32 (batch, tokens, channels) each.

    Args:
        source: a local Hugging Face folder, whose model is run on Python's standard library; or empty, for a small
            Llama that is first trained on it.
        steps: of that training.
    """
    if source and not Path(source).is_dir():
        raise ValueError(f"activations are {source!r}; allowed: a folder with a model")
    data = DataConfig(tokenizer=source or "bytes", sequence=SEQUENCE, batch=BATCH, max_bytes=4_000_000)
    config = ModelConfig(pretrained=source)
    if source:
        tokenizer = load_data(data).tokenizer
        model = build_model(config, vocab=vocabulary(config, tokenizer.size), sequence=SEQUENCE, seed=0)
    else:
        model, _ = train(TrainingRecipe(model=config, data=data, steps=steps, eval_windows=1), seed=0)
    inputs, _ = load_data(data).held_out.batch(torch.arange(BATCH))
    return capture(model, inputs, stages=count_layers(config))[0]


def filled(tensors: Sequence[Tensor], numel: int) -> Tensor:
    """Repeat the tokens of all tensors to fill one tensor (1, tokens, channels) of about `numel` elements."""
    channels = tensors[0].shape[-1]
    tokens = torch.cat([t.reshape(-1, channels) for t in tensors if t.shape[-1] == channels])
    wanted = max(1, numel // channels)
    return tokens.repeat(-(-wanted // len(tokens)), 1)[:wanted][None].contiguous()


COMMAND = Command(
    name="bench codecs",
    summary="Speed, bits and accuracy of codecs, compared with a copy and eager PyTorch.",
    examples=(
        "lowbit bench codecs --codec tah-quant-published,int4 --thread 1",
        "lowbit bench codecs --dtype bfloat16 --data gaussian --json codecs.json",
    ),
    settings=CodecsBenchmark,
    measure=measure,
    tables=[
        Table(
            rows=_first("data"),
            each=lambda row: (row["dtype"], row["threads"]),
            title=lambda rows: "GB of {dtype} a second, {threads} thread(s), {data}".format(**rows[0]),
            columns=[
                Column("codec", _label, row_name),
                Column("encode", "encode_gb_s", "{:.2f}"),
                Column("of\ncopy", "encode_share_of_copy", "{:.0%}"),
                Column("of its\nrate", "encode_share_of_rate", "{:.0%}"),
                Column("decode", "decode_gb_s", "{:.2f}"),
                Column("of\ncopy", "decode_share_of_copy", "{:.0%}"),
                Column("of its\nrate", "decode_share_of_rate", "{:.0%}"),
                Column("check-\nsum", "checksum_gb_s", "{:.1f}"),
                Column("adds", "checksum_share", "{:.2%}"),
                Column("both, of\na layer", "share_of_layer", "{:.2%}"),
                Column("copy", "copy_gb_s", "{:.1f}"),
                Column("eager\nenc.", "reference_encode_gb_s", "{:.2f}"),
                Column("eager\ndec.", "reference_decode_gb_s", "{:.2f}"),
            ],
        ),
        Table(
            rows=_errors,
            title=lambda rows: "Relative error, {dtype}; bits per element, {data}".format(**rows[0]),
            columns=[
                Column("codec", _label, row_name),
                Column("bits", "bits_per_element", "{:.2f}"),
                *(Column(kind, kind, "{:.4f}") for kind in get_args(Data)),
                Column("error of", "error_of"),
            ],
        ),
    ],
    charts=[
        Bars(
            rows=_few_bits, title="Relative error of few bits", group="data", series=_label, y="relative_error",
            label="relative error",
            show=lambda row: f"{row['relative_error']:.3f} · {row['bits_per_element']:.1f} bits",
        ),
        Bars(
            rows=_ways, group="way", series=_label, y="gb_s", label="GB/s of input",
            title=lambda rows: "Speed: {threads} thread(s), {dtype}, {data}".format(**rows[0]),
        ),
    ],
)  # fmt: skip
