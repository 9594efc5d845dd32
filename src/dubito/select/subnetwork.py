r"""Rules that choose a subnetwork: the single weights that add most to the uncertainty of the outputs.

Daxberger et al. (2021), https://arxiv.org/abs/2010.14689, choose the weights with the largest marginal variance, which
is closest to the full posterior in *weight space*. In *function space*, a subnetwork is better if it captures more
predictive variance, $\operatorname{tr} J_S (H_{SS} + \lambda I)^{-1} J_S^\top$. For a single weight this is the score

$$\text{score}_d = \sigma_d^2 \sum_n \lVert \Pi J_{nd} \rVert^2, \qquad \sigma_d^2 = 1 / (h_d + \lambda)$$

which is the default here. See `dubito.select.scores` for $h_d$, $J$ and $\Pi$.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

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
from dubito.select.choose import Chooser
from dubito.select.ranking import RankedRule, Ranking
from dubito.select.rule import SelectionRule

# The rules that use the derivatives of the outputs.
LOOK_AT_OUTPUTS = ("output-variance", "sampled", "greedy")
# The number of candidates, those with the largest scores, among which the greedy rule chooses.
PREFILTER = 10_000


@runtime_checkable
class _Marginals(Protocol):
    def marginals(self) -> tuple[Any, Any]: ...


HasMarginals = Annotated[_Marginals, "a posterior"]


@setting
class subnetwork(RankedRule):
    """The weights that add most to the uncertainty of the outputs.

    Args:
        size: A number of weights, or a fraction of the candidates below 1.
        rule: ``"output-variance"``: the largest scores; ``"sampled"``: drawn without replacement in proportion to the
            score, which spreads them over the network; ``"greedy"``: one after the other, each scored given those
            before it; ``"weight-variance"``: the largest variances, as in the paper; ``"magnitude"``; ``"random"``.
        context: Inputs without targets at which the uncertainty matters; scores are summed over them instead of the
            training inputs.
        candidates: ``"weights"`` for all but biases and normalization layers; a name, pattern or type of layers as in
            `select.layers`; or another rule. By default every trainable weight.
        per_layer: The most weights to choose from parameters by (a part of) their name, as a dict; or
            ``"proportional"`` for the same fraction of each parameter.
        variance: The source of σ²: ``"diag"`` (the diagonal Gauss-Newton matrix), ``"kron"`` (a Kronecker-factored
            one), a recipe, or a posterior.
        num_samples: The number of random output directions per example that replace all outputs, for networks with very
            many outputs.
        prefilter: The number of candidates, those with the largest scores, among which the greedy rule chooses.

    >>> subnetwork(1000, rule="greedy")
    select.subnetwork(1000, rule='greedy')
    """

    setting_name = "select.subnetwork"
    old_fields: ClassVar[Mapping[str, str]] = {"samples": "num_samples"}
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
                raise InputError(f"rule={self.rule!r} does not use inputs: drop `context`.")
            object.__setattr__(self, "context", batches.as_tensors(self.context))
        if self.num_samples is not None and self.rule == "greedy":
            raise InputError(f"rule='greedy' is exact and draws no samples: drop num_samples={self.num_samples!r}.")

    @distributed.together()
    def rank(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | str | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Ranking:
        """Choose and rank the weights; a smaller `size` gives the first of them."""
        check("prior_precision", Positive, prior_precision)  # scores are divided by it where the curvature is zero
        generator, known = default_generator(generator), likelihoods.resolve(likelihood or "categorical")
        assert data is None or isinstance(data, Source)  # `for_users` makes one
        candidates = candidates_of(self.candidates, model, data, known, prior_precision, generator)
        budget = make_budget(candidates, self.size, self.per_layer)
        if self.rule in ("magnitude", "random"):
            rule = (largest_magnitude if self.rule == "magnitude" else random)(self.size)
            return Ranking(candidates, budget.best(rule.scores(candidates, model, generator).cpu()))
        if data is not None:
            return Chooser(self, model, data, known, prior_precision, generator).choose(candidates, budget)
        of: Any = self.variance
        if self.rule == "weight-variance" and hasattr(of, "marginals"):
            return Ranking(candidates, budget.best(candidates.ravel(of.marginals()[1]).cpu()))
        raise InputError(f"select.subnetwork(rule={self.rule!r}) needs training data: pass `data`.")


@setting
class largest_variance(RankedRule):
    """The weights with the largest posterior variance, which minimize the Wasserstein distance to the full posterior.

    This is the rule of Daxberger et al. (2021), https://arxiv.org/abs/2010.14689. On networks with dead units or
    constant inputs it prefers weights that cannot change an output, and warns; use `select.subnetwork` there.

    Args:
        size: A number of weights, or a fraction below 1.
        of: The posterior whose variances are used, or a recipe that is fitted to the data first; by default
            ``Laplace(structure="diag")`` with the given prior precision.
    """

    setting_name = "select.largest_variance"
    of: Recipe | HasMarginals | None = None

    def rank(self, model: nn.Module, *args: Any, **kwargs: Any) -> Ranking:
        """Rank the largest variances among all trainable weights."""
        rule = subnetwork(self.size, rule="weight-variance", variance="diag" if self.of is None else self.of)
        return rule.rank(model, *args, **kwargs)


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
