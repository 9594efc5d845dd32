r"""Set the prior precision and the noise of a Laplace posterior: given, by the evidence, or by log scores.

With log scores, the prior precision λ maximizes

$$\sum_n \log p(y_n \mid x_n, \lambda) - \frac{(\log \lambda - \log \lambda_0)^2}{2 s^2}$$

over validation data or, where there are none, over the training data. The second term is a prior on log λ. It decides
where few data cannot: on data that the network predicts without error, every narrower posterior scores better, up to
no posterior at all. Its centre $\lambda_0$ is the evidence's choice for a Gaussian likelihood. For others it is
$D / \|\hat w - \mu\|^2$, the inverse mean square of the weights: on small data that are fitted perfectly, the evidence
prefers a posterior that is far too wide.

Of outputs at many positions (pixels, tokens), a few positions of each example are scored. If more than 1,024 classes
each take a backward pass, nothing is scored: λ is $\lambda_0$. If fewer do, and weights are many, one λ per decade is
tried.

The noise of a Gaussian likelihood comes from residuals of validation data, or from leave-one-out residuals of the
training data (`dubito.curvature.leave_one_out`); without validation data, λ is the evidence's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Gaussian, Likelihood
from dubito.core import limits
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.curvature.evidence import HIGH, LOW, as_precision, maximize
from dubito.curvature.leave_one_out import LEFT_OUT_WEIGHT, MOST_ROWS, LeaveOneOut, left_out_variance
from dubito.curvature.linearized import MOST_EXACT
from dubito.curvature.optimality import newton_gain
from dubito.fitting.inference import Problem
from dubito.methods.laplace.findings import Tuning
from dubito.methods.laplace.grid_scores import FreeNoiseScores, GridScores, PositionScores
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.recipe import Laplace
from dubito.networks.selection import Selection

# The prior precisions (or their ratios to the noise) that are tried.
GRID = torch.logspace(-6, 8, 43, dtype=torch.float64)
# Of the grid for millions of weights and many outputs, every third: one per decade.
COARSE = 3
# The standard deviation of the prior on the logarithm of the precision.
PRIOR_SCALE = 2.0
# With many outputs per example: the log-probabilities that are scored in all, and the columns that are pulled back if
# each takes a backward pass.
MOST_SCORED, MOST_PULLED = 2**23, 512


class Choice(NamedTuple):
    """The prior precision and the likelihood with its noise, and how they were chosen."""

    prior: Tensor
    likelihood: Likelihood
    tuning: Tuning


def check_prior(recipe: Laplace, selection: Selection) -> None:
    """Raise an error if the prior does not fit the selected weights, before any computation."""
    given_precision(recipe, selection)
    center = torch.as_tensor(recipe.prior_mean)
    if center.ndim and center.shape != (selection.num_weights,):
        raise InputError(
            f"`prior_mean` must be a number or have one value for each of the {selection.num_weights:,} random "
            f"weights, got shape {tuple(center.shape)}."
        )
    if not bool(center.isfinite().all()):
        raise InputError("`prior_mean` must not hold NaN or infinite values.")


def tune(posterior: LaplacePosterior, recipe: Laplace, problem: Problem) -> LaplacePosterior:
    """Return the posterior with its final prior precision and noise."""
    by = _decided_by(recipe, problem.validation)
    if by in ("validation", "training"):
        choice = _by_scores(posterior, recipe, problem, by)
    else:
        choice = _by_evidence(posterior, recipe.prior_groups, by, given_precision(recipe, posterior.selection))
    found = posterior.with_settings(choice.prior, choice.likelihood, choice.tuning)
    if by != "given":  # a given precision may be meant for any weights
        found.remaining_gain = newton_gain(
            posterior.model, choice.likelihood, problem.source, posterior.selection, posterior.matrix
        )
    return found


def _decided_by(recipe: Laplace, validation: Source | None) -> str:
    """Return what decides about the prior precision."""
    if not isinstance(recipe.prior_precision, str):
        return "given"
    if recipe.prior_precision != "auto":
        return recipe.prior_precision
    if recipe.prior_groups != "all":
        return "evidence"
    return "training" if validation is None else "validation"


def _by_evidence(posterior: LaplacePosterior, groups: str, by: str, prior: Tensor | None = None) -> Choice:
    """Return the prior precision, unless it is given, and the noise, unless it is fixed, of the highest evidence."""
    noise, free = posterior.noise, _has_free_noise(posterior.likelihood)
    at_edge = False
    if prior is None or free:
        start, given = posterior.fit.residual_noise if free else noise, prior
        prior = prior if prior is None else prior.to(posterior.device)
        prior, noise = maximize(posterior.evidence, posterior.selection, groups, start, free, prior)
        at_edge = given is None and prior.ndim == 0 and not LOW + 0.1 < float(prior.log()) < HIGH - 0.1
    likelihood = posterior.likelihood.replace(noise=float(noise)) if free else posterior.likelihood
    return Choice(prior, likelihood, Tuning(by, at_edge, posterior.num_data))


def _by_scores(posterior: LaplacePosterior, recipe: Laplace, problem: Problem, by: str) -> Choice:
    """Return the settings of the highest regularized log score on validation data, or on the training data."""
    likelihood, is_gaussian = posterior.likelihood, isinstance(posterior.likelihood, Gaussian)
    found = _by_evidence(posterior, "all", by) if is_gaussian else None
    if found is not None and likelihood.noise == "evidence":  # type: ignore[attr-defined]
        posterior = posterior.with_settings(found.prior, found.likelihood)
    free = _has_free_noise(posterior.likelihood)
    left_out = None
    if is_gaussian and (free or by == "training"):
        left_out = LeaveOneOut(posterior.model, problem.source, whole=free and by == "training")
    centre = _inverse_mean_square(posterior) if found is None else float(found.prior)
    if free:
        assert found is not None
        assert left_out is not None
        centre *= found.likelihood.noise**2 * recipe.temperature  # type: ignore[attr-defined]
        assumed = 1.0 if by == "training" else left_out_variance(left_out, problem.source)
        scores: GridScores = FreeNoiseScores(posterior, GRID, assumed, 0.0 if by == "training" else LEFT_OUT_WEIGHT)
    elif (judged := _scores(posterior, problem, by)) is not None:
        scores = judged
    else:
        return Choice(torch.tensor(centre, dtype=torch.float64), posterior.likelihood, Tuning("weights"))
    _add_all(scores, problem, by, left_out)
    # The residuals of training data favour no posterior at all: the evidence chooses, and only the noise is judged.
    by_centre = is_gaussian and by == "training"
    at, at_edge, noise = _best(scores.grid, *scores.result(), centre, weight=0.0 if by_centre else 1.0)
    count = int(scores.num_rows)  # of all processes
    if noise is None:
        return Choice(at, posterior.likelihood, Tuning(by, at_edge, count))
    return Choice(
        at / (noise.square() * recipe.temperature),
        likelihood.replace(noise=float(noise)), Tuning(by, at_edge, count),
    )  # fmt: skip


def _scores(posterior: LaplacePosterior, problem: Problem, by: str) -> GridScores | None:
    """Return the scores of all outputs, or of some positions if there are many; None if one position takes too long."""
    linearized, inputs = posterior.linearized, problem.source.first().inputs
    first = linearized.first(inputs)
    one = first.outputs.detach()
    if one.numel() <= MOST_EXACT or not isinstance(posterior.likelihood, Categorical):
        return GridScores(posterior, GRID)
    judged = problem.validation if by == "validation" else problem.source
    assert judged is not None
    width, slow = posterior.likelihood.canonical(one).shape[-1], linearized.is_slow(first)
    if slow and width > MOST_EXACT:
        return None
    most = max(16, MOST_PULLED // width) if slow else max(200, MOST_SCORED // width)
    most = min(most, MOST_ROWS)
    # variances for all λ that are computed again for each backward pass would take longer than the pass
    is_kept = 4 * len(GRID) * posterior.selection.num_weights <= limits.current().kept_weights
    grid = GRID if is_kept or not slow else GRID[::COARSE]
    return PositionScores(posterior, grid, -(-most // min(judged.num_data, most)), most)


@torch.no_grad()
def _add_all(scores: GridScores, problem: Problem, by: str, left_out: LeaveOneOut | None) -> None:
    """Add all rows on which the precision is judged."""
    if by == "validation":
        assert problem.validation is not None
        few = isinstance(scores, PositionScores)
        for batch in problem.validation.spread(scores.most_rows) if few else problem.validation.replay():
            if batch.num_rows:
                scores.add(batch)
        return
    for batch in problem.source.spread(scores.most_rows):
        scores.add(batch, 1.0 if left_out is None else left_out.factors(batch.inputs))


def _best(
    grid: Tensor, scores: Tensor, noises: Tensor | None, centre: float, weight: float
) -> tuple[Tensor, bool, Tensor | None]:
    """Return the best point of the grid, refined by a parabola, whether it is at an edge, and the noise there."""
    logs = grid.log()
    centre = min(max(math.log(centre), float(logs[0])), float(logs[-1]))
    total = weight * scores - (logs - centre).square() / (2 * PRIOR_SCALE**2)
    index = int(total.argmax())
    if index in (0, len(grid) - 1):
        return grid[index].clone(), True, None if noises is None else noises[index]
    left, middle, right = total[index - 1 : index + 2].tolist()
    bend = left - 2 * middle + right
    shift = 0.0 if bend >= 0 else 0.5 * (left - right) / bend
    at = (logs[index] + shift * (logs[1] - logs[0])).exp()
    if noises is None:
        return at, False, None
    other = index + (1 if shift > 0 else -1)
    return at, False, (noises[index].log().lerp(noises[other].log(), abs(shift))).exp()


def _inverse_mean_square(posterior: LaplacePosterior) -> float:
    """Return the inverse of the mean squared distance of the weights from their prior mean."""
    return 1 / max(float(posterior.evidence.deviation.mean()), 1e-30)


def _has_free_noise(likelihood: Likelihood) -> bool:
    return isinstance(likelihood, Gaussian) and isinstance(likelihood.noise, str)


def given_precision(recipe: Laplace, selection: Selection) -> Tensor | None:
    """Return the given precision, a number or one value per random weight; None if it is tuned."""
    setting = recipe.prior_precision
    if isinstance(setting, str):
        return None
    given = _by_name(setting, selection) if isinstance(setting, Mapping) else setting
    values = as_precision(given, selection, recipe.structure)
    share = selection.num_weights / selection.total
    return values * share if recipe.prior_scaling == "S/D" else values


def _by_name(setting: Mapping[str, float], selection: Selection) -> Tensor:
    values, used = torch.zeros(selection.num_weights, dtype=torch.float64), set()
    for name, span in selection.slices.items():
        fitting = [key for key in setting if f".{key}." in f".{name}."]
        if not fitting:
            raise InputError(f"prior_precision has no entry for '{name}': add its name, or a part of it.")
        key = max(fitting, key=len)
        values[span] = float(setting[key])
        used.add(key)
    unused = [key for key in setting if key not in used]
    if unused:
        raise InputError(f"prior_precision names '{unused[0]}', which matches no random weight: drop this entry.")
    return values
