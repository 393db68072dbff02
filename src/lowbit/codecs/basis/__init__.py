"""Directions that both ends of a boundary learn from its messages: what `SubspaceQuant` and `TransformQuant` share."""
