"""The format `lowbit.codecs.BlockFloat8`."""
