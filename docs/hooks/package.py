"""Addresses of the packages, and their description on the package index: README.md with links that hold there.

Both follow from `[tool.lowbit]` in pyproject.toml: `repository`, such as https://github.com/OWNER/lowbit, and
`documentation`, which are empty until they exist.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"<picture>.*?(<img[^>]*>)\s*</picture>", re.S)
_HTML_IMAGE = re.compile(r'(<img[^>]*\bsrc=")(?!https?:)([^"]+)')
_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)]+)")
_LINK = re.compile(r"(?<!!)(\[(?:!\[[^\]]*\]\([^)]*\)|[^\]])*\])\((?!https?:|#)([^)]+)\)")
_FENCE_WORDS = re.compile(r"(?m)^```(\w+) .*$")


class CustomMetadataHook(MetadataHookInterface):
    """What Hatchling asks for `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata of a package."""
        root = Path(self.root)
        addresses = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lowbit"]
        text = description((root / "README.md").read_text(encoding="utf-8"), addresses["repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {name.capitalize(): address for name, address in addresses.items() if address}


def description(readme: str, repository: str) -> str:
    """Return the README for the package index, without links to files if there is no repository to hold them."""
    text = _FENCE_WORDS.sub(r"```\1", _PICTURE.sub(r"\1", readme))
    if not repository:
        text = re.sub(r"<img[^>]*\bsrc=\"(?!https?:)[^>]*>\n?", "", text)
        text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n?", "", text)
        return _LINK.sub(lambda link: link[1][1:-1], text)
    text = _HTML_IMAGE.sub(rf"\1{repository}/raw/main/\2", text)
    text = _IMAGE.sub(rf"\1{repository}/raw/main/\2", text)
    return _LINK.sub(rf"\1({repository}/blob/main/\2)", text)
