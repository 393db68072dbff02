"""What the API reference knows of the source beyond what griffe reads from it."""

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from griffe import Alias, AliasResolutionError, Class, Docstring, Extension, Function, GriffeLoader, Module, Object

_NAMES = re.compile(r"(?m)^(?P<indent> +)(?P<names>\w+(?:, \w+)+)(?P<text>: .*(?:\n(?P=indent) +\S.*)*)")
_CODE = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)(\([^`]*\))?`(?!`)")


def public_names(source: Path) -> set[str]:
    """Every public name of the packages in a folder, such as "lowbit.codecs.parse", read from their `__all__`."""
    names: set[str] = set()
    for file in (*source.glob("lowbit*/__init__.py"), *source.glob("lowbit*/*/__init__.py")):
        package = ".".join(file.parent.relative_to(source).parts)
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                names |= {f"{package}.{name}" for name in ast.literal_eval(statement.value)}
    return names


class PublicNames(Extension):
    """What griffe takes for something else: see each of the functions below."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Complete a loaded package."""
        loader.resolve_aliases(implicit=True, external=False)
        public: set[str] = set()
        for module in _modules(pkg):
            public |= {f"{module.path}.{name}" for name in module.exports or ()}
            for name in map(str, module.exports or ()):
                # `lowbit_run.config.section` is a function for whoever imports it, and a module for griffe.
                if isinstance(module.members.get(name), Module) and name in module.imports:
                    function = loader.modules_collection[module.imports[name]]
                    function.aliases[f"{module.path}.{name}"] = Alias(name, function, parent=module)
        for module in _modules(pkg):
            for thing in _objects(module):
                if isinstance(thing, Class):
                    _inherit(thing)
                if thing.docstring:
                    _part(thing.docstring)
                    _link(thing, thing.docstring, public)


def _modules(module: Module) -> Iterator[Module]:
    yield module
    for within in module.modules.values():
        if isinstance(within, Module):
            yield from _modules(within)


def _objects(parent: Object) -> Iterator[Object]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, Object) and not isinstance(member, Module):
            yield from _objects(member)


def _inherit(cls: Class) -> None:
    """Give overriding methods without a docstring that of what they override."""
    try:
        bases = cls.mro()
    except (ValueError, AliasResolutionError):
        return
    for name, member in cls.members.items():
        if isinstance(member, Function) and not member.docstring and not name.startswith("_"):
            inherited = [base.members[name].docstring for base in bases if name in base.members]
            text = next((docstring.value for docstring in inherited if docstring), "")
            member.docstring = Docstring(text, parent=member) if text else None


def _part(docstring: Docstring) -> None:
    """Part `x, y: where it is` into an entry for each name."""

    def parted(entry: re.Match[str]) -> str:
        return "\n".join(entry["indent"] + name + entry["text"] for name in entry["names"].split(", "))

    docstring.value = _NAMES.sub(parted, docstring.value)


def _link(thing: Object, docstring: Docstring, public: Set[str]) -> None:
    """Make links of the public names in a docstring, in full or as their package knows them."""
    package = ".".join(thing.path.split(".")[:2])

    def linked(code: re.Match[str]) -> str:
        name = next((name for name in (code[1], f"{package}.{code[1]}") if name in public), "")
        return f"[{code[0]}][{name}]" if name and name not in {thing.path, *thing.aliases} else code[0]

    docstring.value = _CODE.sub(linked, docstring.value)
