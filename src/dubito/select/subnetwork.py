r"""Subnetworks: the single weights that matter most for the uncertainty of the outputs.

Daxberger et al. (2021), https://arxiv.org/abs/2010.14689, choose the weights with the largest marginal variance, which is
closest to the full posterior in *weight space*. In *function space* a subnetwork is the better the more predictive variance
it captures, $\operatorname{tr} J_S (H_{SS} + \lambda I)^{-1} J_S^\top$; for one weight on its own that is

$$\text{score}_d = \sigma_d^2 \sum_n \lVert \Pi J_{nd} \rVert^2, \qquad \sigma_d^2 = 1 / (h_d + \lambda)$$

the default here. See `dubito.select.scores` for $h_d$, $J$ and $\Pi$.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dubito import batches, likelihoods
from dubito.batches import Data, Source
from dubito.curvature import Engine, jacobian, seeds
from dubito.errors import InputError
from dubito.likelihoods import Gaussian, Likelihood
from dubito.randomness import default_generator
from dubito.select.budgets import Budget, candidates_of, make_budget
from dubito.select.greedy import Rows, greedy
from dubito.select.scores import (
    MOST_COLUMNS,
    Scores,
    context_tapes,
    direction_seeds,
    measure,
    tapes,
)
from dubito.select.weights import largest_magnitude, random
from dubito.selection import Selection, SelectionRule
from dubito.settings import setting

if TYPE_CHECKING:
    from dubito.posterior import Posterior
    from dubito.recipe import Recipe
    from dubito.select.report import SubnetworkReport

RULES = ("output-variance", "sampled", "greedy", "weight-variance", "magnitude", "random")
LOOK_AT_OUTPUTS = ("output-variance", "sampled", "greedy")
# Candidates among which the greedy rule searches, those with the largest scores.
PREFILTER = 10_000


class SelectionWarning(UserWarning):
    """Chosen weights cannot change an output."""


@dataclass(frozen=True)
class Ranking:
    """Candidates in the order in which a rule prefers them.

    Args:
        candidates: What there was to choose from.
        order: Flat positions among them, the best first.
    """

    candidates: Selection
    order: Tensor

    @property
    def selection(self) -> Selection:
        """The weights that are ranked."""
        return self.first(len(self.order))

    def first(self, count: int) -> Selection:
        """The first few."""
        chosen = torch.zeros(self.candidates.num_weights, dtype=torch.bool)
        chosen[self.order[:count]] = True
        parts = {n: self.candidates.positions(n)[chosen[span]] for n, span in self.candidates.slices.items()}
        return Selection(self.candidates.shapes, parts)


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
        samples: Random output directions per example in the place of all, for networks with very many outputs.
        prefilter: How many candidates, those of the largest scores, the greedy rule looks at.

    >>> subnetwork(1000, rule="greedy")
    select.subnetwork(1000, rule='greedy')
    """

    setting_name = "select.subnetwork"
    size: float
    rule: Literal["output-variance", "sampled", "greedy", "weight-variance", "magnitude", "random"] = "output-variance"
    context: Any = None
    candidates: str | type[nn.Module] | tuple[str | type[nn.Module], ...] | SelectionRule | None = None
    per_layer: Literal["proportional"] | Mapping[str, float] | None = None
    variance: str | Recipe | Posterior = "diag"
    samples: int | None = None
    prefilter: int = PREFILTER

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InputError(f"There is no rule {self.rule!r}; choose one of {', '.join(RULES)}.")
        if self.context is not None:
            if self.rule not in LOOK_AT_OUTPUTS:
                raise InputError(f"rule={self.rule!r} looks at no inputs: drop `context`.")
            object.__setattr__(self, "context", batches.as_tensors(self.context))
        if isinstance(self.variance, str) and self.variance not in ("diag", "kron"):
            raise InputError(f"variance={self.variance!r} must be 'diag', 'kron', a recipe or a posterior.")
        if isinstance(self.per_layer, str) and self.per_layer != "proportional":
            raise InputError(f"per_layer={self.per_layer!r} must be 'proportional' or a dict from names to sizes.")
        if self.samples is not None and (self.samples < 1 or self.rule == "greedy"):
            raise InputError(f"samples={self.samples} must be at least 1, and not for the greedy rule, which is exact.")

    def resolve(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | str | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Selection:
        """Choose."""
        return self.rank(model, data, likelihood, prior_precision, generator).selection

    def rank(
        self,
        model: nn.Module,
        data: Data | Source | None = None,
        likelihood: Likelihood | str | None = None,
        prior_precision: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Ranking:
        """Choose, and say in which order."""
        generator = default_generator(generator)
        known = likelihoods.resolve(likelihood or "categorical")
        source = as_source(model, data)
        candidates = candidates_of(self.candidates, model, source, known, prior_precision, generator)
        budget = make_budget(candidates, self.size, self.per_layer)
        if self.rule in ("magnitude", "random"):
            rule = (largest_magnitude if self.rule == "magnitude" else random)(self.size)
            return Ranking(candidates, budget.best(rule.scores(candidates, model, generator).cpu()))
        if source is None and self.rule == "weight-variance" and hasattr(self.variance, "marginals"):
            return Ranking(candidates, budget.best(candidates.ravel(self.variance.marginals()[1]).cpu()))
        if source is None:
            raise InputError(f"select.subnetwork(rule={self.rule!r}) needs data to decide: pass `data`.")
        return _Chooser(self, model, source, known, prior_precision, generator).choose(candidates, budget)

    def report(self, model: nn.Module, data: Data, **options: Any) -> SubnetworkReport:
        """Say how much of the full posterior this subnetwork keeps; see `dubito.select.report.report`."""
        from dubito.select.report import report

        return report(self, model, data, **options)


@setting
class largest_variance(SelectionRule):
    """The weights with the largest posterior variance: the smallest Wasserstein distance to the full posterior.

    This is the rule of Daxberger et al. (2021), https://arxiv.org/abs/2010.14689. On networks with dead units and constant
    inputs it prefers weights that cannot change an output, and warns; `select.subnetwork` looks at the outputs.

    Args:
        size: A number of weights, or a fraction below 1.
        of: Whose variances: a recipe that is fitted to the data first, or a posterior; by default
            ``Laplace(structure="diag")`` with the prior precision at hand.
    """

    setting_name = "select.largest_variance"
    size: float
    of: Recipe | Posterior | None = None

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Select the largest variances among all trainable weights."""
        return self.as_subnetwork().resolve(model, *args, **kwargs)

    def as_subnetwork(self) -> subnetwork:
        """The same rule as one of `select.subnetwork`."""
        return subnetwork(self.size, rule="weight-variance", variance="diag" if self.of is None else self.of)

    def report(self, model: nn.Module, data: Data, **options: Any) -> SubnetworkReport:
        """Say how much of the full posterior this subnetwork keeps; see `dubito.select.report.report`."""
        return self.as_subnetwork().report(model, data, **options)


class _Chooser:
    """The rules that look at data."""

    def __init__(
        self,
        rule: subnetwork,
        model: nn.Module,
        source: Source,
        likelihood: Likelihood,
        prior_precision: float,
        generator: torch.Generator,
    ) -> None:
        self.rule, self.model, self.source, self.likelihood = rule, model, source, likelihood
        self.prior, self.generator = prior_precision, generator

    def choose(self, candidates: Selection, budget: Budget) -> Ranking:
        """Rank the candidates."""
        rule = self.rule
        measured = measure(
            self.model, candidates.names, self.source, self.likelihood,
            slopes=rule.rule != "weight-variance", context=rule.context, samples=rule.samples,
            generator=self.generator,
        ).of(candidates)  # fmt: skip
        variance = self._variance(measured)
        if rule.rule == "weight-variance":
            order = budget.best(variance)
            self._warn_of_dead(measured.curvature[order] == 0, budget)
            return Ranking(candidates, order)
        scores = measured.slopes * variance
        if not bool((scores > 0).any()):
            raise InputError(
                "No candidate can change an output on these inputs (dead units, or constant inputs): choose other "
                "candidates, or look at the network."
            )
        if rule.rule == "greedy":
            order = self._greedy(measured, scores, budget)
        elif rule.rule == "sampled":
            order = budget.best(scores.log() + _gumbel(len(scores), self.generator))
        else:
            order = budget.best(scores)
        self._warn_of_dead(scores[order] == 0, budget)
        return Ranking(candidates, order)

    def _variance(self, measured: Scores) -> Tensor:
        of = self.rule.variance
        if isinstance(of, str) and of == "diag":
            return measured.variance(self.prior)
        if isinstance(of, str):
            from dubito.laplace import Laplace

            of = Laplace(structure="kron", prior_precision=self.prior)
        if not hasattr(of, "marginals"):
            if not hasattr(of, "fit"):
                raise InputError("The posterior of this rule was not saved with it: give it one again.")
            of = of.fit(
                self.model, _Replayed(self.source), likelihood=self.likelihood,
                num_data=self.source.num_data, generator=self.generator, progress=False,
            )  # fmt: skip
        return measured.weights.ravel(of.marginals()[1]).double().cpu()

    def _greedy(self, measured: Scores, scores: Tensor, budget: Budget) -> Tensor:
        """Search among the candidates with the largest scores."""
        near = budget.widened(max(budget.count, min(len(scores), self.rule.prefilter))).best(scores)
        few = Ranking(measured.weights, near).selection
        near = near.sort().values  # as the selection has them
        engine, likelihood = Engine(self.model, few.names), measured.likelihood
        unit, scale = likelihood, 1.0
        if isinstance(likelihood, Gaussian):
            unit, scale = Gaussian(noise=1.0), 1 / float(likelihood.noise) ** 2

        def curvature() -> Iterator[Tensor]:
            for tape, targets in tapes(engine, self.source, unit, few.num_weights):
                for columns in seeds.columns("ggn", unit, tape.outputs.detach(), targets, most=MOST_COLUMNS):
                    yield jacobian(tape.pull(columns), few).flatten(0, 1)

        def slopes() -> Iterator[Tensor]:
            context = self.rule.context
            placed = None if context is None else self.source.place(context)
            looked = tapes(engine, self.source, unit, few.num_weights)
            if placed is not None:
                looked = ((tape, None) for tape in context_tapes(engine, placed, few.num_weights))
            for tape, targets in looked:
                for columns in direction_seeds(unit, tape.outputs.detach(), targets).split(MOST_COLUMNS):
                    yield jacobian(tape.pull(columns), few).flatten(0, 1)

        chosen = greedy(
            Rows(curvature, shared=True, scale=scale), Rows(slopes, shared=self.rule.context is None),
            measured.curvature[near], measured.slopes[near], self.prior, budget.of(near),
        )  # fmt: skip
        return near[chosen]

    def _warn_of_dead(self, dead: Tensor, budget: Budget) -> None:
        if bool(dead.any()) and len(budget.group) > budget.count:
            warnings.warn(
                f"{int(dead.sum()):,} of the {len(dead):,} chosen weights cannot change an output (dead units, or "
                "constant inputs): their uncertainty is lost on every prediction.",
                SelectionWarning, stacklevel=5,
            )  # fmt: skip


class _Replayed:
    """The data of a source, for a recipe that is fitted on the way."""

    def __init__(self, source: Source) -> None:
        self.source = copy.copy(source)
        self.source.shard = False  # the inner fit shares the rows out itself

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch.inputs, batch.targets) for batch in self.source.replay())


def as_source(model: nn.Module, data: Any) -> Source | None:
    if data is None or isinstance(data, Source):
        return data
    first = next(model.parameters(), torch.empty(0))
    return Source(data, must_count=False, device=first.device, dtype=first.dtype)


def _gumbel(size: int, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise: the largest of log-scores plus this are a draw without replacement."""
    uniform = torch.rand(size, generator=generator, dtype=torch.float64, device=generator.device).cpu()
    return -(-uniform.clamp_min(1e-300).log()).log()
