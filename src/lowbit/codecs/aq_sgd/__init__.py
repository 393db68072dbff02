"""The format `lowbit.codecs.AQSGD`."""
