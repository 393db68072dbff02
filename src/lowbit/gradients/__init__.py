"""Gradients in few bits: kept between micro-batches."""

from __future__ import annotations

from lowbit.gradients.storage import GradientStorage

__all__ = ["GradientStorage"]
