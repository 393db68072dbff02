"""Every message that a user of lowbit can see, read from the sources: errors, warnings, and lines on standard error.

A message is a template: the text with `HOLE` wherever a value goes. The search follows names to their assignments and
calls to what they return, as far as they are text. What it cannot follow is a message of holes alone.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HOLE = "\0"
_MOST = 1000  # alternatives of one expression
_DEEPEST = 12
_LOGGED = {"warning", "error", "critical", "exception", "warn"}
_WRITTEN = {"sys.exit", "sys.stderr.write", "warnings.warn", "self.error"}
_HANDED_ON = {"_note_problem", "_refuse", "give_up", "_end", "raise_everywhere"}
"""Functions that put their first argument into an error or a line of the log."""
_LISTS = {"faults", "problems", "reasons", "warnings"}
"""Lists whose elements become part of an error."""
_FIELD = re.compile(r"%[sd]|%\.\d+f")
_TRANSPARENT = {"printable": 0, "next": 0, "list": 0, "str": 0, "map": -1, "filter": -1, "getattr": -1} | {
    "together": 0,
    "partial": 0,
}
"""Functions whose result has the text of one of their arguments."""


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
        """Whether it holds words of its own; with one at most, such as a key, it passes on the text of another."""
        return sum(any(map(str.isalpha, word)) for word in self.text.split()) > 1


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

    def at(self, depth: int) -> _Scope:
        return _Scope(self.path, self.functions, depth)

    def deeper(self) -> _Scope:
        return _Scope(self.path, self.functions, self.depth + 1)


class _Sources:
    def __init__(self, root: Path) -> None:
        self.trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
        self._functions: dict[str, list[tuple[_Scope, ast.FunctionDef]]] = {}
        self._constants: dict[str, dict[str, ast.expr]] = {}  # by name, then by file
        self._attributes: dict[str, dict[str, list[tuple[_Scope, ast.expr]]]] = {}  # likewise
        self._calls: dict[str, list[tuple[_Scope, ast.Call]]] = {}
        self._nodes = {path: _scoped(tree, _Scope(path)) for path, tree in self.trees.items()}
        for path, nodes in self._nodes.items():
            for scope, node in nodes:
                if isinstance(node, ast.FunctionDef):
                    self._functions.setdefault(node.name, []).append((scope, node))
                elif isinstance(node, ast.Call):
                    self._calls.setdefault(_last(node.func), []).append((scope, node))
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    for target, value in _assignments(node):
                        if not scope.functions:
                            self._constants.setdefault(target, {})[path] = value
                        elif target.startswith("."):
                            self._attributes.setdefault(target, {}).setdefault(path, []).append((scope, value))
        self.errors = {n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)}
        classes = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for _ in classes:  # until no subclass is left
            self.errors |= {c.name for c in classes if any(_last(base) in self.errors for base in c.bases)}

    def messages(self) -> Iterator[Message]:
        for path, nodes in self._nodes.items():
            for scope, node in nodes:
                function = scope.functions[-1].name if scope.functions else ""
                shown = self._shown(node)
                if function == "__str__" and isinstance(node, ast.Return) and node.value is not None:
                    shown = [(node.value, True)]
                for expression, optional in shown:
                    texts = dict.fromkeys(_FIELD.sub(HOLE, text).strip() for text in self._texts(expression, scope))
                    line = getattr(node, "lineno", 0)
                    found = [Message(text, path, line, function) for text in texts if text]
                    worded = [message for message in found if message.has_words]
                    yield from worded or ([] if optional else found[:1])

    def _shown(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """What a statement or call shows to the user; True: others show it, so it need not have words."""
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _last(node.exc.func)
            if name not in self.errors and name not in self._functions:
                yield from ((argument, False) for argument in node.exc.args[:1])
        if not isinstance(node, ast.Call) or not node.args:
            return
        name, owner = _last(node.func), getattr(node.func, "value", None)
        if name in _LOGGED and owner is not None and "log" in ast.unparse(owner).lower():
            yield node.args[0], False
            if "%" in ast.unparse(node.args[0]) and not any(map(str.isalpha, _FIELD.sub("", _literal(node.args[0])))):
                yield from ((argument, True) for argument in node.args[1:])
        elif name in self.errors or ast.unparse(node.func) in _WRITTEN:
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
            case ast.IfExp() | ast.BoolOp() | ast.List() | ast.Tuple():
                return self._any(_alternatives(node), scope)
            case ast.FormattedValue(value=ast.Name() as part):
                return _phrases(self._texts(part, scope))
            case ast.FormattedValue(value=part) | ast.NamedExpr(value=part) | ast.Subscript(value=part):
                return self._texts(part, scope)
            case ast.ListComp() | ast.GeneratorExp() | ast.Starred():
                return self._texts(_element(node), scope)
            case ast.Attribute(attr=name):
                return self._elsewhere(self._attributes.get(f".{name}", {}).get(scope.path, []), scope)
            case ast.Name(id=name):
                return self._named(name, scope)
            case ast.Call():
                return self._called(node, scope)
        return [HOLE]

    def _any(self, nodes: Iterable[ast.expr], scope: _Scope) -> list[str]:
        return _distinct(text for node in nodes for text in self._texts(node, scope))

    def _elsewhere(self, values: Iterable[tuple[_Scope, ast.expr]], scope: _Scope) -> list[str]:
        return _distinct(text for where, value in values for text in self._texts(value, where.at(scope.depth)))

    def _named(self, name: str, scope: _Scope) -> list[str]:
        """What a variable, a parameter, a function or a constant can be, as text."""
        values = [value for function in scope.functions for value in _assigned(function).get(name, [])]
        if values:
            return self._any(values, scope)
        for function in reversed(scope.functions):
            if any(name == parameter.arg for parameter in _parameters(function)):
                return self._elsewhere(self._given(function, name, scope), scope)
        if any(where.path == scope.path and _returns_text(f) for where, f in self._functions.get(name, [])):
            return self._called(ast.Call(ast.Name(name), [], []), scope)
        return self._constant(name, scope)

    def _given(self, function: ast.FunctionDef, name: str, scope: _Scope) -> Iterator[tuple[_Scope, ast.expr]]:
        """What calls of a function give for one of its parameters: in all files, if the name is unique."""
        unique = len(self._functions[function.name]) == 1
        names = [parameter.arg for parameter in _parameters(function) if parameter.arg not in ("self", "cls")]
        for where, call in self._calls.get(function.name, []):
            if unique or where.path == scope.path:
                given = dict(zip(names, call.args, strict=False)) | {k.arg or "": k.value for k in call.keywords}
                if name in given:
                    yield where, given[name]

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
        if owner is None and call.args and name in _TRANSPARENT:
            return self._texts(call.args[_TRANSPARENT[name]], scope)
        known = [(where, f) for where, f in self._functions.get(name, []) if _returns_text(f)]
        own = [each for each in known if each[0].path == scope.path]
        texts: list[str] = []
        for where, function in own or known:
            inner = _Scope(where.path, (*where.functions, function), scope.depth)
            texts += self._any((r.value for r in ast.walk(function) if isinstance(r, ast.Return) and r.value), inner)
        return _distinct(texts)


def _scoped(tree: ast.AST, scope: _Scope) -> list[tuple[_Scope, ast.AST]]:
    """All nodes below one, each with the functions around it, in the order of the source."""
    nodes, left = [], [(scope, tree)]
    while left:
        scope, node = left.pop()
        nodes.append((scope, node))
        inner = scope.within(node) if isinstance(node, ast.FunctionDef) else scope
        left += [(inner, child) for child in reversed(list(ast.iter_child_nodes(node)))]
    return nodes[1:]


@functools.cache
def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """What a function assigns to its names, or appends to them."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            for target, value in _assignments(node):
                values.setdefault(target, []).append(value)
        elif isinstance(node, ast.Call) and node.args and _last(node.func) in ("append", "insert"):
            values.setdefault(_last(getattr(node.func, "value", node.func)), []).append(node.args[-1])
    return values


