"""From a command line to a process group: start the processes of a run, let them meet, watch and end them.

No name is public here. Importing this package loads no PyTorch.
"""

__all__: list[str] = []
