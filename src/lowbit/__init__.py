"""Low-bit communication for PyTorch training.

Importing this package loads nothing else; import what you use from its subpackages:

* `lowbit.codecs`: formats that turn a tensor into few bytes and back.
* `lowbit.activations`: `compress_saved_`, few bits for what autograd keeps between forward and backward.
* `lowbit.pipeline`: `LowBitStage`, a drop-in for `torch.distributed.pipelining.PipelineStage`.
* `lowbit.gradients` and `lowbit.tensor_parallel`: sums over replicas and over tensor-parallel ranks in few bits.

The `lowbit` command is a program of its own, `lowbit_run`, whose `lowbit_run.train` programs can import as well.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("lowbit")
    """Version of the installed package."""
except PackageNotFoundError:  # a plain checkout on PYTHONPATH, never installed
    __version__ = "0.1.0"
