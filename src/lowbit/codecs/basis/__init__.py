"""Directions that both ends of a boundary learn from its messages, for `TransformQuant`."""
