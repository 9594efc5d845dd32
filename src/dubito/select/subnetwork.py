r"""Subnetworks: the single weights that matter most for the uncertainty of the outputs.

Daxberger et al. (2021), https://arxiv.org/abs/2010.14689, choose the weights with the largest marginal variance, which
is closest to the full posterior in *weight space*. In *function space* a subnetwork is the better the more predictive
variance it captures, $\operatorname{tr} J_S (H_{SS} + \lambda I)^{-1} J_S^\top$; for one weight on its own that is

$$\text{score}_d = \sigma_d^2 \sum_n \lVert \Pi J_{nd} \rVert^2, \qquad \sigma_d^2 = 1 / (h_d + \lambda)$$

the default here. See `dubito.select.scores` for $h_d$, $J$ and $\Pi$.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, distributed
from dubito.core.batches import Data, Source
from dubito.core.constraints import Count, NonNegative, Positive, check
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator
from dubito.core.settings import setting
from dubito.fitting.recipe import Recipe
from dubito.networks.selection import Selection
from dubito.select.budgets import candidates_of, make_budget
from dubito.select.choose import Chooser, Ranking
from dubito.select.rule import SelectionRule
from dubito.select.weights import Size, largest_magnitude, random

# The rules that look at how much a weight moves the outputs.
LOOK_AT_OUTPUTS = ("output-variance", "sampled", "greedy")
# Examples that are worked on at a time, where the data is not in batches already.
BATCH_SIZE = 512
# Candidates among which the greedy rule searches, those with the largest scores.
PREFILTER = 10_000


@runtime_checkable
class _Marginals(Protocol):
    def marginals(self) -> tuple[Any, Any]: ...


HasMarginals = Annotated[_Marginals, "a posterior"]


@setting
class subnetwork(SelectionRule):
    """The weights that matter most for the uncertainty of the outputs.

    Args:
        size: A number of weights, or a fraction of the candidates below 1.
        rule: ``"output-variance"``: the largest scores; ``"sampled"``: drawn without replacement in proportion to the
            score, which spreads them; ``"greedy"``: one after the other, each judged given those before it;
            ``"weight-variance"``: the largest variances, as in the paper; ``"magnitude"``; ``"random"``.
        context: Inputs without targets where the uncertainty will matter: the score is summed over them in the place
            of the training inputs.
        candidates: ``"weights"`` for weights without biases and normalizations, a name, pattern or type of layers as
            `select.layers` takes it, or another rule; by default every trainable weight.
        per_layer: At most so many from parameters by (a part of) their name, as a dict; or ``"proportional"`` for the
            same fraction of each parameter.
        variance: Where σ² comes from: ``"diag"`` (the diagonal Gauss-Newton matrix), ``"kron"`` (a Kronecker-factored
            one), a recipe, or a posterior.
        num_samples: Random output directions per example in the place of all, for networks with very many outputs.
        prefilter: How many candidates, those of the largest scores, the greedy rule looks at.

    >>> subnetwork(1000, rule="greedy")
    select.subnetwork(1000, rule='greedy')
    """

    setting_name = "select.subnetwork"
    old_fields: ClassVar[Mapping[str, str]] = {"samples": "num_samples"}
    size: Size
    rule: Literal["output-variance", "sampled", "greedy", "weight-variance", "magnitude", "random"] = "output-variance"
    context: Any = None
    candidates: str | type[nn.Module] | tuple[str | type[nn.Module], ...] | SelectionRule | None = None
    per_layer: Literal["proportional"] | Annotated[Mapping[str, NonNegative], "a dict of sizes"] | None = None
    variance: Literal["diag", "kron"] | Recipe | HasMarginals = "diag"
    num_samples: Count | None = None
    prefilter: Count = PREFILTER

    def __post_init__(self) -> None:
        if self.context is not None:
            if self.rule not in LOOK_AT_OUTPUTS:
                raise InputError(f"rule={self.rule!r} looks at no inputs: drop `context`.")
            object.__setattr__(self, "context", batches.as_tensors(self.context))
        if self.num_samples is not None and self.rule == "greedy":
            raise InputError(f"rule='greedy' is exact and draws no samples: drop num_samples={self.num_samples!r}.")

    @distributed.together()
    def resolve(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | str | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Selection:
        """Choose.

        Args:
            model: The trained network.
            data: The training data; ``"magnitude"`` and ``"random"`` need none.
            likelihood: The likelihood; by default categorical, as in a recipe's `fit`.
            prior_precision: The prior precision λ.
            generator: The source of randomness; by default the same call gives the same weights.
        """
        return self.rank(model, data, likelihood, prior_precision, generator).selection

    def rank(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | str | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Ranking:
        """Choose, and say in which order: with a smaller `size` the rule would stop earlier."""
        check("prior_precision", Positive, prior_precision)  # divides scores where there is no curvature
        generator, known = default_generator(generator), likelihoods.resolve(likelihood or "categorical")
        source = as_source(model, data)
        candidates = candidates_of(self.candidates, model, source, known, prior_precision, generator)
        budget = make_budget(candidates, self.size, self.per_layer)
        if self.rule in ("magnitude", "random"):
            rule = (largest_magnitude if self.rule == "magnitude" else random)(self.size)
            return Ranking(candidates, budget.best(rule.scores(candidates, model, generator).cpu()))
        if source is not None:
            return Chooser(self, model, source, known, prior_precision, generator).choose(candidates, budget)
        of: Any = self.variance
        if self.rule == "weight-variance" and hasattr(of, "marginals"):
            return Ranking(candidates, budget.best(candidates.ravel(of.marginals()[1]).cpu()))
        raise InputError(f"select.subnetwork(rule={self.rule!r}) needs data to decide: pass `data`.")


@setting
class largest_variance(SelectionRule):
    """The weights with the largest posterior variance: the smallest Wasserstein distance to the full posterior.

    This is the rule of Daxberger et al. (2021), https://arxiv.org/abs/2010.14689. On networks with dead units or
    constant inputs it prefers weights that cannot change an output, and warns: `select.subnetwork` looks at outputs.

    Args:
        size: A number of weights, or a fraction below 1.
        of: Whose variances: a recipe that is fitted to the data first, or a posterior; by default
            ``Laplace(structure="diag")`` with the prior precision at hand.
    """

    setting_name = "select.largest_variance"
    size: Size
    of: Recipe | HasMarginals | None = None

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Select the largest variances among all trainable weights."""
        return self.as_subnetwork().resolve(model, *args, **kwargs)

    def as_subnetwork(self) -> subnetwork:
        """The same rule as one of `select.subnetwork`."""
        return subnetwork(self.size, rule="weight-variance", variance="diag" if self.of is None else self.of)


def as_source(model: nn.Module, data: Any) -> Source | None:
    """The batches of `data`, on the model's device and in its precision."""
    if data is None or isinstance(data, Source):
        return data
    first = next(model.parameters(), torch.empty(0))
    return Source(data, batch_size=BATCH_SIZE, must_count=False, device=first.device, dtype=first.dtype)
