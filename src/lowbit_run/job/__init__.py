"""From a command line to a process group; no name is public, and importing it loads no PyTorch."""

__all__: list[str] = []
