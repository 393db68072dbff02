"""Bytes between ranks, without meaning: messages, their tags, what ranks agree on, and who failed first.

No name is public here: `lowbit.collectives` offers those that users need. Importing this package loads no PyTorch.
"""

__all__: list[str] = []
