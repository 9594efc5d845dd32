"""Optional packages: a test that needs one skips where it is missing, and fails where it should be there."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest


def needs(name: str) -> Any:
    """Return a module; without it skip, unless `make test-extras` says that everything is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its import are not ours
        if os.environ.get("DUBITO_TEST_EXTRAS"):
            return importlib.import_module(name)
        return pytest.importorskip(name)
