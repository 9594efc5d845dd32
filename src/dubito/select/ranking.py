"""`Ranking`, weights in an order of preference, and `RankedRule`, the base class of rules that have one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.batches import Data, Source
from dubito.core.constraints import check
from dubito.core.errors import InputError
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


@dataclass(frozen=True)
class Ranking:
    """Candidates in the order in which a rule prefers them.

    Args:
        candidates: All candidates.
        order: Flat positions of the chosen ones among the candidates, the best first.
        together: The number of first positions that have no order among themselves.
        covered: Whether the ordered weights are all among those without an order.
    """

    candidates: Selection
    order: Tensor
    together: int = 0
    covered: bool = False

    @property
    def is_ordered(self) -> bool:
        """Whether some of the weights have an order, so that fewer can be chosen."""
        return self.together < len(self.order)

    @property
    def selection(self) -> Selection:
        """The chosen weights."""
        chosen = torch.zeros(self.candidates.num_weights, dtype=torch.bool)
        chosen[self.order] = True
        parts = {n: self.candidates.positions(n)[chosen[span]] for n, span in self.candidates.slices.items()}
        return Selection(self.candidates.shapes, parts)


@setting
class RankedRule(SelectionRule):
    """A rule that prefers some weights to others, and chooses the best ones up to a size.

    A report on such a rule shows every size up to its own, alone or in a union with other rules.

    Args:
        size: A number of weights, or a fraction below 1.
    """

    size: Size

    @abstractmethod
    def rank(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | str | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Ranking:
        """Choose and rank the weights; a smaller `size` gives the first of them.

        Args:
            model: The trained network.
            data: The training data; rules that look only at the weights need none.
            likelihood: The likelihood; by default categorical.
            prior_precision: The prior precision λ.
            generator: The source of randomness; by default the same call gives the same weights.
        """

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Choose the weights; the arguments are those of `rank`."""
        return self.rank(model, *args, **kwargs).selection
