"""What the API reference must be told of the source: settings are dataclasses, and doctests are code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Decorator, Expr, Extension, Module

DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", flags=re.MULTILINE | re.DOTALL)


class _Dataclass(Expr):  # type: ignore[misc]
    """The decorator that griffe knows, in the place of `@setting`."""

    @property
    def canonical_path(self) -> str:
        return "dataclasses.dataclass"

    def iterate(self, *, flat: bool = True) -> Any:
        yield "dataclass"


def fenced(found: re.Match[str]) -> str:
    """Return a doctest as a code block."""
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"


def prepare(thing: Any) -> None:
    """Prepare a module or class and all that is defined in it."""
    if thing.docstring is not None:
        thing.docstring.value = DOCTEST.sub(fenced, thing.docstring.value)
    if isinstance(thing, Class) and any(str(mark.value).split("(")[0] == "setting" for mark in thing.decorators):
        thing.decorators.append(Decorator(_Dataclass(), lineno=None, endlineno=None))
    if isinstance(thing, Class | Module):
        for member in thing.members.values():
            if not member.is_alias:
                prepare(member)


class SettingsAndDoctests(Extension):  # type: ignore[misc]
    """Run `prepare` on the package before griffe looks at its dataclasses."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Prepare all modules."""
        prepare(pkg)
