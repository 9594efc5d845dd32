"""One thread per test process, so that results do not depend on the machine's load."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)
