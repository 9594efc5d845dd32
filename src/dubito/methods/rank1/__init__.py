"""Rank-1 Bayesian networks and BatchEnsemble: mixtures over cheap factors of one shared network.

`Rank1` and `BatchEnsemble` are the recipes; `convert` gives a plain module for people with their own training loop.
"""

from dubito.methods.rank1.module import Rank1Module, convert
from dubito.methods.rank1.posterior import Rank1Posterior
from dubito.methods.rank1.recipe import BatchEnsemble, Rank1

__all__ = ["BatchEnsemble", "Rank1", "Rank1Module", "Rank1Posterior", "convert"]
