"""Sessions that remember messages, under hostile ones: also such as know the digests, and several in a row."""

import functools
import math
import random
from typing import Any

import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import AQSGD, TransformQuant
from lowbit.codecs.transform_quant.basis import follow
from lowbit.codecs.transform_quant.codec import TransformSession
from lowbit.codecs.transform_quant.reference import LARGEST, decode

from .guard import BEFORE, Bench, Shape
from .targets import DTYPES, Case, as_bytes, as_tensor, damage, hard, hostile_numbers, layout_of, same, spans_of


@functools.cache
def followed(codec: TransformQuant, shape: Shape) -> list[tuple[dict[str, Any], bytes]]:
    """Three valid messages, each with the state of the receiver that expects it."""
    rng, found = random.Random(repr(shape)), []
    sender, receiver = (codec.open(shape=shape, dtype=torch.float32) for _ in range(2))
    for _ in range(3):
        state, message = receiver.state_dict(), sender.encode(hard(rng, shape))
        found.append((state, as_bytes(message)))
        receiver.decode(message)
    return found


class TransformMessages:
    """A receiver that has followed two messages, and gets one or two hostile ones.

    A forged one has the header that belongs to its bytes, so that it is not refused for its numbers and digests.
    """

    def __init__(self, codec: TransformQuant, shape: Shape) -> None:
        self.codec, self.name, self._shape = codec, f"{codec!r} {shape}", shape

    def case(self, rng: random.Random) -> Case:
        at, dtype, training = rng.randrange(3), rng.choice(DTYPES), rng.random() < 0.7
        spans = spans_of(layout_of(self.codec, self._shape))
        state, message = followed(self.codec, self._shape)[at]
        made = [damage(rng, message, spans) for _ in range(rng.randint(1, 2))]
        forged = [rng.random() < 0.7 for _ in made]

        def run(bench: Bench) -> bytes:
            session = self.codec.open(shape=self._shape, dtype=dtype)
            assert isinstance(session, TransformSession)
            session.load_state_dict(state)
            found = b""
            for (_, payload), forge in zip(made, forged, strict=True):
                message = self._forged(session, payload, training) if forge else payload
                found += self._decode(bench, session, message, training)
            return found

        kinds = [f"{kind}{' forged' if forge else ''}" for (kind, _), forge in zip(made, forged, strict=True)]
        return Case(f"{self.name} {dtype} state {at} {kinds}", run, exact=False)

    def _decode(self, bench: Bench, session: TransformSession, message: bytes, training: bool) -> bytes:
        """What comes of it, with the state; an error changes neither."""
        room, out = bench.out(self._shape, session.dtype)
        before, state = room.content, _bytes(session.state_dict())
        try:
            session.decode(bench.payload(message), out=out, training=training)
        except ValueError as error:
            assert room.content == before, "out was written though the message was refused"
            assert _bytes(session.state_dict()) == state, "the state changed by a message refused"
            return str(error).encode()
        return room.content + _bytes(session.state_dict())

    def _forged(self, session: TransformSession, payload: bytes, training: bool) -> bytes:
        """With the header that the receiver expects of these bytes; both backends expect the same."""
        memory, geo, found = session._memory, session._geometry, []
        for backend in ("cpu", "reference"):
            header, content = torch.empty(4, dtype=torch.int32), as_tensor(payload, torch.uint8)
            then = [torch.empty_like(memory.directions), torch.empty_like(memory.digest)]
            with kernels.backend(backend):
                follower = kernels.implementation(follow, content.device)
                follower(content, memory.directions, memory.digest, header, *then, memory.messages, training, geo)
            found.append([header, *then])
        assert all(same(a, b).all() for a, b in zip(*found, strict=True)), "the backends follow differently"
        return as_bytes(header) + payload[16:]


def _bytes(state: dict[str, Any]) -> bytes:
    numbers = repr([(k, v) for k, v in state.items() if not isinstance(v, Tensor)]).encode()
    return numbers + b"".join(v.numpy().tobytes() for v in state.values() if isinstance(v, Tensor))


