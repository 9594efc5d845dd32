"""The page on distillation shows code that runs, and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dubito import transfer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "distillation.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    exec("\n".join(blocks), {"__name__": "page"})
    assert "transfer.NoiseAndDoubt()" in capsys.readouterr().out


def test_what_it_names_exists() -> None:
    for name in re.findall(r"`transfer\.(\w+)`", PAGE):
        assert hasattr(transfer, name)
    files = re.findall(r"(benchmarks/[a-z_]+\.py)", PAGE)
    assert all((ROOT / file).is_file() for file in files)
