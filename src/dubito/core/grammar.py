"""Parse the text form of a setting: nested calls and literals in Python's syntax, read without `eval`.

    laplace(structure=kron, weights=select.last_layer() | select.subnetwork(1000))

A word without brackets is a string, so ``structure=kron`` means ``structure="kron"``; it may contain hyphens. The
`repr` of a setting can be parsed again, unless it contains a tensor or a type.

>>> from dubito.core.grammar import parse
>>> parse("map(temperature=validation)")
MAP(temperature='validation')
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
from typing import Any

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError
from dubito.core.settings import Setting, find

_WORDS = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
_JOINS = {ast.BitOr: operator.or_, ast.BitAnd: operator.and_}

# The most characters of a text that an error message repeats.
_LONGEST = 120

# The namespace in which an argument's value is looked up first: `prior=laplace(...)` is the prior, not the recipe.
_NAMESPACE_OF = {
    "weights": "select",
    "prior": "priors",
    "likelihood": "likelihoods",
    "objective": "objectives",
    "rule": "rules",
}


@checked_arguments
def parse(text: str, namespace: str = "") -> Any:
    """Return the setting that `text` describes, such as ``laplace(weights=select.last_layer(), structure=full)``.

    Args:
        text: A name, or a name with arguments in brackets.
        namespace: The namespace that is searched first for names without a prefix, such as ``"priors"``.
    """
    name, positional, named = read_call(text)
    return _build(find(name, namespace), positional, named)


def read_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the positional and the keyword arguments of one call, without building a setting.

    >>> read_call("mlp(hidden=[50, 50], activation=tanh)")
    ('mlp', [], {'hidden': [50, 50], 'activation': 'tanh'})
    """
    try:
        return _TreeReader(text).call(ast.parse(text.strip(), mode="eval").body)
    except InputError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"Cannot read '{_line(text)}': write a name, or name(argument=value, ...).") from error


def _line(text: str) -> str:
    """The text on one line, shortened where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


class _TreeReader:
    """Reader of the syntax tree of one text, which may consist of calls, literals and words only."""

    def __init__(self, text: str) -> None:
        self.text = text

    def refuse(self, node: ast.AST, why: str) -> InputError:
        return InputError(f"Cannot read '{_line(ast.unparse(node))}' in '{_line(self.text)}': {why}.")

    def word(self, node: ast.AST) -> str:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=value, attr=name):
                return f"{self.word(value)}.{name}"
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                number = isinstance(right, ast.Constant) and type(right.value) is int  # as in lenet-5
                return f"{self.word(left)}-{ast.unparse(right) if number else self.word(right)}"
        raise self.refuse(node, "write a name, a number, 'text' or a call")

    def call(self, node: ast.AST) -> tuple[str, list[Any], dict[str, Any]]:
        match node:
            case ast.Call(func=function, args=arguments, keywords=keywords):
                named = {k.arg: self.value(k.value, _NAMESPACE_OF.get(k.arg, "")) for k in keywords if k.arg}
                if len(named) < len(keywords):
                    raise self.refuse(node, "give each argument once, as name=value")
                return self.word(function), [self.value(argument) for argument in arguments], named
            case ast.BinOp(left=left, op=ast.Sub(), right=ast.Call() as right):  # a hyphenated name is called
                name, positional, named = self.call(right)
                return f"{self.word(left)}-{name}", positional, named
            case ast.Name() | ast.Attribute() | ast.BinOp(op=ast.Sub()):
                return self.word(node), [], {}
        raise self.refuse(node, "write a name, or name(argument=value, ...)")

    def value(self, node: ast.AST, namespace: str = "") -> Any:
        match node:
            case ast.Constant(value=str() | bool() | int() | float() | None):
                return node.value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                values = [self.value(element, namespace) for element in elements]
                return values if isinstance(node, ast.List) else tuple(values)
            case ast.Dict(keys=keys, values=values):
                return {self.key(k, node): self.value(v) for k, v in zip(keys, values, strict=True)}
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self.value(operand)
                if isinstance(number, int | float) and not isinstance(number, bool):
                    return -number if isinstance(sign, ast.USub) else number
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self.join(node, operator.invert, self.value(operand, namespace))
            case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() as join, right=right):
                operands = self.value(left, namespace), self.value(right, namespace)
                return self.join(node, _JOINS[type(join)], *operands)
            case ast.Call() | ast.BinOp(op=ast.Sub(), right=ast.Call()):
                name, positional, named = self.call(node)
                return _build(find(name, namespace), positional, named)
            case ast.Name() | ast.Attribute() | ast.BinOp(op=ast.Sub()):
                word = self.word(node)
                return _WORDS.get(word.lower(), word)
        raise self.refuse(node, "write a number, 'text', a list, a dict or a call")

    def key(self, node: ast.AST | None, mapping: ast.AST) -> Any:
        key = None if node is None else self.value(node)
        if isinstance(key, str | int | float):
            return key
        raise self.refuse(mapping, "the keys of a dict are text or numbers")

    def join(self, node: ast.AST, operate: Any, *operands: Any) -> Any:
        why = "'|', '&' and '~' join selections, each written as a call"
        if not all(isinstance(operand, Setting) for operand in operands):
            raise self.refuse(node, why)
        try:
            return operate(*operands)
        except TypeError as error:  # settings that cannot be joined
            raise self.refuse(node, why) from error


def _build(cls: type[Setting], positional: list[Any], named: dict[str, Any]) -> Setting:
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    wrong = [key for key in named if key not in known and key not in cls.old_fields]
    if wrong or len(positional) > len(known):
        extra = f"no argument '{wrong[0]}'" if wrong else f"at most {len(known)} arguments"
        raise InputError(f"{cls.setting_name} takes {extra}; its arguments are {', '.join(known) or 'none'}.")
    return cls(*positional, **named)
