"""One thread per test process, so that results do not depend on the machine's load; and no warnings already given."""

import gc

import pytest
import torch

from dubito.core.once import warn_once
from dubito.curvature.products import Workspace

torch.set_num_threads(1)
Workspace.overwrites = True  # lent memory that is used after its block shows as NaN


def pytest_collection_finish() -> None:
    gc.freeze()  # the thousands of tests and all modules live until the end: no need to look at them again and again


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def _no_warning_was_given() -> None:
    warn_once.forget()
