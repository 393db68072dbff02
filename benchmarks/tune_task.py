"""Questions about Python code with one right answer, from the sources of Python's standard library."""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from collections import Counter
from pathlib import Path

from lowbit.train.corpus import library_files

_LONGEST = 72  # characters of a statement
_STATEMENTS = (ast.Assign, ast.Return, ast.Expr, ast.If, ast.For, ast.Raise, ast.With, ast.Import, ast.ImportFrom)


def write_questions(path: Path, count: int) -> int:
    """Write samples: a line of code, and its kind of statement, such as "assign".

    No line of code occurs twice, and no kind makes up more than a sixth of the samples.

    Returns:
        Number of different answers.
    """
    answers: Counter[str] = Counter()
    samples: dict[str, str] = {}
    for file in library_files():
        for prompt, answer in _questions(file):
            if prompt not in samples and answers[answer] < count // 6:
                samples[prompt] = answer
                answers[answer] += 1
        if len(samples) >= count:
            break
    # Shuffled, because samples of one file are alike.
    chosen = sorted(samples, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())[:count]
    lines = (json.dumps({"prompt": f"{prompt}\n# ", "answer": samples[prompt]}) for prompt in chosen)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len({samples[prompt] for prompt in chosen})


def _questions(file: Path) -> list[tuple[str, str]]:
    try:
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (ValueError, SyntaxError):
        return []
    lines = source.splitlines()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _STATEMENTS):
            line = lines[node.lineno - 1].strip()
            whole = node.end_lineno == node.lineno or line.endswith(":")
            if whole and 8 <= len(line) <= _LONGEST and line.isascii():
                found.append((line, type(node).__name__.lower()))
    return found
