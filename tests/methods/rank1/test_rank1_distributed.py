"""Two processes find the mixture that one finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank1_processes
import torch

from two_processes import started

pytestmark = pytest.mark.slow


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    with started(rank1_processes.__file__, "everything", tmp_path) as wait:
        alone = rank1_processes.everything(tmp_path)
        first, second = wait()
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    for name in ("points", "prior"):
        torch.testing.assert_close(first[name], alone[name], rtol=1e-10, atol=1e-10)
