"""The Laplace approximation: a Gaussian around the trained weights with the curvature of the loss as precision."""

from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.recipe import Laplace

__all__ = ["Laplace", "LaplacePosterior"]
