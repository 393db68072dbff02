"""Decoders under hostile bytes, in memory between pages that may not be touched: `python -m tests.fuzz --help`."""
