"""One thread per test process, so that results do not depend on the machine's load; and no warnings already given."""

import pytest
import torch

from dubito.core.once import warn_once
from dubito.curvature.workspace import Workspace

torch.set_num_threads(1)
Workspace.overwrites = True  # lent memory that is used after its block shows as NaN


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def _no_warning_was_given() -> None:
    warn_once.forget()
