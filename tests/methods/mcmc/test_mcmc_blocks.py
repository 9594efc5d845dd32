"""Blocks of no-U-turn transitions, as on an accelerator: the number of doublings changes the work, not the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mcmc_cases import classes, network

from dubito import HMC, Training, select
from dubito.methods.mcmc import hamiltonian, trajectories
from dubito.methods.mcmc.blocks import Blocks
from dubito.methods.mcmc.posterior import ParticlePosterior
from interrupting import interrupt_at

RECIPE = HMC(weights=select.last_layer(), chains=1, burn_in=10, num_samples=10, max_depth=5)


def sample(monkeypatch: pytest.MonkeyPatch, length: int, first: int, **options: object) -> ParticlePosterior:
    monkeypatch.setattr(trajectories, "windows", lambda burn_in: [6])  # new masses, and a new step size
    monkeypatch.setattr(trajectories, "make_blocks", lambda depth, device: Blocks(depth, length, first))
    return RECIPE.replace(**options).fit(network(), classes(), progress=False)


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep numbers as tensors, which are not read."""
    for file in (hamiltonian, trajectories):
        monkeypatch.setattr(file, "number", lambda value: value)


@pytest.mark.slow
def test_samples_do_not_depend_on_blocks_or_doublings(monkeypatch: pytest.MonkeyPatch) -> None:
    read = sample(monkeypatch, 20, RECIPE.max_depth)  # each trajectory ends by itself
    unread(monkeypatch)
    most = sample(monkeypatch, 20, RECIPE.max_depth)
    assert len(set(read.statistics["num_steps"].flatten().tolist())) > 1
    torch.testing.assert_close(most.samples, read.samples, rtol=1e-6, atol=1e-8)
    assert torch.equal(most.statistics["num_steps"], read.statistics["num_steps"])
    for length, first in ((1, 1), (7, 2)):
        assert sample(monkeypatch, length, first).digest() == most.digest()
    in_file = sample(monkeypatch, 7, 2, memory=1e-9)
    assert torch.equal(in_file.samples, most.samples)


def test_the_largest_number_of_doublings_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    unread(monkeypatch)
    found = sample(monkeypatch, 4, 1, max_depth=2, burn_in=5, adapt=False, step_size=1e-3)
    assert bool((found.statistics["num_steps"] == 3).all())


@pytest.mark.slow
def test_an_interrupted_block_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unread(monkeypatch)
    expected = sample(monkeypatch, 7, 2)
    training = Training(checkpoint=tmp_path / "run", batch_size=1024, shuffle=False)
    interrupt_at(13, monkeypatch)  # the sixth of a block
    with pytest.raises(KeyboardInterrupt):
        RECIPE.fit(network(), classes(), progress=False, training=training)
    assert RECIPE.fit(network(), classes(), progress=False, training=training).digest() == expected.digest()
