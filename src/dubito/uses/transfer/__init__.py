"""Distill a posterior: train one plain network to give its predictions."""

from __future__ import annotations

import warnings
from typing import Any

from dubito.uses.transfer.distillation import distill
from dubito.uses.transfer.distillation_losses import (
    Concentration,
    GaussianWithUncertaintyMoments,
    Means,
    Moments,
    SoftBernoulli,
    SoftLabels,
)
from dubito.uses.transfer.student_likelihoods import Dirichlet, GaussianWithUncertainty

__all__ = [
    "Concentration",
    "Dirichlet",
    "GaussianWithUncertainty",
    "GaussianWithUncertaintyMoments",
    "Means",
    "Moments",
    "SoftBernoulli",
    "SoftLabels",
    "distill",
]


def __getattr__(name: str) -> Any:
    new = name.replace("NoiseAndDoubt", "GaussianWithUncertainty")
    if new == name or new not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    warnings.warn(f"transfer.{name} is now transfer.{new}.", DeprecationWarning, stacklevel=2)
    return globals()[new]
