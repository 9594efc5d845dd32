"""The Laplace approximation: a Gaussian around the trained weights, shaped by the curvature of the loss."""

from dubito.laplace.posterior import LaplacePosterior
from dubito.laplace.recipe import Laplace

__all__ = ["Laplace", "LaplacePosterior"]
