"""Set the prior precision and the noise of a Laplace posterior: given, by the evidence, or by validation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core import distributed
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.curvature import links
from dubito.curvature.evidence import as_precision, maximize
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    from dubito.methods.laplace.recipe import Laplace

# The prior precisions that are tried on validation data.
GRID = torch.logspace(-4, 6, 41, dtype=torch.float64)


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


def tune(posterior: LaplacePosterior, recipe: Laplace, validation: Source | None) -> LaplacePosterior:
    """Return the posterior with its final prior precision and noise."""
    prior, noise = given_precision(recipe, posterior.selection), posterior.noise
    prior = prior if prior is None else prior.to(posterior.device)
    noise_is_free = isinstance(posterior.likelihood, Gaussian) and isinstance(posterior.likelihood.noise, str)
    if noise_is_free:
        noise = posterior.fit.residual_noise
    chosen_by = recipe.prior_precision
    if chosen_by == "auto":
        chosen_by = "validation" if validation is not None and recipe.prior_groups == "all" else "evidence"
    if noise_is_free or chosen_by == "evidence":
        groups = recipe.prior_groups
        prior, noise = maximize(posterior.evidence, posterior.selection, groups, noise, noise_is_free, prior)
    likelihood = posterior.likelihood.replace(noise=float(noise)) if noise_is_free else posterior.likelihood
    if chosen_by == "validation":
        assert validation is not None
        prior = _best_on_validation(posterior.with_settings(GRID[0], likelihood), validation)
    assert prior is not None
    return posterior.with_settings(prior, likelihood)


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


@torch.no_grad()
def _best_on_validation(posterior: LaplacePosterior, validation: Source) -> Tensor:
    """Return the precision with the best validation likelihood; each Jacobian is computed once for the whole grid."""
    likelihood = posterior.likelihood
    covariances = posterior.matrix.covariances(GRID, posterior.evidence.scale(posterior.noise))
    centred = links.has_null_direction(likelihood)
    total = torch.zeros(len(GRID), dtype=torch.float64)
    for batch in validation.replay():
        if batch.num_rows:
            outputs, variances = posterior.linearized.variances(batch.inputs, covariances, centred=centred)
            scores = [_log_prob(likelihood, outputs, variance, batch.targets).double().sum() for variance in variances]
            total += torch.stack(scores).cpu()
    distributed.sum_([total])
    if not bool(total.isfinite().all()):
        raise InputError("The validation likelihood is not finite: check the validation data for extreme inputs.")
    return GRID[int(total.argmax())].clone()


def _log_prob(likelihood: Likelihood, outputs: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Return the predictive log-probability of each target, by the probit link or in closed form."""
    if not links.is_classification(likelihood):
        return likelihood.predict_gaussian(outputs, likelihood.restore(variance, outputs)).log_prob(targets)
    logits = likelihood.restore(links.probit(likelihood.canonical(outputs), variance), outputs)
    return likelihood.log_prob(logits, targets)
