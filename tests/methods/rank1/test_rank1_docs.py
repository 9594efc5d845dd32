"""The page on rank-1 mixtures shows code that runs, and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import dubito

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "rank1.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "page"}
    exec("\n".join(blocks), names)
    assert names["mixture"].components == 4  # type: ignore[attr-defined]


def test_the_names_exist() -> None:
    for name in set(re.findall(r"`((?:dubito|rank1)\.[a-z_.]+)`", PAGE)):
        full = name if name.startswith("dubito.") else f"dubito.{name}"
        module, _, last = full.rpartition(".")
        assert hasattr(importlib.import_module(module), last) or importlib.import_module(full)
    for name in set(re.findall(r"`(\w+)=", PAGE)):
        assert name in {*dubito.Rank1().fields(), *dubito.BatchEnsemble().fields()}
    results = (ROOT / "docs" / "results-rank1.md").read_text()
    assert all((ROOT / file).is_file() for file in re.findall(r"(benchmarks/[a-z0-9_]+\.py)", PAGE + results))
