"""Variational inference: train a normal posterior by maximizing a bound on the evidence.

`Variational` is the recipe; `convert` returns a plain module for your own training loop, and `NaturalOptimizer` takes
natural gradient steps there.
"""

from dubito.methods.variational.bottleneck import Bottleneck
from dubito.methods.variational.conversion import convert
from dubito.methods.variational.diagnosis import VariationalDiagnosis
from dubito.methods.variational.groups import GroupModule, GroupPosterior, Groups
from dubito.methods.variational.module import VariationalModule, kl
from dubito.methods.variational.natural_optimizer import NaturalOptimizer
from dubito.methods.variational.posterior import VariationalPosterior
from dubito.methods.variational.recipe import Variational

__all__ = [
    "Bottleneck",
    "GroupModule",
    "GroupPosterior",
    "Groups",
    "NaturalOptimizer",
    "Variational",
    "VariationalDiagnosis",
    "VariationalModule",
    "VariationalPosterior",
    "convert",
    "kl",
]
