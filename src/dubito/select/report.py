r"""Measure how much of the full posterior a selection keeps, in weight and in function space, for every size.

In weight space the squared 2-Wasserstein distance between the posterior of all weights, $N(\hat w, \Sigma)$, and that
of a subnetwork with the rest at its trained value (Daxberger et al. 2021, https://arxiv.org/abs/2010.14689) is

$$W_2^2 = \operatorname{tr}\big(\Sigma + \Sigma_S - 2 (\Sigma_S^{1/2} \Sigma\, \Sigma_S^{1/2})^{1/2}\big)
  \approx \sum_{d \notin S} \sigma_d^2$$

the latter with independent weights. In function space a subnetwork is judged by the predictive variance it captures,
$\sum_x \operatorname{tr} V_S(x) / \sum_x \operatorname{tr} V(x)$ with $V_S = J_S P_S^{-1} J_S^\top$. With the weights
in the order in which the rule prefers them and $P = L L^\top$, the first $k$ rows of $L^{-1} J^\top$ hold what the
first $k$ weights capture, so one factorization gives the whole curve. A selection without an order has one point of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.beliefs import likelihoods
from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, distributed, limits
from dubito.core.batches import Data, Source
from dubito.core.constraints import Positive, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.randomness import default_generator
from dubito.curvature import jacobian
from dubito.networks.selection import Selection
from dubito.select.directions import direction_columns
from dubito.select.local_gaussian import LocalGaussian, fit_gaussian
from dubito.select.order import context_of, rank, resized
from dubito.select.ranking import Ranking
from dubito.select.rule import SelectionRule, given
from dubito.select.scores import MOST_COLUMNS, Scores, check_inputs, context_tapes, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The recommended size captures this share of the variance that the largest one captures.
ENOUGH = 0.95
NO_SWEEP = "There is no sweep over sizes and no recommended size, because"
NO_ORDER = (
    f"{NO_SWEEP} these weights come without an order in which to add them: only rules with a size, and unions with one "
    "of those, have one."
)
NOTHING_ADDED = (
    f"{NO_SWEEP} in this union the rule with a size adds no weight to the others: give it other candidates, or report "
    "on it alone."
)


@dataclass(frozen=True)
class SubnetworkReport:
    """What a selection keeps of the full posterior, for each size up to its own where there is an order of its weights.

    Args:
        rule: The rule that chose it.
        selection: The weights.
        smallest: The first size of the sweep: 1, in a union the number of weights that come before the ordered ones,
            or the number of all weights where there is no sweep.
        captured: The share of the predictive variance that the first `smallest`, … , S weights capture.
        exact: Whether that share is of the full network's exact variance, or of a Kronecker-factored estimate.
        distance: The squared Wasserstein distance with independent weights, at the same sizes.
        total_variance: The same distance for no weight at all: the sum of all variances.
        exact_distance: The distance with all correlations, where the network is small enough; else None.
        no_sweep: Why there is no sweep over sizes; None where there is one.
    """

    rule: SelectionRule
    selection: Selection
    smallest: int
    captured: Tensor
    exact: bool
    distance: Tensor
    total_variance: float
    exact_distance: float | None
    no_sweep: str | None = None

    @property
    def sizes(self) -> range:
        """The sizes of the sweep."""
        return range(self.smallest, self.selection.num_weights + 1)

    @property
    def recommended(self) -> int:
        """The smallest size that captures 95 % of the variance that the largest one captures."""
        self._require_sweep()
        return self.sizes[int((self.captured >= ENOUGH * self.captured[-1]).nonzero()[0])]

    def __str__(self) -> str:
        size, of = self.selection.num_weights, "the full network's" if self.exact else "a Kronecker-factored estimate"
        distance, everything = float(self.distance[-1]), self.total_variance
        lines = [
            f"Subnetwork of {size:,} of {self.selection.total:,} weights by {self.rule!r}",
            f"  captured predictive variance   {self.captured[-1]:.1%} of {of}",
            f"  Wasserstein distance²          {distance:.4g} of {everything:.4g} with independent weights",
        ]
        if self.exact_distance is not None:
            lines.append(f"  Wasserstein distance², exact   {self.exact_distance:.4g}")
        if self.no_sweep is not None:
            return "\n".join([*lines, f"  {self.no_sweep}"])
        lines.append(f"  recommended size               {self.recommended:,}: 95 % of what {size:,} capture")
        lines.append(f"  {'size':>10} {'captured':>10} {'distance²':>12}")
        for k in _some_sizes(self.smallest, size):
            at = k - self.smallest
            lines.append(f"  {k:>10,} {self.captured[at]:>10.1%} {self.distance[at]:>12.4g}")
        return "\n".join(lines)

    def _require_sweep(self) -> None:
        if self.no_sweep is not None:
            raise UnsupportedError(f"{self.rule!r}: {self.no_sweep}")

    def figure(self) -> Figure:
        """Draw what each size keeps: predictive variance, and variance of the weights."""
        self._require_sweep()
        from matplotlib.figure import Figure

        figure = Figure((4.8, 3.2), layout="constrained")
        axes = figure.subplots()
        kept = 1 - self.distance / self.total_variance
        axes.plot(self.sizes, self.captured.tolist(), color="#0072b2", label="predictive variance")
        axes.plot(self.sizes, kept.tolist(), color="#d55e00", linestyle="--", label="variance of the weights")
        enough = self.recommended
        axes.axvline(enough, color="#59636e", linewidth=1, linestyle=":", label=f"{enough:,} weights")
        axes.set(xlabel="Weights in the subnetwork", ylabel="Share of the full posterior's", xscale="log")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        return figure


@distributed.together()
def report(
    rule: SelectionRule,
    model: nn.Module,
    data: Data,
    *,
    likelihood: str | Likelihood = "categorical",
    prior_precision: float = 1.0,
    inputs: Any = None,
    largest: float | None = None,
    generator: torch.Generator | None = None,
) -> SubnetworkReport:
    """Compare a selection, and all smaller ones by the same rule, with the posterior over all weights.

    Args:
        rule: Any rule that chooses weights. In a union with one rule that has a size, such as
            ``select.last_layer() | select.subnetwork(1000)``, the sweep adds the weights of that one to the others.
        model: The trained network.
        data: The training data.
        likelihood: The likelihood.
        prior_precision: The prior precision λ, the same for all sizes.
        inputs: Where predictive variance is captured; by default at the rule's context, or else at the training data.
        largest: The largest size to look at, a number or a fraction, of a rule with a size or of the one part of a
            union that has one; by default its own.
        generator: The source of randomness.
    """
    if not rule.is_set:
        raise InputError(f"{rule!r} chooses directions, not weights: there is no subnetwork to report on.")
    check("prior_precision", Positive, prior_precision)
    with given(model, data, likelihood) as (private, source):
        rule = rule if largest is None else resized(rule, largest)
        return _report(rule, private, source, likelihoods.resolve(likelihood), prior_precision, inputs, generator)


def _report(
    rule: SelectionRule,
    model: nn.Module,
    source: Source,
    known: Likelihood,
    prior_precision: float,
    inputs: Any,
    generator: torch.Generator | None,
) -> SubnetworkReport:
    generator = default_generator(generator)
    ranking = rank(rule, model, source, known, prior_precision, generator)
    scores = measure(model, Selection.all_of(model).names, source, known, derivatives=False, generator=generator)
    selection, known = ranking.selection, scores.likelihood
    inputs = context_of(rule) if inputs is None else inputs
    inputs = source.place(batches.as_tensors(source.full().inputs if inputs is None else inputs))
    exact = 8 * scores.weights.num_weights**2 <= limits.current().exact_report

    part = fit_gaussian("full", model, selection, source, known, prior_precision)
    whole = fit_gaussian("full" if exact else "kron", model, scores.weights, source, known, prior_precision)
    check_inputs(part.engine.model, inputs, "these")
    total = whole.total_variance(inputs)
    if not total > 0:
        raise InputError("The network's outputs do not depend on any weight at these inputs: give others.")
    first = max(ranking.together, 1)
    no_sweep = None if ranking.is_ordered else NOTHING_ADDED if ranking.covered else NO_ORDER
    kept = _captured(part, ranking, inputs)[first - 1 :] / total
    distance = _distance(scores, ranking, prior_precision)[first - 1 :]
    everything = float(scores.variance(prior_precision).sum())
    from_all = _exact_distance(part, whole) if exact else None
    return SubnetworkReport(rule, selection, first, kept, exact, distance, everything, from_all, no_sweep)


def _captured(posterior: LocalGaussian, ranking: Ranking, inputs: Any) -> Tensor:
    """Return the predictive variance that the first 1, 2, … weights capture, summed over the inputs."""
    selection, size = posterior.selection, len(ranking.order)
    where = torch.searchsorted(ranking.order.sort().values, ranking.order)  # of the ranked weights in the selection
    factor = torch.linalg.cholesky(posterior.precision().cpu()[where][:, where])
    total = torch.zeros(size, dtype=torch.float64)
    for tape in context_tapes(posterior.engine, inputs, selection.num_weights):
        for columns in direction_columns(posterior.likelihood, tape.outputs.detach(), None, MOST_COLUMNS):
            with tape.lend() as memory:
                rows = jacobian(tape.pull(columns, memory), selection).flatten(0, 1)[:, where].double().cpu()
            total += torch.linalg.solve_triangular(factor, rows.mT, upper=False).square().sum(1)
    return total.cumsum(0)


def _distance(scores: Scores, ranking: Ranking, prior_precision: float) -> Tensor:
    """Return the sum of the variances of all weights but the first 1, 2, … ones."""
    variance = scores.variance(prior_precision)
    chosen = ranking.candidates.ravel(scores.weights.fill(variance))[ranking.order]
    return variance.sum() - chosen.cumsum(0)


def _exact_distance(part: LocalGaussian, whole: LocalGaussian) -> float:
    """Return the squared Wasserstein distance between the two Gaussians, the smaller one padded with zeros."""
    full, small = (_dense(each) for each in (whole, part))
    inside = whole.selection.ravel({n: m.double() for n, m in part.selection.masks().items()}).bool()
    values, vectors = torch.linalg.eigh(small)
    root = vectors * values.clamp_min(0).sqrt()
    cross = torch.linalg.eigvalsh(root.mT @ full[inside][:, inside] @ root).clamp_min(0).sqrt().sum()
    return float(full.trace() + small.trace() - 2 * cross)


def _dense(gaussian: LocalGaussian) -> Tensor:
    """Return the covariance as a matrix on the CPU, where the report is computed."""
    like = gaussian.covariance.variance()
    identity = torch.eye(len(like), dtype=torch.float64, device=like.device)
    return gaussian.covariance.solve(identity).cpu()


def _some_sizes(smallest: int, largest: int, count: int = 8) -> list[int]:
    """Return a few sizes from the smallest to the largest, evenly spaced on a logarithmic scale."""
    return sorted({round(smallest * (largest / smallest) ** (i / (count - 1))) for i in range(count)})
