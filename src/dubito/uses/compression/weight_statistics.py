"""Read from a posterior what a pruning rule needs: the prunable weights, their marginals, precision and prior."""

from __future__ import annotations

import torch
from torch import nn

from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.fitting.posterior import Posterior
from dubito.networks.adapters import adapter_names, has_adapters
from dubito.uses.compression.rules import (
    GroupRelevance,
    LogAlpha,
    Magnitude,
    ModelReduction,
    PosteriorDamage,
    Rule,
    WeightStatistics,
)


def prunable(model: nn.Module) -> list[str]:
    """Return the names of the parameters that can be pruned: weight matrices, filters and embeddings.

    Biases and the gains of normalization layers are few, and each affects a whole unit, so they are removed only
    together with their unit. Of a network with adapters only these: the base belongs to other networks too.
    """
    own = set(adapter_names(model)) if has_adapters(model) else None
    names = [n for n, value in model.named_parameters() if value.ndim > 1 and (own is None or n in own)]
    if not names:
        raise InputError("The model has no parameter with two or more axes, so there is nothing to prune.")
    return names


def default_rule(posterior: Posterior) -> Rule:
    """Return the default rule for this posterior.

    `GroupRelevance()` for a group prior; `LogAlpha(3)` for a prior that adapts to each weight (log-uniform and ARD:
    under ARD, removing a weight never raises the evidence, because the prior of each weight was fitted to it);
    otherwise `ModelReduction()`.
    """
    if posterior.groups():
        return GroupRelevance()
    prior = getattr(posterior.recipe, "prior", None)
    return LogAlpha(3) if getattr(prior, "adapts", False) else ModelReduction()


def ranking_rule(posterior: Posterior) -> Rule:
    """Return the rule that ranks weights for a budget: by the damage to the posterior, with the update of what stays.

    A point has no curvature, so its weights are ranked by their magnitude. For an ensemble `statistics_of` says why
    there is no average network.
    """
    return PosteriorDamage(kind="obs", update=True) if has_weight_variances(posterior) else Magnitude()


def has_weight_variances(posterior: Posterior) -> bool:
    """Return whether all prunable parameters have marginal variances; an ensemble and a point have none."""
    try:
        _, variance = posterior.marginals()
    except UnsupportedError:
        return False
    return all(bool((variance[name] > 0).any()) for name in prunable(posterior.model))


def statistics_of(posterior: Posterior, rule: Rule) -> WeightStatistics:
    """Return what `rule` uses to score weights; raise if the posterior has no marginals."""
    names = prunable(posterior.model)
    try:
        mean, variance = posterior.marginals()
    except UnsupportedError as error:
        advice = "compress one of its members, or distill it first" if posterior.members else "distill it first"
        raise UnsupportedError(
            f"The {posterior.family} posterior has no marginals, so there is no average network to prune: {advice}."
        ) from error
    for name in names:
        if not bool(mean[name].isfinite().all() and variance[name].isfinite().all()):
            raise InputError(f"The posterior of '{name}' holds NaN or infinite values: fit it again.")
    chosen_mean, chosen_variance = ({name: part[name] for name in names} for part in (mean, variance))
    prior, reason = _prior(posterior, names)
    precision = precision_diagonal(posterior, names) if rule.needs_precision else {}
    return WeightStatistics(chosen_mean, chosen_variance, precision, prior, reason, posterior.groups())


def _prior(posterior: Posterior, names: list[str]) -> tuple[tuple[Params, Params] | None, str]:
    try:
        mean, variance = posterior.prior()
    except UnsupportedError as error:
        return None, str(error)
    return ({name: mean[name] for name in names}, {name: variance[name] for name in names}), ""


def precision_diagonal(posterior: Posterior, names: list[str]) -> Params:
    """Return the diagonal of the precision; a family without one gets 1/σ², as if its weights were independent."""
    try:
        diagonal = posterior.precision_diagonal()
    except UnsupportedError:
        _, variance = posterior.marginals()
        return {name: torch.where(variance[name] > 0, 1 / variance[name], 0.0) for name in names}
    return {name: diagonal[name] for name in names}


def data_precision(posterior: Posterior) -> Params:
    """Return the diagonal of the precision without the prior's, of the parameters whose weights are all random."""
    names = prunable(posterior.model)
    _, variance = posterior.marginals()
    names = [name for name in names if bool((variance[name] > 0).all())]
    total, (prior, _) = precision_diagonal(posterior, names), _prior(posterior, names)
    if prior is None:
        return total
    return {name: (value.double() - 1 / prior[1][name].double()).clamp_min(0.0) for name, value in total.items()}
