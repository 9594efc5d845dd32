"""`MAP`: train the network to its most probable weights, the baseline for all other methods."""

from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP

__all__ = ["MAP", "PointPosterior"]
