"""The documentation runs: its Python, the options of its commands, its configurations and its links.

Python blocks of one file share a namespace and run in a process of their own, in an empty folder. A block that needs
several ranks is a whole script, marked with its number of ranks: ```python torchrun=2
A block of any other kind than those of `KINDS` fails.
"""

import dataclasses
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import yaml
from markdown_it import MarkdownIt
from transformers import LlamaConfig, LlamaForCausalLM

import lowbit
from benchmarks.__main__ import BENCHMARKS
from lowbit_run.cli.app import COMMANDS, Group
from lowbit_run.plan.cluster import Cluster
from lowbit_run.train import ConfigError, from_mapping
from lowbit_run.train.pretrained import ByteTokenizer
from tests.forked import run_script

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for path in (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *ROOT.glob("docs/**/*.md"))
    if path.exists()
]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, ADDRESSES = SETTINGS["project"], SETTINGS["tool"]["lowbit"]
KINDS = {
    "python": "run, with torchrun=N as N ranks",
    "py": "run where the packages that it names are installed: by tests/lowbit/integrations/test_pages.py",
    "bash": "commands, parsed",
    "console": "commands, parsed, and what they print",
    "toml": "a training configuration, a cluster, or what a package declares, read",
    "yaml": "a task of lm-eval, read",
    "bibtex": "an entry of a list of references, read",
    "text": "what a program prints, and diagrams",
}
# Programs of other people that the pages may name.
OTHERS = {
    "cat", "cd", "chmod", "cp", "curl", "diff", "export", "git", "grep", "head", "hf", "ip", "iperf3", "ls", "mkdir",
    "mv", "nebula-cert", "nvidia-smi", "openssl", "ping", "pip", "pre-commit", "python", "python3", "rm", "scp", "sed",
    "source", "ssh", "ssh-keygen", "sudo", "tail", "tar", "tc", "tensorboard", "torchft_lighthouse", "torchrun",
    "unset", "wg", "wg-quick",
}  # fmt: skip
SEPARATORS = {"|", "||", "&&", "&", ";"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
LINK = re.compile(r"(?:\]\(|^\[[^\]\n]+\]: +|\b(?:href|src|srcset)=\")(?!\w+:)([^)\s#\"]*)(?:#([^)\s\"]+))?", re.M)
HEADING = re.compile(r"^#+ +(.*?) *#*$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text and its first line in the page."""

    language: str
    words: tuple[str, ...]
    body: str
    line: int

    @property
    def ranks(self) -> int:
        """Ranks that a `torchrun=N` asks for; 0 without it."""
        return next((int(w.split("=")[1]) for w in self.words if w.startswith("torchrun=")), 0)


def blocks(text: str) -> Iterator[Block]:
    for token in MarkdownIt().parse(text):
        if token.type == "fence" and token.map:
            language, *words = token.info.split() or [""]
            yield Block(language, tuple(words), token.content, token.map[0] + 2)


def joined(parts: list[Block]) -> str:
    """One program of a page's blocks, each at its own line, so that tracebacks point into the page."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines)) + block.body.splitlines()
    return "\n".join(lines) + "\n"


def commands(text: str) -> Iterator[list[str]]:
    """Every command of the page's shell blocks, as words; where commands follow a "$ ", the rest is output."""
    for block in blocks(text):
        if block.language in ("bash", "console"):
            lines = block.body.replace("\\\n", " ").splitlines()
            entered = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            for line in entered or lines:
                yield from _commands_of(shlex.split(line, comments=True))


def _commands_of(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line, each without the variables before it and without where its output goes."""
    command: list[str] = []
    for word in [*words, ";"]:
        if word not in SEPARATORS:
            command.append(word)
            continue
        while command and re.match(r"\w+=", command[0]):
            command = command[1:]
        end = next((i for i, word in enumerate(command) if re.match(r"\d?[<>]", word)), len(command))
        if command[:end]:
            yield command[:end]
        command = []


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(script: Path, ranks: int) -> str:
    """Assert that a script ends well, alone or as the ranks that torchrun would start; return what it printed."""
    done = run_script(script, ranks=ranks, folder=script.parent)
    assert done.code == 0, done.output
    return done.output


PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks(page.read_text()))]
TORCHRUN = [
    pytest.param(page, block, id=f"{name(page)}:{block.line}")
    for page in PYTHON
    for block in blocks(page.read_text())
    if block.ranks
]


def save_small_model(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    ByteTokenizer().hugging_face().save_pretrained(folder)


def save_small_adapters(folder: Path) -> None:
    """A model with adapters, as the fine-tuning of the page leaves them."""
    save_small_model(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder / "runs" / "tune" / "model")


MADE_EARLIER = {
    "docs/start/first-run.md": lambda folder: save_small_model(folder / "runs" / "mine" / "model"),
    "docs/tutorials/fine-tune.md": save_small_adapters,
}
"""What the commands of a page have made before its Python runs."""


SLOW = {"docs/tutorials/own-pipeline.md"}  # 20 s; what it does is in the examples and in tests/lowbit/pipeline, too


@pytest.mark.docs
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if name(p) in SLOW else (), id=name(p)) for p in PYTHON]
)
def test_python_runs(page: Path, tmp_path: Path):
    if make := MADE_EARLIER.get(name(page)):
        make(tmp_path)
    found = [b for b in blocks(page.read_text()) if b.language == "python" and not b.ranks]
    script = tmp_path / f"{page.stem}.py"
    script.write_text(joined(found))
    run(script, ranks=0)


@pytest.mark.docs
@pytest.mark.parametrize(("page", "block"), TORCHRUN)
def test_scripts_for_several_ranks_run(page: Path, block: Block, tmp_path: Path):
    script = tmp_path / f"{page.stem}.py"
    script.write_text(joined([block]))
    run(script, block.ranks)


@pytest.mark.docs
def test_a_finished_pipeline_of_the_tutorial_starts_again(tmp_path: Path):
    script = tmp_path / "pipeline.py"
    [body] = [b.body for b in blocks((ROOT / "docs/tutorials/own-pipeline.md").read_text()) if b.ranks]
    script.write_text(body.replace("4, 20\n", "4, 10\n"))
    assert "step 10: loss" in run(script, 2)
    again = run(script, 2)
    assert (again.count("step 10: loss"), again.count("evaluation: loss")) == (1, 2)  # of both


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_options_and_links_exist_and_every_block_is_read(page: Path):
    text = page.read_text()
    for words in commands(text):
        check_command(words)
    for target, anchor in LINK.findall(_without_code(text)):
        file = page.parent / target if target else page
        assert file.exists(), target
        # The names of the API reference become anchors when the site is built: tests/test_site.py.
        if anchor and file.suffix == ".md" and file.parent.name != "api":
            assert anchor in anchors(file.read_text()), f"{target}#{anchor}"
    check_blocks(text, recipes=page.name == "data-parallel.md" or page.parent.name == "engines")


def check_blocks(text: str, *, recipes: bool = False) -> None:
    """Assert that each block is of a kind that a test reads."""
    kinds = {token.type for token in MarkdownIt().parse(text)}
    assert "code_block" not in kinds, "an indented block has no language"
    assert len(FENCE.findall(text)) == len(list(blocks(text))), "a block is in what Markdown takes for a text"
    for block in blocks(text):
        assert block.language in KINDS, f"line {block.line}: {block.language!r}; allowed: {', '.join(KINDS)}"
        assert not block.words or block.ranks or (block.language == "py" and recipes), (
            f"line {block.line}: {block.words}"
        )
        assert block.language != "py" or recipes, f"line {block.line}: no test runs it"
        check_body(block)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set(re.findall(r"\bid=\"([^\"]+)\"", text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(next(s for s in (slug, *(f"{slug}-{i}" for i in range(1, 99))) if s not in found))
    return found


def _without_code(text: str) -> str:
    return re.sub(r"(`+)[^`\n]+\1", "", FENCE.sub("", text))


def check_command(words: list[str]) -> None:
    """Assert that a command line of ours names what exists, and that others start one of `OTHERS`."""
    programs = [Path(word).name for word in words]
    if words[:3] == ["python", "-m", "benchmarks"]:
        check_lowbit(words[3:], BENCHMARKS)
    elif "lowbit" in programs:
        check_lowbit(words[programs.index("lowbit") + 1 :])
    elif programs[:1] == ["make"]:
        goals = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{re.escape(goal)}:", makefile, re.M) for goal in goals), words
    else:
        check_other(words)


def check_other(words: list[str]) -> None:
    """Assert that a command line that is not lowbit's is allowed, and that what it names of ours exists."""
    assert Path(words[0]).name in OTHERS, f"{words[0]} is none of: {', '.join(sorted(OTHERS))}"
    for before, word in itertools.pairwise(words):
        if before == "-m" and word.partition(".")[0] in ("tests", "benchmarks"):
            assert importlib.util.find_spec(word), word
        if word.startswith("examples/"):
            assert (ROOT / word).exists(), word
        if extras := re.fullmatch(r"(?:lowbit|\.)\[([\w,]+)\]", word):
            assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"]), word


def check_lowbit(words: list[str], command: Any = COMMANDS) -> None:
    while isinstance(command, Group) and words and not words[0].startswith("-"):
        commands = command.commands()
        assert words[0] in commands, f"no {words[0]} among: {', '.join(commands)}"
        command, words = commands[words[0]], words[1:]
    if not isinstance(command, Group):
        words = [word for word in words if word not in ("--help", "--traceback")]
        command.parser("lowbit").read(words)


def check_body(block: Block) -> None:
    """Assert that what a block holds can be read, if it is of a kind that is only read."""
    match block.language:
        case "toml":
            check_toml(tomllib.loads(block.body))
        case "yaml":
            check_task(yaml.safe_load(block.body))
        case "bibtex":
            assert re.fullmatch(r"@\w+\{[\w-]+,\n(  \w+ += \{.*\},?\n)+\}\n", block.body), block.body
            assert block.body.count("{") == block.body.count("}")


def check_toml(values: dict[str, Any]) -> None:
    """Assert that it is a training configuration or a cluster, or names codecs of a package."""
    if "machine" in values:
        Cluster.from_mapping(values)
    elif "project" in values:
        names = values["project"].pop("entry-points").pop("lowbit.codecs")
        assert values.keys() == {"project"}
        assert values["project"].keys() == {"name", "version", "dependencies"}
        assert all(re.fullmatch(r"[\w.]+:\w+", place) for place in names.values())
    else:
        from_mapping(values)


def check_task(values: dict[str, Any]) -> None:
    """Assert that it is a task as lm-eval reads it, and of its keys where it is installed."""
    assert {"task", "dataset_path", "output_type"} <= set(values)
    if importlib.util.find_spec("lm_eval"):
        tasks = importlib.import_module("lm_eval.api.task")
        assert set(values) <= {field.name for field in dataclasses.fields(tasks.TaskConfig)}


def test_what_does_not_exist_or_run_fails(tmp_path: Path):
    refused = {
        "lowbit train a.toml --nonsense 3": ConfigError, "make nonsense": AssertionError,
        "nonsense --option": AssertionError,
    }  # fmt: skip
    for command, kind in refused.items():
        with pytest.raises(kind):
            check_command(shlex.split(command))
    for text in ("```\nx\n```\n", "```json\n{}\n```\n", "Text:\n\n    indented\n", "```py\n1\n```\n"):
        with pytest.raises(AssertionError):
            check_blocks(text)
    script = tmp_path / "page.py"
    script.write_text("raise ValueError('in the page')")
    with pytest.raises(AssertionError, match="in the page"):
        run(script, ranks=0)


def test_citation_and_changelog_agree_with_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    page = (ROOT / "docs" / "citation.md").read_text().replace("{", "").replace("}", "")
    assert citation["title"].startswith(PROJECT["name"])
    assert str(citation["version"]) == PROJECT["version"] == lowbit.__version__
    assert PROJECT["version"] in page
    assert citation["license"] == PROJECT["license"]
    assert citation.get("repository-code", "") == ADDRESSES["repository"]
    for reference in citation["references"]:
        assert reference["title"] in page
        assert all(identifier["value"] in page for identifier in reference["identifiers"])
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == "Unreleased"
    assert len(set(versions)) == len(versions)
