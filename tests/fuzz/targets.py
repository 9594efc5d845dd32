"""All fuzz targets by name."""

from __future__ import annotations

from fuzz.api import Api
from fuzz.arguments import Arguments
from fuzz.command_line import CommandLine
from fuzz.engine import Target
from fuzz.files import Files
from fuzz.grammar import Grammar
from fuzz.tables import Tables

TARGETS: dict[str, Target] = {
    "api": Api(),
    "arguments": Arguments(),
    "command_line": CommandLine(),
    "files": Files(),
    "grammar": Grammar(),
    "tables": Tables(),
}
