"""`TransformQuant` on a GPU: what either backend sends, the other decodes to the same numbers, to the last bit.

On a GPU where there is one, else in Triton's interpreter, which takes 20 ms or more for each step of a stream.
"""

import math
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lowbit.codecs.transform_quant import reference
from lowbit.codecs.transform_quant.reference import TransformGeometry, transform_geometry

pytest.importorskip("triton", reason="no Triton; make test-cpus installs it")

from lowbit.codecs.transform_quant import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = pytest.mark.slow
GUARD = 64  # bytes and numbers around what may be written


@dataclass
class Message:
    """Coefficients, and what one backend sends for them."""

    z: Tensor
    header: Tensor
    payload: Tensor
    geo: TransformGeometry

    def decoded(self, backend: ModuleType) -> tuple[Tensor, bool]:
        """The numbers that a backend makes of it, and whether it takes it as whole; nothing else is written."""
        device = "cpu" if backend is reference else DEVICE
        room = torch.full((self.z.numel() + 2 * GUARD,), 7.0, device=device)
        payload = torch.full((len(self.payload) + 2 * GUARD,), 77, dtype=torch.uint8, device=device)
        payload[GUARD:-GUARD] = self.payload
        before = payload.clone()
        y = room[GUARD:-GUARD].view(self.z.shape)
        whole = backend.decode(payload[GUARD:-GUARD], self.header.to(device), y, self.geo)
        assert (whole.shape, whole.dtype, whole.device.type) == ((), torch.bool, torch.device(device).type)
        assert torch.equal(payload, before)
        assert (torch.cat([room[:GUARD], room[-GUARD:]]) == 7).all()
        return y.cpu(), bool(whole)

    def section(self, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        return self.geo.layout.section(self.payload, name, dtype)

    def table(self) -> Tensor:
        """Words, codes beyond the symbols and bytes of lowest bits of each stream."""
        return self.section("streams")[: 12 * self.geo.streams].view(torch.int32).view(-1, 3)


def tensor(rows: int, channels: int) -> Tensor:
    """A few strong channels, and tokens of several sizes."""
    g = torch.Generator().manual_seed(rows * channels)
    slope = torch.exp2(-8 * torch.arange(channels) / channels)
    return torch.randn(rows, channels, generator=g) * slope * torch.exp2(torch.randn(rows, 1, generator=g))


def sent(backend: ModuleType, z: Tensor, by_token: bool, bits: float) -> Message:
    """A message of so many bits for the symbols."""
    geo = transform_geometry(*z.shape, by_token, None, bits)
    device = "cpu" if backend is reference else DEVICE
    header = torch.tensor([3, -77, 1, 123456789], dtype=torch.int32, device=device)
    payload = torch.zeros(geo.layout.nbytes + 2 * GUARD, dtype=torch.uint8, device=device)
    inside = payload[GUARD:-GUARD]
    backend.encode(z.to(device), header, inside, geo)
    assert not torch.cat([payload[:GUARD], payload[-GUARD:]]).any()
    return Message(z, header.cpu(), inside.cpu(), geo)


def numbers_of(message: Message) -> Tensor:
    """What both backends decode it to."""
    (a, good), (b, whole) = message.decoded(reference), message.decoded(gpu)
    assert (good, whole) == (True, True)
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(5).view(torch.int32), b.nan_to_num(5).view(torch.int32))
    return a


@pytest.mark.parametrize(
    ("rows", "channels", "by_token", "bits", "stream"),
    [
        (1, 7, True, 4.0, 1 << 16),
        (7, 70, True, 3.0, 128),
        pytest.param(5, 100, False, 2.0, 200, marks=SLOW),
        (33, 8, False, 9.0, 1 << 16),
    ],
)
def test_each_backend_decodes_what_the_other_sends(
    rows: int, channels: int, by_token: bool, bits: float, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "STREAM", stream)
    z = tensor(rows, channels)
    messages = [sent(backend, z, by_token, bits) for backend in (reference, gpu)]
    errors = [(numbers_of(message) - z).norm() / z.norm() for message in messages]
    assert messages[0].geo.streams == max(1, min(rows, rows * channels // stream))
    assert errors[1] < (1.15 if rows > 1 else 2) * errors[0]
    if bits == 9:
        assert (messages[1].table()[:, 2] > 0).all(), "lowest bits travel"


@pytest.mark.parametrize("by_token", [pytest.param(True, marks=SLOW), False])
def test_zeros_nan_and_outliers(by_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STREAM", 160)
    z = tensor(6, 70)
    z[:, 60:] = 0
    z[0, 65], z[4, 66] = 100, -1e4  # far beyond what their channels' scales say
    z[1], z[2, 5], z[3, 6], z[5] = 0, math.nan, -math.inf, 1e-39
    for backend in (reference, gpu):
        message = sent(backend, z, by_token, 5.0)
        y = numbers_of(message)
        assert y[2:4].isnan().all()
        assert not y[[1, 5]].any()
        assert (y - z)[[0, 4]].norm() < 0.05 * z[[0, 4]].norm()


@pytest.mark.slow
def test_attempts_that_do_not_fit_are_repeated_with_larger_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    z = tensor(6, 70)
    steps = []
    for reserve in (0.004, -0.15):
        monkeypatch.setattr(gpu, "RESERVE", reserve)
        message = sent(gpu, z, True, 3.0)
        assert (numbers_of(message) - z).norm() < 0.3 * z.norm()
        steps.append(int(message.section("scalars", torch.int32)[2]))
    assert abs(steps[1] - steps[0]) < 48
    monkeypatch.setattr(gpu, "RESERVE", -9.0)
    y = numbers_of(sent(gpu, z, True, 3.0))  # as a last resort, nothing is coded
    assert y.isfinite().all()


def test_hostile_streams_are_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STREAM", 64)
    message = sent(reference, tensor(4, 40), True, 7.0)
    good, size, g = message.payload.clone(), 12 * message.geo.streams, torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (message.geo.layout.sizes["streams"] // 4,), generator=g).tolist()
    assert message.decoded(gpu)[1]
    for name, at, *numbers in (
        ("streams", 0, -1), ("streams", 0, 1 << 30), ("streams", 4, 1), ("streams", 8, 1), ("streams", 8, 2**31 - 1),
        ("streams", 12, 7), ("streams", size, 0), ("streams", size, -1), ("streams", 0, *noise),
        ("scalars", 0, 2**31 - 1, -(2**31), 2**31 - 1, 0),
    ):  # fmt: skip
        message.payload.copy_(good)
        message.section(name)[at : at + 4 * len(numbers)].view(torch.int32).copy_(torch.tensor(numbers))
        assert not message.decoded(gpu)[1], (name, at, numbers[:4])
