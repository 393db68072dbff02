"""Sections of `Settings` that are still dataclasses with an "Args:" in their docstring. Goes with the last of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import Any

from lowbit.config import section


@functools.cache
def as_section(settings: Any) -> Any:
    """A section with the fields, checks and explanations of a dataclass."""
    if hasattr(settings, "section_name"):
        return settings
    made: Any = section()(settings)
    for name, text in explanations(settings).items():
        made.__pydantic_fields__[name].description = text
    return made


def explanations(settings: type) -> dict[str, str]:
    """What the docstring's "Args:" says of each field; several may share it, as in "dim, layers: of the model"."""
    _, _, text = inspect.cleandoc(settings.__doc__ or "").partition("Args:\n")
    text = " ".join(re.split(r"\n(?=\S)", text)[0].split())
    names = "|".join(field.name for field in dataclasses.fields(settings))
    pieces = re.split(rf"(?:^|(?<=\s))((?:{names})(?:, (?:{names}))*): ", text)
    return {
        name: explanation.strip(" ;.") + "."
        for entry, explanation in zip(pieces[1::2], pieces[2::2], strict=True)
        for name in entry.split(", ")
    }
