"""The page on decisions shows code that runs, and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "decisions.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the network of the page is drawn from the global generator
        exec("\n".join(blocks), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "flagged: " in printed
    assert "<Rejector: answers " in printed
    assert "classes a set" in printed


def test_what_it_names_exists() -> None:
    for name in set(re.findall(r"`(dubito\.[a-z_.]+)`", PAGE)):
        importlib.import_module(name)
    files = re.findall(r"((?:benchmarks|examples)/[a-z_]+\.py)", PAGE)
    assert len(set(files)) >= 4
    assert all((ROOT / file).is_file() for file in files)
    assert all((ROOT / "docs" / link).is_file() for link in re.findall(r"\]\(([a-z_/-]+\.(?:md|png))\)", PAGE))
