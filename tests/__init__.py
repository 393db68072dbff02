"""Tests of lowbit; their folders mirror src/lowbit."""
