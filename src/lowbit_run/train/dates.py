"""The date of a run: the day that chat templates take for today.

Templates of Llama 3.2, Granite and others write today's date into every conversation. So the date is part of what a run
learns: it is set when the run starts, the same on all ranks, whose clocks may differ, and kept by every resume.
"""

import contextlib
import copy
import datetime
import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit_run.train.checkpoints.manifest import FOLDER, DamagedShareError, read_manifest, shares_newest_first
from lowbit_run.train.config import RunConfig, is_day
from lowbit_run.train.pretrained import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "data.date"
_CLOCK = "strftime_now"  # Transformers' function for templates; they have no other clock
_DIRECTIVES = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in string.ascii_letters if letter != "s"]
# Takes the place of the function, by its name. The newline at the end belongs to the block, and is not written.
_ONE_DAY = (
    "{% macro strftime_now(format) %}{% set day = namespace(text=format.replace('%%', '\\0')) %}"
    "{% for name, value in VALUES.items() %}{% set day.text = day.text.replace(name, value) %}{% endfor %}"
    "{{ day.text.replace('\\0', '%') }}{% endmacro %}\n"
)


def today() -> str:
    """Return today's date by the clock of this machine: "2026-07-24"."""
    return datetime.date.today().isoformat()


def on_day(tokenizer: "PreTrainedTokenizerBase", day: str) -> "PreTrainedTokenizerBase | None":
    """Return a copy of a tokenizer for whose chat template it is this day, at midnight; None if it writes no date."""
    template: Any = tokenizer.chat_template
    if _CLOCK not in str(template):
        return None
    midnight = datetime.datetime.fromisoformat(day)
    values = {name: midnight.strftime(name) for name in _DIRECTIVES if name in str(template)}
    first = _ONE_DAY.replace("VALUES", str(values))
    dated = copy.copy(tokenizer)
    several = isinstance(template, Mapping)
    dated.chat_template = {name: first + text for name, text in template.items()} if several else first + template
    return dated


def recorded(run: RunConfig) -> tuple[str, bool]:
    """Return the date of the run that a resume continues, "" if unknown, and whether a checkpoint holds it.

    Before the first checkpoint, it is in the configuration that rank 0 wrote at the start.
    """
    output = Path(run.output)
    for share in shares_newest_first(output / FOLDER) if run.resume else ():
        with contextlib.suppress(DamagedShareError):
            day: Any = read_manifest(share).identity.get(KEY)
            return (day, True) if is_day(day) else ("", False)
    if run.resume:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            day = read_json(output / "config.json")["data"]["date"]
            return (day if is_day(day) else ""), False
    return "", False
