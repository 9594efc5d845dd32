"""The page on compression shows code that runs, and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dubito import rules

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "compression.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    exec("\n".join(blocks), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert printed.startswith("by rules.PosteriorDamage(target=0.7)")
    assert "Plan: " in printed
    assert (tmp_path / "digits.dubito").stat().st_size < 10_000


def test_the_rules_exist() -> None:
    table = PAGE[PAGE.index("## Which weights go") : PAGE.index("Without a rule")]
    for name in re.findall(r"^\| `(\w+)\(", table, flags=re.MULTILINE):
        assert issubclass(getattr(rules, name), rules.Rule)
