"""The page on ensembles shows code that runs, and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "ensembles.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    exec("\n".join(blocks), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "3 samples" in printed
    assert "3 networks from one run" in printed


def test_the_modules_exist() -> None:
    for name in set(re.findall(r"`(dubito\.[a-z_.]+)`", PAGE)):
        importlib.import_module(name)
    assert all((ROOT / file).is_file() for file in re.findall(r"`(?:python )?(benchmarks/[a-z_]+\.py)`", PAGE))
