"""Samplers: weights visited by a Markov chain, or particles that repel each other, as a posterior."""

from dubito.methods.mcmc.hmc import HMC
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.sgmcmc import SGMCMC
from dubito.methods.mcmc.svgd import SVGD

__all__ = ["HMC", "SGMCMC", "SVGD", "ParticlePosterior"]
