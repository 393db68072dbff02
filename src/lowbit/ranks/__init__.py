"""The ranks of a run: how they start and meet, what they agree on, who is alive, and who failed first.

No name is public here: `lowbit.collectives` offers those that users need. Importing this package loads no PyTorch.
"""

__all__: list[str] = []
