"""Checkpoints that are whole or absent, verified to the last byte, and that any layout can go on from."""
