"""Ensembles, averages along one training run, and networks that are stochastic by themselves."""

from __future__ import annotations

from dubito.ensembles.augmentation import TestTimeAugmentation
from dubito.ensembles.batch_norm import BatchNormNoise
from dubito.ensembles.dropout_posterior import DropoutPosterior
from dubito.ensembles.mc_dropout import MCDropout
from dubito.ensembles.posterior import EnsemblePosterior
from dubito.ensembles.recipe import Ensemble
from dubito.ensembles.snapshot import Snapshot
from dubito.ensembles.swag import SWAG
from dubito.ensembles.swag_posterior import SWAGPosterior

__all__ = [
    "SWAG",
    "BatchNormNoise",
    "DropoutPosterior",
    "Ensemble",
    "EnsemblePosterior",
    "MCDropout",
    "SWAGPosterior",
    "Snapshot",
    "TestTimeAugmentation",
]
