"""Examples of `AQSGD` for the tests of all formats."""

from lowbit.codecs import AQSGD, BlockFloat8, GroupInt, TAHQuant
from tests.fuzz.sessions import Differences
from tests.fuzz.targets import Target


def hostile() -> list[Target]:
    inner = (GroupInt(), TAHQuant.published(), BlockFloat8())
    return [Differences(AQSGD(inner=codec), (3, 5, 24)) for codec in inner]
