"""The Triton kernels give the reference's bytes: on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import BlockFloat8, Codec, GroupInt, TAHQuant, TransformQuant
from lowbit.codecs.transform_quant.reference import transform_geometry
from lowbit.kernels.exact import entropy
from tests.fuzz.targets import same
from tests.lowbit.codecs.examples import rooms
from tests.lowbit.codecs.feature_int.examples import for_three_ranks
from tests.lowbit.codecs.group_int.examples import KERNELS as GROUP_INT
from tests.lowbit.codecs.tah_quant.examples import BY_TOKEN, GPU

triton = pytest.importorskip("triton", reason="no Triton; make test-cpus installs it")
tl = pytest.importorskip("triton.language")

from lowbit.codecs.tah_quant.gpu_select import count_both, select_long_scope  # noqa: E402
from lowbit.codecs.transform_quant import cpu, gpu  # noqa: E402
from lowbit.kernels.gpu.launch import launch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 3, 100), (2, 2, 256), (1, 1, 7), (2, 3, 200), (1, 1, 64)]  # an interpreted program takes 20 ms or more
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU; the interpreter has no streams or devices")

TAH = [
    *GPU,
    TAHQuant(tile=16, high_bits=7, low_bits=6, allocation="tile", high_fraction=0.5),
    TAHQuant(tile=128, high_bits=8, low_bits=2, pivot_ratio=2.0, high_fraction=0.5),
    TAHQuant(high_bits=4, low_bits=4),
]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    """Gaussian; numbers on a coarse grid, where codes lie on boundaries; or everything that is hard at once."""
    g = torch.Generator().manual_seed(len(shape) + shape[-1])
    x = torch.randn(shape, generator=g)
    if kind == "grid":
        x = (x * 4).round() / 4
    if kind == "hard":
        x = x * torch.randn(shape, generator=g) ** 3
        x = x * torch.exp(3 * torch.randn((*shape[:-1], 1), generator=g))
        flat = x.view(-1)
        flat[::50] *= -100
        flat[: shape[-1]] *= 1e-38  # denormals
        flat[flat.numel() // 2] = torch.nan
        flat[flat.numel() // 2 + 1] = torch.inf
        x.view(-1, shape[-1])[-1] = 0
    if kind == "wide":  # pivots so large that they are sent apart, the last of a tile of 128, too
        x.view(-1)[7::50], x.view(-1)[127::600] = 1e5, -1e9
    return x.to(dtype)


def check(codec: Codec, x: Tensor) -> None:
    """Equal bytes from reference and kernel, and equal numbers from both, written and added."""
    x, size, found = x.to(DEVICE), codec.nbytes(x.shape), []
    for name in ("reference", "gpu"):
        with kernels.backend(name):
            torch.manual_seed(1)  # of stochastic rounding
            buffer = torch.full((size + 128,), 77, dtype=torch.uint8, device=DEVICE)
            payload = codec.encode(x, out=buffer[64 : 64 + size])
            assert (buffer[:64] == 77).all()
            assert (buffer[64 + size :] == 77).all()
            added = codec.decode(payload, shape=x.shape, out=torch.ones_like(x), accumulate=True)
            found.append([payload, codec.decode(payload, shape=x.shape, dtype=x.dtype), added])
            if isinstance(codec, BlockFloat8):
                found[-1].append(codec.add(payload.clone(), x * 0.3))
    different = (found[0][0] != found[1][0]).nonzero().flatten()
    assert not len(different), f"{len(different)} of {size} bytes, the first at {different[:9]}"
    assert all(same(*pair).all() for pair in zip(*found, strict=True))


def cases() -> Iterator[tuple[Codec, tuple[int, ...], torch.dtype, str]]:
    for room in rooms():
        codecs = getattr(room, "CODECS", [])
        yield from ((codec, (1, 3, 100), dtype, "hard") for codec in codecs[:1] for dtype in DTYPES)
        yield from ((codec, (1, 3, 100), torch.float32, "hard") for codec in codecs[-1:])
    kinds = ("grid", "hard", "gaussian", "hard", "gaussian")  # pivots are in the hard ones
    for index, codec in enumerate(TAH):
        for i, (shape, kind) in enumerate(zip(SHAPES, kinds, strict=True)):
            if i < 3 or index < 2 or DEVICE == "cuda":
                yield codec, shape, DTYPES[(index + i) % 3], kind
    sizes = (777, 5000, 4096, 1), (torch.float32, torch.bfloat16, torch.float16, torch.float32)
    floats = BlockFloat8(), BlockFloat8(format="e5m2", block=96), BlockFloat8(rounding="stochastic")
    for codec in (*GROUP_INT, *floats):
        kinds = "hard", "hard" if codec in floats else "grid", "gaussian", "grid"
        for size, dtype, kind in zip(*sizes, kinds, strict=True):
            yield codec, (1, size), dtype, kind
    for symmetric in (False, True):
        yield GroupInt(group=32, symmetric=symmetric, rounding="stochastic"), (3, 333), torch.float32, "gaussian"
    for dtype in DTYPES[1:]:
        yield GroupInt(bits=3, group=32), (2, 300), dtype, "hard"
        yield TAHQuant(pivot_ratio=2.0), (1, 3, 300), dtype, "hard"
    yield TAHQuant(tile=16), (3, 100, 16), torch.float32, "gaussian"  # scopes of 256 and 44 tiles
    for codec in (TAHQuant(), TAHQuant(tile=128), TAHQuant(tile=8, high_bits=8), TAHQuant.published()):
        yield codec, (1, 3, 300), torch.float32, "wide"


@pytest.mark.parametrize(("codec", "shape", "dtype", "kind"), [*cases()])
def test_bytes_and_numbers(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    check(codec, tensor(shape, dtype, kind))


@pytest.mark.parametrize(
    ("size", "outliers", "bits", "gain"),
    [
        (571, (0, 7, 570), 4, "token"), (33, (), 8, "token"), (1, (), 4, "token"),
        (70, tuple(range(1, 70)), 5, "token"), (1100, tuple(range(1, 1100, 2)), 7, "static"), (600, (3,), 3, "token"),
        (71, (), 6, "token"), (71, (), 4, "static"),
    ],
)  # fmt: skip
def test_feature_int(size: int, outliers: tuple[int, ...], bits: int, gain: str) -> None:
    """Rows and bytes that fill no program; means, and sums over ranks in every dtype."""
    codec = for_three_ranks(size, outliers, bits, gain)
    check(codec, tensor((9, size), torch.float32, "hard"))
    for dtype in DTYPES if size == 33 else [DTYPES[size % 3]]:
        parts = [tensor((3, size), dtype, k).to(DEVICE) * 2 for k in ("hard", "grid", "gaussian")]
        found = []
        for name in ("reference", "gpu"):
            with kernels.backend(name):
                payloads = [codec.part(r).encode(x) for r, x in enumerate(parts)]
                sums = [codec.sum(payloads, out=torch.empty_like(parts[0]), divisor=d) for d in (1, 3)]
                found.append([*payloads, *sums])
        assert all(same(*pair).all() for pair in zip(*found, strict=True))


def test_a_scope_longer_than_registers() -> None:
    """Tokens chosen among 4500: more than the choice looks at at once, with many equal keys."""
    x = torch.randint(0, 3, (2, 4500, 8), generator=torch.Generator().manual_seed(0)).float()
    codec = replace(BY_TOKEN, tile=8)
    geometry = codec.geometry(x.shape)
    with kernels.backend("reference"):
        expected = geometry.layout.section(codec.encode(x), "widths")
    if DEVICE == "cuda":
        check(codec, x)
        return
    # In the interpreter 9000 tokens would take minutes: the choice alone, with the reference's keys.
    keys = entropy(x.view(-1, 8)).view(torch.int32)
    keys = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    widths = torch.zeros_like(expected)
    launch(select_long_scope, 2, 4, {}, keys, widths, geometry.low, geometry.flag_bytes, per_scope=geometry.per_scope)
    assert torch.equal(widths, expected)


@triton.jit
def _count(widths, out, ahead, count):
    some, total = count_both(widths, ahead, count)
    tl.store(out, some)
    tl.store(out + 1, total)


def test_flags_are_counted_in_a_bitmap_longer_than_registers() -> None:
    bitmap = torch.randint(0, 256, (2600,), generator=torch.Generator().manual_seed(0)).byte()
    flags = (bitmap[:, None] >> torch.arange(8)) & 1
    for ahead, count in ((0, 20_797), (8192, 8192), (8193, 20_800), (3, 9)):
        out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        launch(_count, 1, 4, {}, bitmap.to(DEVICE), out, ahead, count)
        assert out.tolist() == [int(flags.view(-1)[:n].sum()) for n in (ahead, count)]


def test_strided_and_unaligned_input() -> None:
    x = torch.randn(4, 100, 3)[..., 1].to(DEVICE)
    flat = torch.randn(401).to(DEVICE)[1:]
    for codec in (TAHQuant(), GroupInt()):
        for given in (x, flat):
            with kernels.backend("reference"):
                expected = codec.encode(given)
            with kernels.backend("gpu"):
                assert torch.equal(codec.encode(given), expected)


@needs_gpu
def test_nothing_waits_for_the_gpu() -> None:
    x = torch.randn(4, 256, 1024, device=DEVICE)
    stochastic = GroupInt(rounding="stochastic")
    codecs = (TAHQuant(), TAHQuant.published(), TAHQuant(allocation="token"), stochastic, BlockFloat8())
    for codec in codecs:
        codec.round_trip(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for codec in codecs:
            codec.round_trip(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_directions_are_learned_without_waiting_and_errors_come_later() -> None:
    """Headers of messages are compared by the host once they are there."""
    x, codec = torch.randn(4, 256, 1024, device=DEVICE), TransformQuant(bits=4.0)
    settings = {"shape": x.shape, "dtype": x.dtype, "device": DEVICE}
    sender, receiver = (codec.open(**settings) for _ in range(2))
    receiver.decode(sender.encode(x))
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = receiver.decode(sender.encode(x))
        lost = sender.encode(x)
        wrong = receiver.decode(sender.encode(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert lost.numel() == sender.nbytes()
    assert (x - y).norm() < 0.5 * x.norm()
    assert wrong.isnan().all()
    with pytest.raises(ValueError, match="training message 3 .* expects training message 2"):
        receiver.state_dict()
    assert torch.isfinite(sender.state_dict()["directions"]).all()


@needs_gpu
@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("shape", [(2048, 4096), (777, 1000), (70_000, 3), (2, 200_000)])
def test_streams_of_symbols_made_on_a_gpu_and_read_elsewhere(shape: tuple[int, int], by_token: bool) -> None:
    """And the other way round; both decode to the same numbers, with about the same error."""
    z = torch.randn(shape) * torch.exp2(-8 * torch.arange(shape[1]) / shape[1]) * torch.exp2(torch.randn(shape[0], 1))
    geo = transform_geometry(*shape, by_token, None, 2.25)
    header, errors = torch.tensor([1, 2, 1, 3], dtype=torch.int32), []
    for encoder, device in ((cpu, "cpu"), (gpu, DEVICE)):
        payload = torch.zeros(geo.layout.nbytes, dtype=torch.uint8, device=device)
        encoder.encode(z.to(device), header.to(device), payload, geo)
        here, there = torch.empty_like(z), torch.empty(shape, device=DEVICE)
        assert cpu.decode(payload.cpu(), header, here, geo)
        assert gpu.decode(payload.to(DEVICE), header.to(DEVICE), there, geo)
        assert torch.equal(here.view(torch.int32), there.cpu().view(torch.int32))
        errors.append((here - z).norm() / z.norm())
    assert errors[1] < 1.02 * errors[0]


@needs_gpu
@pytest.mark.parametrize("codec", [TAHQuant(), TAHQuant.published(), GroupInt(), BlockFloat8()], ids=repr)
def test_in_a_cuda_graph(codec: Codec) -> None:
    x = torch.randn(4, 256, 1024, device=DEVICE, dtype=torch.bfloat16)
    codec.round_trip(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = codec.round_trip(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, codec.round_trip(x))


@needs_gpu
def test_on_a_side_stream() -> None:
    x, side = torch.randn(64, 256, 1024, device=DEVICE), torch.cuda.Stream()
    expected = TAHQuant().round_trip(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = TAHQuant().round_trip(x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, expected)


@needs_gpu
@pytest.mark.parametrize(
    ("codec", "launches"),
    [(TAHQuant(), 1), (TAHQuant.published(), 1), (TAHQuant(allocation="token"), 3),
        (BlockFloat8(), 1), (GroupInt(), 1)],
)  # fmt: skip
def test_launches(codec: Codec, launches: int) -> None:
    """Of an encoder; a decoder takes one."""
    x = torch.randn(4, 256, 1024, device=DEVICE)
    payload, y = codec.encode(x), torch.empty_like(x)
    codec.decode(payload, shape=x.shape, out=y)
    calls = partial(codec.encode, x, out=payload), partial(codec.decode, payload, shape=x.shape, out=y)
    for expected, call in zip((launches, 1), calls, strict=True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kernels = [e.name for e in profile.events() or () if e.device_type.name == "CUDA"]
        assert len(kernels) == expected, kernels


@needs_gpu
@pytest.mark.parametrize("codec", [TAHQuant(), GroupInt(), BlockFloat8()], ids=repr)
def test_more_than_2_to_the_31_elements(codec: Codec) -> None:
    """The last rows differ from those that wrapped positions would lead to."""
    shape = (2**31 + 2**20) // 4096, 4096
    x = torch.randn(1, 4096, device=DEVICE, dtype=torch.bfloat16).expand(shape).contiguous()
    x[-512:] = torch.randn_like(x[-512:])
    y = codec.round_trip(x)
    assert torch.equal(y[-512:], codec.round_trip(x[-512:]))
    assert torch.equal(y[:512], codec.round_trip(x[:512]))


@needs_gpu
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31 - 8, 2**31])
@pytest.mark.parametrize("codec", [GroupInt(), BlockFloat8()], ids=repr)
def test_around_2_to_the_31_elements(codec: Codec, numel: int) -> None:
    x = torch.zeros(numel, device=DEVICE, dtype=torch.bfloat16)
    x[-1024:] = torch.randn(1024, device=DEVICE, dtype=torch.bfloat16)
    size = codec.nbytes(x.shape)
    buffer = torch.full((size + 2**20,), 77, dtype=torch.uint8, device=DEVICE)
    payload = codec.encode(x, out=buffer[2**19 : 2**19 + size])
    assert (buffer[: 2**19] == 77).all()
    assert (buffer[2**19 + size :] == 77).all()
    tail = codec.decode(payload, shape=x.shape, dtype=x.dtype)[-512:]
    assert same(tail, codec.round_trip(x[-512 - numel % 128 :])[-512:]).all()


@needs_gpu
def test_by_name_on_a_tensor_elsewhere() -> None:
    with kernels.backend("gpu"), pytest.raises(RuntimeError, match="needs tensors on a GPU; found cpu"):
        GroupInt().encode(torch.randn(8))
