"""Transport between ranks: messages, their tags, checksums, agreement, and detection of the rank that failed first.

No name is public here: `lowbit.collectives` offers those that users need. Importing this package loads no PyTorch.
"""

__all__: list[str] = []
