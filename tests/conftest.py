"""One thread per test process, so that results do not depend on the machine's load; and no warnings already given."""

import pytest
import torch

from dubito.curvature import engine

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_said", set())
