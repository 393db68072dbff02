"""The format `lowbit.codecs.SubspaceQuant`."""
