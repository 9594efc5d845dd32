"""`MAP`: train the network to its most probable weights, the baseline of every other method."""

from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP

__all__ = ["MAP", "PointPosterior"]
