"""Rules that choose single weights without data."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core.randomness import default_generator
from dubito.core.settings import setting
from dubito.networks.selection import Selection
from dubito.select.budgets import make_budget
from dubito.select.ranking import RankedRule, Ranking


@setting
class _Scored(RankedRule):
    """The trainable weights with the largest scores."""

    @abstractmethod
    def scores(self, candidates: Selection, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return the score of each candidate."""

    def rank(
        self,
        model: nn.Module,
        data: Any = None,
        likelihood: Any = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Ranking:
        """Rank the largest scores among all trainable weights; only `model` and `generator` are used."""
        candidates = Selection.all_of(model)
        scores = self.scores(candidates, model, default_generator(generator))
        return Ranking(candidates, make_budget(candidates, self.size, None).best(scores.cpu()))


@setting
class random(_Scored):
    """Weights drawn uniformly without replacement.

    Args:
        size: A number of weights, or a fraction below 1.
    """

    setting_name = "select.random"

    def scores(self, candidates: Selection, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return uniform noise, in float64 because many weights of a large network would tie in float32."""
        return torch.rand(candidates.num_weights, generator=generator, dtype=torch.float64, device=generator.device)


@setting
class largest_magnitude(_Scored):
    """The weights with the largest absolute value, a strong baseline without computation.

    Args:
        size: A number of weights, or a fraction below 1.
    """

    setting_name = "select.largest_magnitude"

    def scores(self, candidates: Selection, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return ``|w|``."""
        return candidates.ravel({name: value.detach().abs() for name, value in model.named_parameters()})
