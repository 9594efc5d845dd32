"""The candidates of `Auto`, the simplest first."""

from __future__ import annotations

from dataclasses import dataclass

from dubito import select
from dubito.fitting.recipe import Recipe
from dubito.methods.ensembles import Ensemble
from dubito.methods.laplace import Laplace
from dubito.methods.map import MAP
from dubito.methods.rank1 import Rank1
from dubito.methods.variational import Variational

# The first candidate, with which all others are compared.
TEMPERATURE = "temperature"
# The number of weights of the subnetwork.
SUBNETWORK = 300
MEMBERS = 5


@dataclass(frozen=True)
class AutoCandidate:
    """A method that may be chosen.

    Attributes:
        name: A readable name.
        recipe: The recipe.
        relative_epochs: How many epochs it trains, for each epoch of the plain network; 0 if it trains nothing.
        ranks_weights: Whether its variances say which weights can be dropped.
    """

    name: str
    recipe: Recipe
    relative_epochs: float = 0.0
    ranks_weights: bool = False


def candidates(num_weights: int) -> list[AutoCandidate]:
    """Return all candidates for a network of this many weights, the simplest first."""
    return [
        AutoCandidate(TEMPERATURE, MAP(train=False), ranks_weights=True),
        AutoCandidate("last layer", Laplace(weights=select.last_layer())),
        AutoCandidate("subnetwork", Laplace(structure="full", weights=select.subnetwork(min(SUBNETWORK, num_weights)))),
        AutoCandidate("diagonal", Laplace(structure="diag"), ranks_weights=True),
        AutoCandidate("Kronecker", Laplace(structure="kron"), ranks_weights=True),
        AutoCandidate("rank-1", Rank1(), 1.0),
        AutoCandidate("variational", Variational(), 3.0, ranks_weights=True),
        AutoCandidate("ensemble", Ensemble(members=MEMBERS), float(MEMBERS)),
    ]
