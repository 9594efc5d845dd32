"""Group priors: groups of weights share a random scale, so that whole units can be removed."""

from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.posterior import GroupPosterior, Groups

__all__ = ["GroupModule", "GroupPosterior", "Groups"]
