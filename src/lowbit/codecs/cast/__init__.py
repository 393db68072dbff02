"""The format `lowbit.codecs.Cast`."""
