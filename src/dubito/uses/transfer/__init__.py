"""What one posterior hands on: its answers, distilled into a plain network."""

from __future__ import annotations

from dubito.uses.transfer.distillation import distill
from dubito.uses.transfer.distillation_losses import (
    Concentration,
    Means,
    Moments,
    NoiseAndDoubtMoments,
    SoftBernoulli,
    SoftLabels,
)
from dubito.uses.transfer.student_likelihoods import Dirichlet, NoiseAndDoubt

__all__ = [
    "Concentration",
    "Dirichlet",
    "Means",
    "Moments",
    "NoiseAndDoubt",
    "NoiseAndDoubtMoments",
    "SoftBernoulli",
    "SoftLabels",
    "distill",
]
