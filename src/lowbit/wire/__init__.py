"""Transport between ranks; no name is public, and importing it loads no PyTorch."""

__all__: list[str] = []
