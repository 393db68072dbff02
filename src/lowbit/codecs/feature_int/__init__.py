"""The format `lowbit.codecs.FeatureInt`."""
