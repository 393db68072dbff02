"""Directions that span most of a boundary's tokens, and the orthonormal transform that begins with them.

A sender renews directions with every message, and both ends adopt the new ones. This is the definition, and also runs
on GPUs: mostly PyTorch's matrix products, without synchronization. A basis is float32, except digests, int64 (), and
headers, int32 (4,).

The transform is a product of Householder reflections, one for each direction, in the compact form H = I - Y' T Y. A
token x has the coefficients x H, and is restored by multiplying them by H'. Tokens are never multiplied by a C x C
matrix. Both ends compute H from the same directions; the last bits of their results may differ, which changes a tensor
only by rounding, because no code depends on them. Shape suffixes: R rows (tokens), K directions, M of them renewed, C
channels.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.codecs.transform_quant.reference import TransformGeometry
from lowbit.kernels import implementation
from lowbit.kernels.exact import SMALLEST, store
from lowbit.kernels.exact import inverse as reciprocal

FARTHEST = 2.0**96  # larger coefficients are not coded: decoded values could overflow
PLACES, WEIGHT = 65521, 0x9E3779B1  # of a digest's weights
STRIDES = (3, 3, 1)  # of the tokens in each iteration of the block power method, which begins at random
MANY = 256  # tokens; with fewer, all iterations use all tokens
RIDGE = 1e-4  # directions have length 1 and are nearly orthogonal; those that do not exist yet are zeros
LONGEST = 1.0  # largest allowed length in a payload; a direction of length 1 has at most 1/127


class Basis(NamedTuple):
    """State of one end of a boundary: directions, the inverse of their products, and a digest of their history."""

    directions_KC: Tensor
    inverse_KK: Tensor
    digest: Tensor


class Renewal(NamedTuple):
    """Directions that replace others, as they are sent: 8-bit integers, each direction times a length.

    Attributes:
        slots_M: int16, the indices to replace; -1: none, because the tokens were unusable.
        lengths_M: float32.
        codes_MC: int8.
    """

    slots_M: Tensor
    lengths_M: Tensor
    codes_MC: Tensor

    def digest(self) -> Tensor:
        """Digest, an int64 number of 31 bits, which differs after any change of one slot, one code or half a length.

        One in 2^31 of all other changes goes unnoticed. Integer sums do not depend on the order.
        """
        # Parts and weights are below 2^16, so the lowest 31 bits of their products are not all zero: each change shows.
        parts = (self.slots_M, self.lengths_M.view(torch.int16), self.codes_MC.reshape(-1))
        values = torch.cat([part.long() for part in parts])
        return (values * _weights(values.numel(), values.device)).sum() & 0x7FFFFFFF


def renew(
    x: Tensor, basis: Basis, payload: Tensor, new: Basis, number: int, training: bool, geo: TransformGeometry
) -> Tensor:
    """Write header and directions to the payload of x (R, C), and compute the next basis.

    Args:
        basis: the sender's basis. new: filled with the next one, but for the inverse.
        number: number of the message.

    Returns:
        Products of the tokens with the new basis, (R, K).
    """
    full_RC = x.float()
    products_RK = full_RC @ basis.directions_KC.t()
    renewal = find_renewal(full_RC, basis.directions_KC, geo.renewed, products_RK, basis.inverse_KK)
    for section, part in zip(_sections(payload, geo), renewal, strict=True):
        section.copy_(part)
    header = geo.layout.section(payload, "header", torch.int32)
    _follow(renewal, basis.directions_KC, basis.digest, header, new.directions_KC, new.digest, number, training)
    index_M = renewal.slots_M.long().clamp(min=0)  # the other products stay
    return products_RK.index_copy(1, index_M, full_RC @ new.directions_KC[index_M].t())


def follow(
    payload: Tensor, directions: Tensor, digest: Tensor, header: Tensor, next_directions: Tensor, next_digest: Tensor,
    number: int, training: bool, geo: TransformGeometry,
) -> None:  # fmt: skip
    """Compute the header that the payload must have to fit this basis, and the basis with the payload's directions.

    Args:
        directions, digest: the receiver's. number: of its next message. The other arguments are written.
    """
    renewal = Renewal(*_sections(payload, geo))
    _follow(renewal, directions, digest, header, next_directions, next_digest, number, training)


def _follow(
    renewal: Renewal,
    directions_KC: Tensor,
    digest: Tensor,
    header: Tensor,
    next_directions_KC: Tensor,
    next_digest: Tensor,
    number: int,
    training: bool,
) -> None:
    count, (slots_M, lengths_M, codes_MC) = len(directions_KC), renewal
    place_M = torch.where(slots_M < 0, count, slots_M.long()).clamp(max=count)  # the last one: without slot
    times_K = place_M.new_zeros(count + 1).index_add_(0, place_M, torch.ones_like(place_M))
    within = (slots_M >= -1) & (slots_M < count)
    # A length that no direction of length 1 can have is refused; so is NaN, which would stay in the basis for good.
    sane = (slots_M < 0) | ((lengths_M >= 0) & (lengths_M <= LONGEST))
    fits = within.all() & (times_K[:count] <= 1).all() & sane.all()
    own = torch.where(fits, renewal.digest(), -1)
    room = torch.cat([directions_KC, torch.zeros_like(directions_KC[:1])])
    room.index_copy_(0, torch.where(fits, place_M, count), codes_MC.float() * lengths_M[:, None])
    next_directions_KC.copy_(room[:count])
    next_digest.copy_((digest * 31 + own) & 0x7FFFFFFF)
    header[0].fill_(number % (1 << 31))
    header[1].copy_(digest)
    header[2].fill_(int(training))
    header[3].copy_(own)


def _sections(payload: Tensor, geo: TransformGeometry) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, lengths and codes in a payload, with the types of a `Renewal`."""
    section = geo.layout.section
    return (
        section(payload, "slots", torch.int16),
        section(payload, "lengths", torch.float32),
        section(payload, "directions", torch.int8).view(geo.renewed, geo.channels),
    )


