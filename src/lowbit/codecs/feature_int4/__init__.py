"""The format `lowbit.codecs.FeatureInt4`."""
