"""The candidates of `Auto`, their scores on held-out examples, and the choice by the one-standard-error rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito import select
from dubito.beliefs.likelihoods import Likelihood
from dubito.core.batches import Source
from dubito.fitting.auto_explanation import CandidateScore
from dubito.fitting.output_noise import best_temperature, outputs_of
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.methods.auto.scores import row_scores, scores
from dubito.methods.ensembles import Ensemble
from dubito.methods.laplace import Laplace
from dubito.methods.map import MAP
from dubito.methods.rank1 import Rank1
from dubito.methods.variational import Variational

# Outputs of the plain network with their targets.
Part = tuple[Tensor, Tensor]


class ScoreTable:
    """One score per candidate and held-out example.

    Attributes:
        problems: Why a candidate could not be fitted, by its name.
        fitted: Posteriors that were fitted to all training data, by name.
    """

    def __init__(self, goal: str) -> None:
        self.goal = goal
        self.problems: dict[str, str] = {}
        self.fitted: dict[str, Posterior] = {}
        self._scores: dict[str, list[Tensor]] = {}
        self._log_scores: dict[str, list[Tensor]] = {}
        self._networks: list[tuple[Posterior, Source, list[Part]]] = []

    @property
    def num_rows(self) -> int:
        """The number of held-out examples."""
        return sum(len(part[1]) for _, _, parts in self._networks for part in parts)

    def add_network(self, network: Posterior, source: Source) -> None:
        """Add the plain network of a split, whose temperature is found later on the other splits."""
        self._networks.append((network, source, outputs_of(network.model, source)))

    def add(self, name: str, posterior: Posterior, source: Source) -> None:
        """Add the scores of a candidate on the held-out examples of a split."""
        found = scores(self.goal, posterior, source)
        also = scores("calibration", posterior, source) if self.goal == "ood" else found
        self._scores.setdefault(name, []).append(found)
        self._log_scores.setdefault(name, []).append(also)

    def temperature(self, likelihood: Likelihood) -> float:
        """Return the temperature that is best on all held-out examples."""
        return best_temperature([part for _, _, parts in self._networks for part in parts], likelihood)

    def choose(self, found: list[tuple[AutoCandidate, str]]) -> tuple[AutoCandidate, list[CandidateScore]]:
        """Return the simplest candidate within one standard error of the best, and the table.

        Args:
            found: The candidates, the simplest first, each with the reason why it was left out, or an empty text.
        """
        self._add_temperature()
        means = {name: torch.cat(parts) for name, parts in self._scores.items() if name not in self.problems}
        for candidate, _ in found:
            if candidate.name in means and not self._is_safe(candidate.name):
                self.problems[candidate.name] = "its log score is worse than that of temperature"
        rows = [self._row(candidate, self.problems.get(candidate.name, why), means) for candidate, why in found]
        allowed = [
            candidate for candidate, _ in found if candidate.name in means and not self.problems.get(candidate.name)
        ]
        best = max(allowed, key=lambda candidate: float(means[candidate.name].mean()))
        for candidate in allowed:
            mean, error = _difference(means[best.name], means[candidate.name])
            if mean <= error:
                return candidate, rows
        return best, rows

    def _row(self, candidate: AutoCandidate, why: str, means: dict[str, Tensor]) -> CandidateScore:
        if candidate.name not in means:
            return CandidateScore(candidate.name, repr(candidate.recipe), problem=why)
        own = means[candidate.name]
        gain, error = _difference(own, means[TEMPERATURE])
        return CandidateScore(candidate.name, repr(candidate.recipe), float(own.mean()), gain, error, why)

    def _is_safe(self, name: str) -> bool:
        """Return whether the log score is as good as the temperature-scaled network's, within one standard error."""
        if self.goal != "ood":
            return True
        loss, error = _difference(torch.cat(self._log_scores[TEMPERATURE]), torch.cat(self._log_scores[name]))
        return loss <= error

    def _add_temperature(self) -> None:
        """Add the scores of the plain network, each group at the temperature that is best on the others."""
        groups = [(network, _joined(parts)) for network, _, parts in self._networks]
        if len(groups) == 1:  # its halves, in turn
            network, (outputs, targets) = groups[0]
            middle = len(outputs) // 2
            groups = [(network, (outputs[part], targets[part])) for part in (slice(middle), slice(middle, None))]
        for number, (network, part) in enumerate(groups):
            others = [other for k, (_, other) in enumerate(groups) if k != number]
            self._log_scores.setdefault(TEMPERATURE, []).append(self._tempered(network, part, others))
        if self.goal in ("ood", "small"):
            self._scores[TEMPERATURE] = [scores(self.goal, network, source) for network, source, _ in self._networks]
        else:
            self._scores[TEMPERATURE] = self._log_scores[TEMPERATURE]

    def _tempered(self, network: Posterior, part: Part, others: list[Part]) -> Tensor:
        likelihood = network.likelihood
        outputs, scaled = likelihood.temper(part[0], best_temperature(others, likelihood))
        goal = "intervals" if self.goal == "intervals" else "calibration"
        return row_scores(goal, scaled, scaled.predict(outputs), part[1])


def _joined(parts: list[Part]) -> Part:
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _difference(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Return the mean difference of two columns and its standard error, example by example."""
    difference = first - second
    return float(difference.mean()), float(difference.std(correction=0)) / math.sqrt(len(difference))


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
