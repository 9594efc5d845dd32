"""The pages on samplers show code that runs, and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("samplers.md", "results-samplers.md")]


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES[0], flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    exec("\n".join(blocks), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert printed.startswith("2 chain(s) of 60 samples.")
    assert "Subspace of 5 directions" in printed


def test_what_is_named_exists() -> None:
    for page in PAGES:
        for name in set(re.findall(r"`(dubito\.[a-z_.]+)`", page)):
            importlib.import_module(name)
        assert all((ROOT / file).is_file() for file in re.findall(r"`(?:python )?(benchmarks/[a-z_]+\.py)", page))
        assert "COSTS" not in page
        assert "GOLD" not in page
