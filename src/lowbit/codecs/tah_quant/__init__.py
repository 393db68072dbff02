"""The format `lowbit.codecs.TAHQuant`."""