class TransformDecoding:
    """The entropy decoder behind a session: the reference's coefficients, exactly, or refused by both."""

    def __init__(self, codec: TransformQuant, shape: Shape) -> None:
        self.codec, self.name, self._shape = codec, f"operators of {codec!r} {shape}", shape

    def case(self, rng: random.Random) -> Case:
        geo = self.codec.geometry(self._shape)
        _, valid = rng.choice(followed(self.codec, self._shape))
        kind, payload = damage(rng, valid, spans_of(geo.layout))
        size = geo.rows * geo.channels

        def run(bench: Bench) -> bytes:
            """The coefficients, and whether they are good; anything may be in the place of those that are not."""
            _, z = bench.out((geo.rows, geo.channels), torch.float32)
            header = geo.layout.section(as_tensor(payload, torch.uint8), "header", torch.int32)
            whole = kernels.implementation(decode, z.device)(bench.payload(payload), header, z, geo)
            return as_bytes(torch.cat([z.view(-1) if whole else torch.zeros(size), torch.full((1,), float(whole))]))

        return Case(f"{self.name} {kind}", run, torch.float32)


class TransformEncoding:
    """A sender of hostile numbers: its payload can be decoded, and NaN comes of what is none or far too large."""

    def __init__(self, codec: TransformQuant, shape: Shape) -> None:
        self.codec, self.name, self._shape = codec, f"encode {codec!r} {shape}", shape

    def case(self, rng: random.Random) -> Case:
        shape, dtype = self._shape, rng.choice(DTYPES)
        kinds, contents = zip(*(hostile_numbers(rng, math.prod(shape), dtype) for _ in range(2)), strict=True)

        def run(bench: Bench) -> bytes:
            sender, receiver = (self.codec.open(shape=shape, dtype=dtype) for _ in range(2))
            found = b""
            for content in contents:
                size = sender.nbytes()
                _, payload = bench.written("the payload", BEFORE[bench.at_end] * size, (size,), torch.uint8)
                x = bench.read_only("x", content, shape, dtype)
                y = receiver.decode(sender.encode(x, out=payload)).float().view(-1, shape[-1])
                if self.codec.sized(shape, dtype)[1]:  # plain numbers
                    continue
                most = x.float().view(-1, shape[-1]).abs().amax(1)
                lost = y.isnan().all(1)
                assert not y[~lost].isnan().any(), "a part of a token is NaN"
                assert lost[~most.isfinite()].all()
                # A coefficient is larger than the token's largest number by up to the root of how many there are.
                assert not lost[most * shape[-1] < LARGEST].any()
                found += as_bytes(lost)
            return found

        return Case(f"{self.name} {dtype} {kinds}", run, exact=False)


class Differences:
    """An `AQSGD` session: known samples by differences, new ones in full."""

    def __init__(self, codec: AQSGD, shape: Shape) -> None:
        self.codec, self.name, self._shape = codec, f"{codec!r} {shape}", shape

    def case(self, rng: random.Random) -> Case:
        count, dtype = self._shape[0], rng.choice(DTYPES)
        samples = rng.sample(range(2 * count), count)
        known = {str(i): hard(random.Random(i), self._shape[1:]) for i in range(count)}
        probe = self.codec.open(shape=self._shape, dtype=dtype)
        probe.load_state_dict(known)
        probe.samples = samples
        valid = probe.encode(hard(rng, self._shape), training=False).numpy().tobytes()
        kind, payload = damage(rng, valid, [(0, len(valid))])

        def run(bench: Bench) -> bytes:
            session = self.codec.open(shape=self._shape, dtype=dtype)
            session.load_state_dict(known)
            session.samples = samples
            room, out = bench.out(self._shape, dtype)
            session.decode(bench.payload(payload), out=out)
            return room.content + _bytes(session.state_dict())

        return Case(f"{self.name} {dtype} {kind}", run, exact=False)
