"""Ensembles, averages along one training run, and networks that are stochastic by themselves."""

from dubito.methods.ensembles.augmentation import TestTimeAugmentation
from dubito.methods.ensembles.averager import Averager
from dubito.methods.ensembles.batch_norm import BatchNormNoise
from dubito.methods.ensembles.mc_dropout import DropoutPosterior, MCDropout
from dubito.methods.ensembles.packed import MIMO, Packed
from dubito.methods.ensembles.posterior import EnsemblePosterior
from dubito.methods.ensembles.recipe import Ensemble
from dubito.methods.ensembles.snapshot import Snapshot
from dubito.methods.ensembles.swag import SWAG, SWAGPosterior

__all__ = [
    "MIMO",
    "SWAG",
    "Averager",
    "BatchNormNoise",
    "DropoutPosterior",
    "Ensemble",
    "EnsemblePosterior",
    "MCDropout",
    "Packed",
    "SWAGPosterior",
    "Snapshot",
    "TestTimeAugmentation",
]
