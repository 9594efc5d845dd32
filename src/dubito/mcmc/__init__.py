"""Samplers: weights visited by a Markov chain, or particles that repel each other, as a posterior."""

from dubito.mcmc.hmc import HMC
from dubito.mcmc.posterior import ParticlePosterior
from dubito.mcmc.sgmcmc import SGMCMC
from dubito.mcmc.svgd import SVGD

__all__ = ["HMC", "SGMCMC", "SVGD", "ParticlePosterior"]
