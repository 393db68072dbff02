"""docs/troubleshooting.md has an entry for every message of lowbit, and none for a message that is gone.

A fragment is a code span in the heading of an entry, or behind "Also:" below it; "..." in it stands for anything.
"""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from tests.command_line import invoke
from tests.messages import Message, error_classes, messages

ROOT = Path(__file__).parents[1]
SOURCES, PAGE = ROOT / "src" / "lowbit", ROOT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^### (?P<heading>.+)\n(?:Also: (?P<also>(?:.+\n)+))?\n(?P<body>(?:(?!##).*\n?)*)", re.M)
SPAN = re.compile(r"`([^`]+)`")
LEAST_LETTERS = 5
"""Letters of a fragment; a shorter one would match anything."""

NO_ERRORS = {
    "train/progress.py:say",
    "doctor/meeting.py:say",
    "train/auto.py:__str__",
    "report/command.py:write",
    "tensor_parallel/drift.py:__str__",
    "tensor_parallel/thresholds.py:__str__",
    "activations/changes.py:__str__",
    "activations/layer_plan.py:__str__",
}
"""Functions that write progress and tables."""
PASSED_ON = {
    "cli/doctor.py:__call__": "an exit code",
    "cli/errors.py:one_line_errors": "an exit code",
    "cli/report.py:write": "of `read_run` and `Report.read_json`",
    "codecs/foreign.py:_error": "of its callers",
    "codecs/foreign.py:call": "of codecs of other packages",
    "network/delay.py:main": "the operating system's words",
    "pipeline/passes.py:run": "of `_Conflict` and `_Refused`",
    "ranks/failure.py:blame": "of an `AgreementError` that another rank wrote",
    "ranks/statements.py:read": "caught in `Statements.read`",
    "ranks/statements.py:_add": "caught in `Statements.read`",
    "terminal.py:_print_traceback": "of Python, whatever the error is",
    "train/activations.py:_policy": "of `LayerAware`",
    "train/boundaries.py:check_codecs": "of codecs",
    "train/boundaries.py:each": "of codecs",
    "train/checkpoints/resume.py:_compare": "of `Change`",
    "train/checkpoints/save.py:raise_everywhere": "of its callers",
    "train/gradients.py:storage_codec": "of codecs",
    "train/elastic.py:begin": "of `LowBitManager`",
    "train/loop.py:_check": "of `Check`",
    "train/loop.py:_measure_distance": "of `needless`",
    "train/loop.py:_warn_of_cost": "of `costly`",
    "network/probe.py:main": "of the system: why an address cannot be reached",
    "train/replicas.py:all_reduce_codec": "of codecs",
    "train/tied.py:tied_codec": "of codecs",
}
"""Functions whose errors or warnings pass on a text that is somebody else's, and whose."""


@cache
def written() -> tuple[Message, ...]:
    return tuple(message for message in messages(SOURCES) if message.place not in NO_ERRORS)


@cache
def entries() -> tuple[re.Match[str], ...]:
    return tuple(ENTRY.finditer(PAGE.read_text()))


def fragments() -> list[str]:
    return [span for entry in entries() for part in entry.group("heading", "also") for span in SPAN.findall(part or "")]


def holds(text: str, fragment: str) -> bool:
    """Whether a template has the words of a fragment in their order, from the beginning of a word on."""
    parts, pattern = _parsed(fragment)
    return all(part in text for part in parts) and pattern.search(text) is not None


@cache
def _parsed(fragment: str) -> tuple[list[str], re.Pattern[str]]:
    parts = re.split(r"\.\.\.(?!\.)", fragment.removeprefix("... ").removesuffix(" ..."))
    return parts, re.compile(r"(?:^|(?<=[\s\0]))" + ".*?".join(map(re.escape, parts)), re.S)


def without_entry(found: tuple[Message, ...]) -> list[str]:
    known = fragments()
    return [str(m) for m in found if m.has_words and not any(holds(m.text, fragment) for fragment in known)]


def test_every_message_has_an_entry():
    assert without_entry(written()) == []


def test_every_fragment_is_in_a_message():
    texts = [message.text for message in written()]
    assert [each for each in fragments() if not any(holds(text, each) for text in texts)] == []


def test_no_fragment_would_match_anything():
    assert [each for each in fragments() if sum(map(str.isalpha, each)) < LEAST_LETTERS] == []
    assert len(set(fragments())) == len(fragments()), "a fragment in two entries"


def test_texts_that_cannot_be_followed_are_known():
    assert {message.place for message in written() if not message.has_words} == PASSED_ON.keys()


