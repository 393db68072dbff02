"""Write the golden payloads that are missing."""

from lowbit import kernels
from tests.lowbit.codecs.examples import every

from . import FOLDER

for name, content in every("GOLDEN"):
    if not (FOLDER / name).exists():
        with kernels.backend("reference"):
            (FOLDER / name).write_bytes(content())
