"""The page on Laplace shows code that runs, and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "laplace.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    exec("\n".join(blocks), {"__name__": "page"})


def test_the_modules_exist() -> None:
    for name in set(re.findall(r"`(dubito\.[a-z_.]+)`", PAGE)):
        importlib.import_module(name)
    root = Path(__file__).parents[3]
    assert all((root / file).is_file() for file in re.findall(r"`(benchmarks/[a-z_]+\.py)`", PAGE))
