"""What one process, and each of two, samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dubito.errors import NonFiniteError
from mcmc_cases import classes, network

from dubito import HMC, SGMCMC, SVGD, Training, select
from dubito.core import distributed


def recipes() -> dict[str, Any]:
    short = {"burn_in": 10, "thinning": 2, "num_samples": 10}
    return {
        "sghmc": SGMCMC(chains=3, **short),
        "disk": SGMCMC("psgld", chains=3, memory=1e-6, **short),
        "one": SGMCMC("sgld", chains=1, **short),
        "nuts": HMC(chains=3, burn_in=8, num_samples=6, max_depth=3, weights=select.last_layer()),
        "svgd": SVGD(4),
    }


def results(folder: Path) -> dict[str, Any]:
    """Fit them all, each with a checkpoint, and once more from it."""
    found = {}
    for name, recipe in recipes().items():
        training = Training(batch_size=20, epochs=3, checkpoint=str(folder / name), checkpoint_every=0.0)
        first = recipe.fit(network(), classes(), training=training, progress=False)
        again = recipe.fit(network(), classes(), training=training, progress=False)
        assert again.digest() == first.digest()
        found[name] = first
    return found


def saved(folder: Path) -> str:
    """Save what one of two processes fitted, and return what it says about a run that diverges."""
    for name, posterior in results(folder).items():
        posterior.save(folder / f"{name}-{distributed.rank()}")
    with pytest.raises(NonFiniteError) as error:
        SGMCMC("sgld", step_size=1e12, chains=2, burn_in=200).fit(network(), classes(), progress=False)
    return str(error.value)
