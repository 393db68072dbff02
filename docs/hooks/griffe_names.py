"""What the API reference knows of the source beyond what griffe reads from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from griffe import Alias, Class, Extension, Function, GriffeLoader, Module


class PublicNames(Extension):
    """Public functions that share their name with a module, and docstrings that overriding methods inherit."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Complete a loaded package."""
        loader.resolve_aliases(implicit=True, external=False)
        for module in _modules(pkg):
            for name in module.exports or ():
                # `lowbit.network.goodput` is a function for whoever imports it, and a module for griffe.
                if isinstance(module.members.get(str(name)), Module) and str(name) in module.imports:
                    function = loader.modules_collection[module.imports[str(name)]]
                    function.aliases[f"{module.path}.{name}"] = Alias(str(name), function, parent=module)
            for cls in module.classes.values():
                if isinstance(cls, Class):
                    _inherit(cls)


def _modules(module: Module) -> Iterator[Module]:
    yield module
    for within in module.modules.values():
        if isinstance(within, Module):
            yield from _modules(within)


def _inherit(cls: Class) -> None:
    for name, member in cls.members.items():
        if isinstance(member, Function) and not member.docstring and not name.startswith("_"):
            bases = [base.members[name] for base in cls.mro() if name in base.members]
            member.docstring = next((base.docstring for base in bases if base.docstring), None)
