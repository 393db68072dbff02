"""Benchmarks: each is a frozen `Settings` and a `run(settings)` that returns a `Report`."""

from __future__ import annotations

from lowbit.bench.report import Report

__all__ = ["Report"]
