"""What one posterior hands on: its answers, distilled into a plain network."""

from __future__ import annotations

from dubito.transfer.distillation import distill
from dubito.transfer.lessons import Concentration, Means, Moments, NoiseAndDoubtMoments, SoftBernoulli, SoftLabels
from dubito.transfer.students import Dirichlet, NoiseAndDoubt

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
