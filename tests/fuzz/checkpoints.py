"""Checkpoints of interrupted runs, by recipe, and runs that continue from one."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import dubito
from dubito import Training
from interrupting import interrupt_at

RECIPES = [
    "MAP()", "Variational()", "Variational(optimizer=natural)", "Laplace(structure=low-rank, rank=3)",
    "SGMCMC(burn_in=3, num_samples=4, thinning=1)", "SGMCMC(burn_in=3, num_samples=4, thinning=1, chains=2, kernel=sgnht)",
    "HMC(burn_in=3, num_samples=4, chains=1, max_depth=2)", "SVGD(num_particles=3)", "SWAG(num_samples=2, collect_every=1)",
    "Rank1(components=2)", "Snapshot(cycles=2)", "MCDropout(rate=0.2)",
]  # fmt: skip


@cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


def fit(recipe: str, checkpoint: Path) -> dubito.Posterior:
    """Fit a tiny network, from its checkpoint if there is one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        data = torch.randn(16, 4), torch.arange(16) % 3
    training = Training(epochs=3, batch_size=8, checkpoint=str(checkpoint))
    return dubito.parse(recipe).fit(model, data, training=training, progress=False)


@cache
def checkpoint_of(recipe: str) -> Path:
    """Return the checkpoint of a run that was interrupted by Ctrl-C in its third update; it may have files beside it."""
    path = _folder() / str(RECIPES.index(recipe)) / "run"
    path.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(3, patch)
        with contextlib.suppress(KeyboardInterrupt):
            fit(recipe, path)
    return path


@cache
def saved_by(recipe: str, model: nn.Module) -> Path:
    """Return a file of today's version: a posterior, or for a plain network a decision rule."""
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    posterior = dubito.parse(recipe).fit(model, data, training=Training(epochs=1), progress=False)
    path = _folder() / f"{len(list(_folder().glob('*.saved')))}.saved"
    if recipe == "MAP(train=false)":
        dubito.decisions.ConformalSets(posterior, data).save(path)
    else:
        posterior.save(path)
    return path
