"""Networks for examples, benchmarks and the command line: plain modules, built from plain layers.

Every layer has `reset_parameters`, so recipes with ``start="fresh"`` work on all of them.
"""

from dubito.networks.models.build import build, names
from dubito.networks.models.convolutional import lenet5, resnet18, resnet20
from dubito.networks.models.dense import lenet_300_100, mlp
from dubito.networks.models.known_noise import KnownNoise, LearnedNoise
from dubito.networks.models.sequence import lstm, transformer

__all__ = [
    "KnownNoise", "LearnedNoise", "build", "lenet5", "lenet_300_100", "lstm", "mlp", "names", "resnet18", "resnet20",
    "transformer",
]  # fmt: skip
