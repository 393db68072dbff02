"""The format `lowbit.codecs.TransformQuant`."""
