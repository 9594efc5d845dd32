"""The page on groups shows code that runs, and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dubito import priors

PAGE = (Path(__file__).parents[3] / "docs" / "groups.md").read_text()


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, object] = {"__name__": "page"}
    exec("\n".join(blocks), names)
    printed = capsys.readouterr().out
    assert re.search(r"1\.inputs \d+ of 64 are needed\n3\.inputs \d+ of 30 are needed", printed)
    assert names["codes"]["1.weight"].bits == 3  # type: ignore[index]


def test_the_priors_exist() -> None:
    assert all(hasattr(priors, name) for name in re.findall(r"priors\.([A-Z]\w+)", PAGE))
