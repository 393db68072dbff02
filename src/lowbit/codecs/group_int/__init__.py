"""The format `lowbit.codecs.GroupInt`."""
