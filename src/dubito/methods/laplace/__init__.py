"""The Laplace approximation: a Gaussian around the trained weights, shaped by the curvature of the loss."""

from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.recipe import Laplace

__all__ = ["Laplace", "LaplacePosterior"]
