"""Examples of `TransformQuant` for the tests of all formats."""

from lowbit.codecs import TransformQuant
from lowbit.kernels.layout import Layout
from tests.fuzz.guard import Shape
from tests.fuzz.sessions import TransformDecoding, TransformEncoding, TransformMessages
from tests.fuzz.targets import Target

MESSAGES: list[tuple[TransformQuant, Shape]] = [
    (TransformQuant(), (6, 40)), (TransformQuant(step="message"), (100, 9)), (TransformQuant(bits=12), (70, 33)),
    (TransformQuant(bits=8, step="message"), (2, 20, 64)), (TransformQuant(), (3, 130)),
    (TransformQuant(step="message"), (400,)), (TransformQuant(), (300, 520)),  # two streams
]  # fmt: skip


def layout(codec: TransformQuant, shape: tuple[int, ...]) -> Layout:
    return codec.geometry(shape).layout


def hostile() -> list[Target]:
    small = MESSAGES[:-1]
    kinds = (TransformMessages, small), (TransformDecoding, MESSAGES), (TransformEncoding, small)
    return [kind(*message) for kind, messages in kinds for message in messages]
