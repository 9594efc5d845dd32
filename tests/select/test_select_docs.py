"""The page on subnetworks shows code that runs, and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "subnetworks.md").read_text()
RESULTS = (ROOT / "docs" / "results-subnetworks.md").read_text()


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def test_the_recommended_setting_runs() -> None:
    (block,) = examples(RESULTS)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(block, scope)
    assert scope["posterior"].selection.num_weights == 1000
    assert scope["point"].temperature != 1.0


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = examples(PAGE)
    assert len(blocks) == 3
    scope: dict[str, Any] = {"__name__": "page"}
    exec("\n".join(blocks), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("Selection of 300 of 2,260 weights")
    assert "recommended size" in printed
    assert scope["union"].sizes[0] == 310
    assert "There is no sweep over sizes" in printed


def test_the_modules_exist() -> None:
    for name in set(re.findall(r"`(dubito\.[a-z_.]+)`", PAGE)):
        importlib.import_module(name)
    assert all((ROOT / file).is_file() for file in re.findall(r"`(benchmarks/[a-z_]+\.py)`", PAGE))
