"""Every message that a user of lowbit can see, read from the sources: errors, warnings, and lines on standard error.

A message is a template: the text with `HOLE` wherever a value goes. The search follows names to their assignments and
calls to what they return, as far as they are text. What it cannot follow is a message of holes alone.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HOLE = "\0"
_MOST = 64  # alternatives of one expression
_DEEPEST = 10
_LOGGED = {"warning", "error", "critical", "exception", "warn"}
_WRITTEN = {"sys.exit", "sys.stderr.write", "warnings.warn", "self.error"}
_HANDED_ON = {"_note_problem", "_refuse", "give_up", "_end", "raise_everywhere", "damaged", "say_once", "warn_once"}
"""Functions that put their first argument into an error or a line of the log."""
_LISTS = {"faults", "problems", "reasons", "warnings", "lines"}
"""Lists whose elements become part of an error."""


@dataclass(frozen=True)
class Message:
    """A template and where it is written: path within the package, line and function."""

    text: str
    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.function}): {self.text.replace(HOLE, '...')}"

    @property
    def place(self) -> str:
        """Path and function, which change less often than lines."""
        return f"{self.path}:{self.function}"

    @property
    def has_words(self) -> bool:
        """Whether it holds words of its own; otherwise it passes on the text of another."""
        return any(character.isalpha() for character in self.text)


def messages(root: Path) -> list[Message]:
    """All messages of the package in a folder, in the order of the sources."""
    return list(_Sources(root).messages())


@dataclass(frozen=True)
class _Scope:
    """Where an expression stands: its file, the functions around it, outermost first, and how deep the search is."""

    path: str
    functions: tuple[ast.FunctionDef, ...] = ()
    depth: int = 0

    def within(self, function: ast.FunctionDef) -> _Scope:
        return _Scope(self.path, (*self.functions, function), self.depth)

    def deeper(self) -> _Scope:
        return _Scope(self.path, self.functions, self.depth + 1)


class _Sources:
    def __init__(self, root: Path) -> None:
        self._trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
        self._functions: dict[str, list[tuple[_Scope, ast.FunctionDef]]] = {}
        self._constants: dict[str, dict[str, ast.expr]] = {}  # by name, then by file
        for path, tree in self._trees.items():
            for scope, node in _scoped(tree, _Scope(path)):
                if isinstance(node, ast.FunctionDef):
                    self._functions.setdefault(node.name, []).append((scope, node))
                elif isinstance(node, ast.Assign | ast.AnnAssign) and not scope.functions:
                    for name, value in _assignments(node):
                        self._constants.setdefault(name, {})[path] = value
        self._errors = {n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)}
        classes = [node for tree in self._trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for _ in classes:  # until no subclass is left
            self._errors |= {c.name for c in classes if any(_last(base) in self._errors for base in c.bases)}

    def messages(self) -> Iterator[Message]:
        for path, tree in self._trees.items():
            for scope, node in _scoped(tree, _Scope(path)):
                for expression, optional in self._shown(node):
                    function = scope.functions[-1].name if scope.functions else ""
                    for text in dict.fromkeys(self._texts(expression, scope)):
                        line = getattr(node, "lineno", 0)
                        message = Message(re.sub(r"%[sd]|%\.\d+f", HOLE, text).strip(), path, line, function)
                        if message.text and (message.has_words or not optional):
                            yield message

    def _shown(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """What a statement or call shows to the user; True: others show it, so it need not have words."""
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _last(node.exc.func)
            if name not in self._errors and name not in self._functions:
                yield from ((argument, False) for argument in node.exc.args[:1])
        if not isinstance(node, ast.Call) or not node.args:
            return
        name, owner = _last(node.func), getattr(node.func, "value", None)
        if name in _LOGGED and owner is not None and "log" in ast.unparse(owner).lower():
            yield node.args[0], False
            yield from ((argument, True) for argument in node.args[1:])
        elif name in self._errors or ast.unparse(node.func) in _WRITTEN:
            yield node.args[name == "OSError"], False
        elif name == "Cause":
            yield node.args[1], True
        elif name in _HANDED_ON or (name == "append" and owner is not None and _last(owner) in _LISTS):
            yield node.args[0], True

    def _texts(self, node: ast.expr | None, scope: _Scope) -> list[str]:
        """What an expression can be, as text."""
        if scope.depth > _DEEPEST:
            return [HOLE]
        scope = scope.deeper()
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _joined((self._texts(part, scope) for part in parts), "")
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined((self._texts(side, scope) for side in (left, right)), "")
            case ast.IfExp(body=one, orelse=other):
                return self._any([one, other], scope)
            case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                return self._any(parts, scope)
            case ast.FormattedValue(value=part) | ast.NamedExpr(value=part) | ast.Subscript(value=part):
                return self._texts(part, scope)
            case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part) | ast.Starred(value=part):
                return self._texts(part, scope)
            case ast.Name(id=name):
                values = [value for function in scope.functions for value in _assigned(function, name)]
                return self._any(values, scope) if values else self._constant(name, scope)
            case ast.Call():
                return self._called(node, scope)
        return [HOLE]

    def _any(self, nodes: Iterable[ast.expr], scope: _Scope) -> list[str]:
        return list(dict.fromkeys(text for node in nodes for text in self._texts(node, scope)))[:_MOST] or [HOLE]

    def _constant(self, name: str, scope: _Scope) -> list[str]:
        known = self._constants.get(name, {}) if name.isupper() else {}
        path = scope.path if scope.path in known else next(iter(known), "")
        return self._texts(known[path], _Scope(path, (), scope.depth)) if path else [HOLE]

    def _called(self, call: ast.Call, scope: _Scope) -> list[str]:
        name, owner = _last(call.func), getattr(call.func, "value", None)
        if name == "format" and owner is not None:
            return [_without_fields(text) for text in self._texts(owner, scope)]
        if name == "join" and isinstance(owner, ast.Constant):
            parts = call.args[0]
            if isinstance(parts, ast.List):
                return _joined((self._texts(part, scope) for part in parts.elts), str(owner.value))
            return self._texts(parts, scope)
        if owner is None and name in ("printable", "next", "list", "str", "map", "filter") and call.args:
            return self._texts(call.args[-1 if name in ("map", "filter") else 0], scope)
        known = [(where, f) for where, f in self._functions.get(name, []) if _returns_text(f)]
        own = [each for each in known if each[0].path == scope.path]
        texts: list[str] = []
        for where, function in own or known:
            inner = _Scope(where.path, (*where.functions, function), scope.depth)
            texts += self._any((r.value for r in ast.walk(function) if isinstance(r, ast.Return) and r.value), inner)
        return list(dict.fromkeys(texts))[:_MOST] or [HOLE]


def _scoped(tree: ast.AST, scope: _Scope) -> Iterator[tuple[_Scope, ast.AST]]:
    """All nodes below one, each with the functions around it."""
    for child in ast.iter_child_nodes(tree):
        yield scope, child
        yield from _scoped(child, scope.within(child) if isinstance(child, ast.FunctionDef) else scope)


def _assigned(function: ast.FunctionDef, name: str) -> Iterator[ast.expr]:
    """What a function assigns to a name, or appends to it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            yield from (value for target, value in _assignments(node) if target == name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (f"{name}.append", f"{name}.insert"):
            yield node.args[-1]


def _assignments(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> Iterator[tuple[str, ast.expr]]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        match target, node.value:
            case ast.Name(id=name), ast.expr() as value:
                yield name, value
            case ast.Tuple(elts=names), ast.Tuple(elts=values):
                yield from ((_last(name), value) for name, value in zip(names, values, strict=False))


def _joined(parts: Iterable[list[str]], separator: str) -> list[str]:
    return list(map(separator.join, itertools.islice(itertools.product(*parts), _MOST)))


def _without_fields(text: str) -> str:
    fields = string.Formatter().parse(text)
    return "".join(literal + HOLE * (name is not None) for literal, name, _, _ in fields)


def _returns_text(function: ast.FunctionDef) -> bool:
    return function.returns is not None and "str" in ast.unparse(function.returns).split(" | ")


def _last(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
