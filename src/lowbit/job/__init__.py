"""From a command line to a process group: how the processes of a run start, meet, are watched, and end.

No name is public here. Importing this package loads no PyTorch.
"""

__all__: list[str] = []
