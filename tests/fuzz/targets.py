"""All fuzz targets by name."""

from __future__ import annotations

from fuzz.api import Api
from fuzz.arguments import Arguments
from fuzz.engine import Target
from fuzz.grammar import Grammar

TARGETS: dict[str, Target] = {
    "api": Api(),
    "arguments": Arguments(),
    "grammar": Grammar(),
}
