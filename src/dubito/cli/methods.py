"""The methods of `dubito demo`, and of `dubito compare` when none is named; a new one is one line."""

from __future__ import annotations

METHODS: tuple[str, ...] = (
    "map()",
    "map(temperature=validation)",
    "laplace()",
    "laplace(weights=select.last_layer(), structure=full)",
    "laplace(weights=select.subnetwork(0.03), structure=full)",
    "variational()",
    "rank1()",
    "batchensemble()",
    "ensemble()",
    "snapshot()",
    "swag()",
    "mcdropout()",
    "sgmcmc(weights=select.last_layer(), burn_in=500, thinning=10)",
    "hmc(weights=select.last_layer(), method=hmc, num_steps=10, num_samples=50, burn_in=100, chains=1)",
    "svgd(weights=select.last_layer())",
)