def find_renewal(x_RC: Tensor, directions_KC: Tensor, count: int, products_RK: Tensor, inverse_KK: Tensor) -> Renewal:
    """Find the principal directions of tokens outside the basis, to replace its `count` least useful directions.

    A block power method runs on the tokens' remainder without the directions that stay: it needs products with `count`
    columns, and no C x C matrix. If all directions are renewed, the result is the best basis for these tokens.

    Args:
        x_RC: float32. directions_KC: the last basis; zeros for directions that do not exist yet.
        products_RK: of tokens and directions; inverse_KK: `gram_inverse(directions_KC)`.
    """
    low, high = x_RC.aminmax()
    top = torch.maximum(high, -low)
    usable = (top >= SMALLEST) & (top <= FARTHEST)  # false for NaN
    scale = reciprocal(torch.where(usable, top, 0.0))  # squares of tiny gradients would underflow
    c_RK = products_RK @ inverse_KK
    slots_M = (c_RK * scale).square().sum(0).argsort(stable=True)[:count]
    # Removing directions changes the others' coefficients; a block of the inverse gives the change.
    factor_MM, _ = torch.linalg.cholesky_ex(inverse_KK[slots_M][:, slots_M])
    share_MK = torch.cholesky_solve(inverse_KK[slots_M], factor_MM)
    kept_RK = (c_RK - c_RK[:, slots_M] @ share_MK).index_fill(1, slots_M, 0.0)
    rest_RC = torch.addmm(x_RC, kept_RK, directions_KC, alpha=-1)
    new_MC = leading(rest_RC, count, scale)
    lengths_M = new_MC.abs().amax(1) / 127
    codes_MC = (new_MC / lengths_M[:, None]).round().clamp(-127, 127)
    slots_M = torch.where(usable, slots_M, -1)
    return Renewal(slots_M.to(torch.int16), lengths_M, codes_MC.to(torch.int8))


def leading(x_RC: Tensor, count: int, scale: Tensor) -> Tensor:
    """Approximate principal directions of these tokens, orthonormal (count, C); arbitrary ones if there is NaN.

    Args:
        scale: factor that keeps squares of the tokens from underflow.
    """
    v_MC = start(count, x_RC.shape[1], x_RC.device)
    for stride in strides(len(x_RC)):
        seen_RC = x_RC[::stride]
        # Products with few rows are several times faster on CPUs than with few columns.
        along_MR = (v_MC @ seen_RC.t()) * scale
        powers_MC = (along_MR @ seen_RC * scale).nan_to_num(0.0, 0.0, 0.0)
        v_MC = torch.linalg.qr(powers_MC.t())[0].t().contiguous()
    return v_MC


