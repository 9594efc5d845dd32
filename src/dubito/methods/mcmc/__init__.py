"""Samplers: posteriors made of the weights that a Markov chain visits, or of interacting particles (SVGD)."""

from dubito.methods.mcmc.hmc import HMC
from dubito.methods.mcmc.optimizer import SamplingOptimizer
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.sgmcmc import SGMCMC
from dubito.methods.mcmc.svgd import SVGD

__all__ = ["HMC", "SGMCMC", "SVGD", "ParticlePosterior", "SamplingOptimizer"]
