"""The methods of `dubito demo`, and of `dubito compare` when none is named; a new one is one line."""

from __future__ import annotations

# Each as it is typed, with a readable name.
METHODS: dict[str, str] = {
    "auto()": "the best on held-out data",
    "map()": "plain network",
    "map(temperature=validation)": "temperature scaling",
    "laplace()": "Laplace",
    "laplace(weights=select.last_layer(), structure=full)": "Laplace, last layer",
    "laplace(weights=select.subnetwork(0.03), structure=full)": "Laplace, 3 % of the weights",
    "variational()": "variational",
    "vbll()": "variational last layer",
    "sngp()": "Gaussian-process head (SNGP)",
    "dkl()": "deep kernel learning",
    "rank1()": "rank-1",
    "batchensemble()": "BatchEnsemble",
    "ensemble()": "deep ensemble",
    "packed()": "packed ensemble",
    "mimo()": "several inputs and outputs (MIMO)",
    "snapshot()": "snapshots",
    "swag()": "SWAG",
    "mcdropout()": "MC dropout",
    "sgmcmc(weights=select.last_layer(), burn_in=500, thinning=10)": "SG-MCMC, last layer",
    "hmc(weights=select.last_layer(), method=hmc, num_steps=10, num_samples=50, burn_in=100, chains=1)": "HMC, head",
    "svgd(weights=select.last_layer())": "SVGD, last layer",
}