def test_every_entry_says_what_it_means_and_what_to_do():
    assert len(entries()) > 100
    for entry in entries():
        if SPAN.search(entry["heading"]):
            assert re.search(r"\*\*Means:\*\* .+\*\*Do:\*\* ", entry["body"], re.S), entry["heading"]


def test_index_lists_the_groups():
    page = PAGE.read_text()
    groups = re.findall(r"^## (.+)$", page, re.M)
    assert re.findall(r"^- \[(.+)\]\(#", page, re.M) == groups


def test_table_names_every_class_of_error():
    rows = re.findall(r"^\| (`\w+`.*) \| (.*) \| .* \|$", PAGE.read_text(), re.M)
    named = {span for first, _ in rows for span in SPAN.findall(first)}
    known = dict(error_classes(SOURCES))
    assert known.keys() <= named
    assert all(known.values()), "a class without a docstring"
    for first, places in rows:
        for place in (p for p in SPAN.findall(places) if p.startswith("lowbit.")):
            package, _, name = place.rpartition(".") if place[-5:] == "Error" else (place, "", SPAN.findall(first)[0])
            assert inspect.isclass(getattr(importlib.import_module(package), name)), place


@pytest.mark.parametrize(
    ("command", "fragment"),
    [
        ("trian", "... has no ...; did you mean ..."),
        ("train --pipelin.ranks 4", "unknown option ...; did you mean ..."),
        ("train a.toml b.toml", "unexpected argument ..."),
        ("train missing.toml", "configuration file ...: ..."),
        ("train broken.toml", "configuration file ... is not TOML: ..."),
        ("train --data.batch 7", "data.batch is ...; allowed: a multiple of pipeline.microbatches ..."),
        (
            "train --pipeline.ranks 99 --pipeline.microbatches 100 --data.batch 100",
            "the pipeline has ... stages (...), the model ... layers",
        ),
        ("train --pipeline.layers 5,2", "pipeline.layers is ..., ... layers on ... stages"),
        ("train --pipeline.schedule ZBVZeroBubble", "pipeline.stages_per_rank is ...; allowed with ..."),
        ("train --pipeline.forward int9", "codec is ...; allowed: ..."),
        ("train --data.text missing.txt", "... no such file, folder or pattern with a match"),
        ("train --data.text empty.txt", "... is empty; allowed: text ..."),
        ("train --data.text short.txt", "data.sequence is ...; ... has ... tokens to train on"),
        ("train --run.output empty.txt", "run.output ... cannot be written to: ..."),
        ("train --run.output foreign", "..., which lowbit has no record of making"),
        ("train --run.resume --run.overwrite", "run.... and run.overwrite are both true"),
        ("train --model.pretrained foreign", "... is ...; ...; allowed: a folder with a saved model"),
        ("evaluate foreign", "... is ..., and there is no ...; allowed: a local folder"),
        ("plan memory --budget lots", "... is ...; allowed: bytes, such as 24gb, 1.5gib or 800mb"),
        ("plan pipeline empty.txt", "the cluster has machines ...; allowed: at least one, each with its own name"),
        ("bench pipeline --link 5parsec", "link is ...; allowed: such as ..."),
        ("bench codecs --json foreign", "... cannot be written: ..."),
    ],
)
def test_a_real_line_leads_to_its_entry(command: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    for name, text in {
        "broken.toml": "a = [",
        "empty.txt": "",
        "short.txt": "abc",
        "foreign/summary.json": "{}",
    }.items():
        Path(name).write_text(text)
    result = invoke(*command.split())
    assert fragment in fragments()
    assert holds(result.stderr, fragment), result.output


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError(f'the moon is {x}')",
        "raise ConfigError('the moon ' + 'is full')",
        "log.warning('the moon is %s', x)",
        "text = 'the moon is ' + x\n    raise RuntimeError(text)",
        "raise helper(x)",
        "sys.stderr.write(f'the moon is {x}')",
        "check(x, 'the moon is gone')",
    ],
)
def test_a_new_text_is_noticed(code: str, tmp_path: Path):
    helpers = (
        "class ConfigError(ValueError): ...\n"
        "def helper(x) -> ValueError:\n    return ValueError(f'the moon is {x}')\n"
        "def check(x, why):\n    raise ValueError(why)\n"
    )
    (tmp_path / "new.py").write_text(f"{helpers}def act(x):\n    {code}\n")
    assert any("the moon is" in text for text in without_entry(tuple(messages(tmp_path))))


def test_a_text_that_cannot_be_followed_is_noticed(tmp_path: Path):
    (tmp_path / "new.py").write_text("def act(x):\n    raise ValueError(x[0])\n")
    assert [message.has_words for message in messages(tmp_path)] == [False]
