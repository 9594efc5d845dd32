"""Variational inference: a posterior that is trained, under any prior and bound.

`Variational` is the recipe; `convert` gives a plain module for people with their own training loop.
"""

from dubito.variational.convert import convert
from dubito.variational.diagnosis import Diagnosis
from dubito.variational.groups import GroupModule, GroupPosterior, Groups
from dubito.variational.module import VariationalModule, kl
from dubito.variational.posterior import VariationalPosterior
from dubito.variational.recipe import Variational

__all__ = [
    "Diagnosis",
    "GroupModule",
    "GroupPosterior",
    "Groups",
    "Variational",
    "VariationalModule",
    "VariationalPosterior",
    "convert",
    "kl",
]