def strides(rows: int) -> tuple[int, ...]:
    """Return the stride of the tokens in each iteration of the power method.

    With a third of the tokens in all but the last, errors on SmolLM2 and Qwen2.5 grew by 1.3 % at most.
    """
    return STRIDES if rows >= MANY else (1,) * len(STRIDES)


# The following results are cached, because they are the same for every message. They are made on the host, whose copy
# is synchronous, so that every stream may read them.


@functools.lru_cache(maxsize=64)
def start(count: int, channels: int, device: torch.device) -> Tensor:
    """Start matrix of the power method."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start_CM = torch.randn(channels, count, generator=generator, dtype=torch.float32, device="cpu")
    return start_CM.t().contiguous().to(device)


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    return ((torch.arange(count, device="cpu") % PLACES + 1) * WEIGHT).to(device)


def gram_inverse(directions_KC: Tensor) -> Tensor:
    """Matrix (K, K) that turns tokens' products with the directions into coefficients.

    Decoded directions are not quite orthogonal to each other: without it, overlaps would count twice.
    """
    gram_KK = directions_KC @ directions_KC.t()
    gram_KK.diagonal().add_(RIDGE)
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(gram_KK)[0])


class Transform:
    """The transform of directions (K, C), float32.

    Args:
        before: the transform of directions that differ at `slots` alone, int16 (M,), with -1 for none.
    """

    def __init__(self, directions_KC: Tensor, before: "Transform | None" = None, slots: Tensor | None = None) -> None:
        self.directions_KC = directions_KC

    def coefficients(self, x_RC: Tensor, products_RK: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Coefficients of float32 tokens, (R, C), whose products with the directions may be known; `out` may be x."""
        y_KC, ty_KC = self._reflections(back=False)
        return torch.addmm(x_RC, x_RC @ y_KC.t(), ty_KC, alpha=-1, out=out)

    def tokens(self, z_RC: Tensor, out: Tensor, factors_C: Tensor | None = None) -> None:
        """Write the tokens of these coefficients, times factors of channels if given, to `out`; may change `z_RC`."""
        y_KC, ty_KC = self._reflections(back=True)
        x_RC = out if out.dtype == torch.float32 else z_RC
        self._give(torch.addmm(z_RC, z_RC @ y_KC.t(), ty_KC, alpha=-1, out=x_RC), out, factors_C)

    def _give(self, x_RC: Tensor, out: Tensor, factors_C: Tensor | None) -> None:
        if factors_C is not None:
            x_RC.mul_(factors_C)
        if x_RC is not out:
            store(x_RC, out, False)

    def inverse(self) -> Tensor:
        """See `gram_inverse`."""
        return gram_inverse(self.directions_KC)

    def _reflections(self, *, back: bool) -> tuple[Tensor, Tensor]:
        """Return Y, (K, C), and T Y, or T' Y for the way back; a direction of zeros reflects nothing.

        The signs of reflections are those of float64 sums, so that all ends find the same.
        """
        directions_KC = self.directions_KC
        packed_CK, tau_K = torch.geqrf(directions_KC.t().double())
        y_KC = packed_CK.t().triu(1)
        y_KC.diagonal().fill_(1)
        y_KC *= (tau_K != 0)[:, None]
        # The inverses of T and T' are the two triangles of Y Y', whose diagonal is the sum of both diagonals.
        inverse_KK = (y_KC @ y_KC.t()).triu_(1)
        inverse_KK.diagonal().copy_(torch.where(tau_K != 0, tau_K, 1.0).reciprocal_())
        inverse_KK = inverse_KK.t() if back else inverse_KK
        return y_KC.float(), torch.linalg.solve_triangular(inverse_KK, y_KC, upper=not back).float()


def coefficients(x_RC: Tensor, directions_KC: Tensor) -> Tensor:
    """Coefficients of float32 tokens, (R, C)."""
    return implementation(Transform, x_RC.device)(directions_KC).coefficients(x_RC)
