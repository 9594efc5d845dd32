"""Rules that choose single weights without data."""

from __future__ import annotations

from abc import abstractmethod
from numbers import Integral
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from dubito.core.constraints import check
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator
from dubito.core.settings import setting
from dubito.networks.selection import Selection
from dubito.select.rule import SelectionRule

Size = Annotated[float, "a number of weights or a fraction below 1"]


def count_of(size: float, total: int) -> int:
    """Return the number of weights for `size`, which is a number of weights or a fraction below 1.

    >>> count_of(0.5, 10), count_of(3, 10)
    (5, 3)
    """
    check("size", Size, size)
    whole = isinstance(size, Integral) or float(size).is_integer()
    count = round(size * total) if 0 < size < 1 else int(size) if whole else 0
    if count < 1 or count > total:
        raise InputError(
            f"A selection of size {size!r} is not possible: choose a whole number up to the {total:,} candidates, or a "
            "fraction between 0 and 1 that gives at least one weight."
        )
    return count


def top(candidates: Selection, scores: Tensor, count: int) -> Selection:
    """Select the `count` candidates with the largest scores; ties go to the earlier weight."""
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    chosen = torch.zeros(candidates.num_weights, dtype=torch.bool)
    chosen[order.cpu()] = True
    parts = {n: candidates.positions(n)[chosen[span]] for n, span in candidates.slices.items()}
    return Selection(candidates.shapes, parts)


@setting
class _Scored(SelectionRule):
    """The trainable weights with the largest scores."""

    size: Size

    @abstractmethod
    def scores(self, candidates: Selection, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Return the score of each candidate."""

    def resolve(
        self,
        model: nn.Module,
        data: Any = None,
        likelihood: Any = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Selection:
        """Select the largest scores among all trainable weights."""
        candidates = Selection.all_of(model)
        count = count_of(self.size, candidates.num_weights)
        return top(candidates, self.scores(candidates, model, default_generator(generator)), count)


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