def _assignments(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> Iterator[tuple[str, ast.expr]]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        match target, node.value:
            case ast.Name(id=name), ast.expr() as value:
                yield name, value
            case ast.Attribute(attr=name), ast.expr() as value:
                yield f".{name}", value
            case ast.Tuple(elts=names), ast.Tuple(elts=values):
                yield from ((_last(name), value) for name, value in zip(names, values, strict=False))


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _element(node: ast.ListComp | ast.GeneratorExp | ast.Starred) -> ast.expr:
    """What a comprehension collects: what it goes through, where it only chooses."""
    if isinstance(node, ast.Starred):
        return node.value
    source = node.generators[0]
    return source.iter if ast.unparse(node.elt) == ast.unparse(source.target) else node.elt


def _alternatives(node: ast.IfExp | ast.BoolOp | ast.List | ast.Tuple) -> list[ast.expr]:
    match node:
        case ast.IfExp(body=one, orelse=other):
            return [one, other]
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            return parts


def _phrases(texts: list[str]) -> list[str]:
    """Texts of several words; single words in a message, such as names, are holes, unless it is one of two."""
    few = len(texts) == 2 and HOLE not in texts
    return _distinct(text if few or " " in text else HOLE for text in texts)


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))[:_MOST] or [HOLE]


def _literal(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "text"


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


def error_classes(root: Path) -> dict[str, str]:
    """Docstrings of the package's own errors by name, without those of one module alone ("_Name")."""
    sources = _Sources(root)
    classes = [node for tree in sources.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {c.name: ast.get_docstring(c) or "" for c in classes if c.name in sources.errors and c.name[0] != "_"}
