"""Pages of results: one HTML file with everything in it, which asks the network for nothing."""

from __future__ import annotations

from lowbit.report.page.page import GENERATOR, Page, Part, try_to_write, write_page

__all__ = ["GENERATOR", "Page", "Part", "try_to_write", "write_page"]
