"""Read the options of a command from a file: a flat .yaml, .toml or .json."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import typer

_LINE = re.compile(r"(?P<key>[A-Za-z][\w-]*)\s*:(?:\s+(?P<value>.*))?")


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a file as the defaults of a command; raise for an option that it does not have."""
    if path is None or context.resilient_parsing:
        return path
    options = {parameter.name: parameter for parameter in context.command.params}
    found: dict[str, Any] = {}
    for key, value in parse_config(path).items():
        name = {"o": "out", "scale": "scale"}.get(key, key.replace("-", "_"))
        if name not in options or name == "config":
            known = ", ".join(sorted(str(each).replace("_", "-") for each in options if each != "config"))
            raise _bad(path, f"'{context.command.name}' has no option '{key}'; it has {known}")
        several = bool(getattr(options[name], "multiple", False))
        found[name] = value if not several or isinstance(value, list) else [value]
    context.default_map = {**(context.default_map or {}), **found}
    return path


def parse_config(path: Path) -> dict[str, Any]:
    """Return the options in a file by name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _bad(path, f"it cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        if path.suffix in (".json", ".toml"):
            found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        else:
            found = parse_yaml(text)
    except ValueError as error:
        raise _bad(path, str(error)) from error
    if not isinstance(found, dict):
        raise _bad(path, "it does not hold options by name")
    nested = [key for key, value in found.items() if isinstance(value, dict)]
    if nested:
        raise _bad(path, f"'{nested[0]}' has entries of its own, but options are single values or lists")
    return found


def parse_yaml(text: str) -> dict[str, Any]:
    r"""Read the part of YAML that options need: ``name: value``, lists in brackets or one per line, and comments.

    >>> parse_yaml("target: price\nrisk: 0.02  # two percent\nignore:\n  - id\n  - 'a: b'\n")
    {'target': 'price', 'risk': 0.02, 'ignore': ['id', 'a: b']}
    """
    found: dict[str, Any] = {}
    open_list: list[Any] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        bare = _without_comment(line)
        if not bare.strip() or bare.strip() == "---":
            continue
        item = re.fullmatch(r"\s*-\s+(.*)", bare)
        if item is not None and open_list is not None:
            open_list.append(_value(item[1].strip(), number))
            continue
        match = _LINE.fullmatch(bare.rstrip()) if not bare[0].isspace() else None
        if match is None:
            raise ValueError(f"line {number} is not 'name: value' or '- item': {line.strip()!r}")
        value = (match["value"] or "").strip()
        open_list = [] if not value else None
        found[match["key"]] = open_list if open_list is not None else _value(value, number)
    return {key: None if value == [] else value for key, value in found.items()}


def _value(text: str, number: int) -> Any:
    if text.startswith("[") and text.endswith("]"):
        inside = re.findall(r"\"[^\"]*\"|'[^']*'|[^,]+", text[1:-1])
        return [_value(each.strip(), number) for each in inside if each.strip()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text[:1] in ("{", "&", "*", "|", ">", "!", "[", '"', "'"):
        raise ValueError(f"line {number} uses YAML that is not read here: {text!r}; quote it, or write JSON")
    words = {"true": True, "false": False, "null": None, "~": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _without_comment(line: str) -> str:
    """Return a line without its comment; a # inside of quotes or of a word is none."""
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _bad(path: Path, why: str) -> typer.BadParameter:
    return typer.BadParameter(f"'{path}': {why}", param_hint="'--config'")
