"""From a posterior to what a pruning rule looks at: which weights may go, their marginals, precision and prior."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import ARD, LogUniform
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.fitting.posterior import Posterior
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.uses.compression.rules import Belief, GroupRelevance, LogAlpha, ModelReduction, PosteriorDamage, Rule

# Conjugate gradients stop here, relative to the right-hand side.
TOLERANCE, MOST_STEPS = 1e-6, 200


def prunable(model: nn.Module) -> list[str]:
    """Return the names of the parameters that pruning may touch: weight matrices, filters and embeddings.

    Biases, and the gains of normalization layers, are few and each shifts a whole unit: they stay, and go only together
    with their unit.
    """
    names = [name for name, value in model.named_parameters() if value.ndim > 1]
    if not names:
        raise InputError("The model has no weight matrix: there is nothing to prune.")
    return names


def default_rule(posterior: Posterior) -> Rule:
    """Return the posterior's own rule.

    `GroupRelevance()` under a prior of groups; `LogAlpha(3)` where the prior adapts to every weight by itself
    (log-uniform, ARD: under the latter the evidence never gains by removing a weight, because the prior of each was
    fitted to it); else `ModelReduction()`.
    """
    if hasattr(posterior, "groups"):
        return GroupRelevance()
    prior = getattr(posterior.recipe, "prior", None)
    return LogAlpha(3) if isinstance(prior, LogUniform | ARD) else ModelReduction()


def belief_of(posterior: Posterior, rule: Rule) -> Belief:
    """Return what `rule` may look at; a posterior without marginals raises one clear sentence."""
    names = prunable(posterior.model)
    try:
        mean, variance = posterior.marginals()
    except UnsupportedError as error:
        advice = (
            "compress one of its members, or distill it first" if hasattr(posterior, "members") else "distill it first"
        )
        raise UnsupportedError(
            f"The {posterior.family} posterior has no marginals, so there is no average network to prune: {advice}."
        ) from error
    for name in names:
        if not bool(mean[name].isfinite().all() and variance[name].isfinite().all()):
            raise InputError(f"The posterior of '{name}' holds NaN or infinite values: fit it again.")
    chosen_mean, chosen_variance = ({name: part[name] for name in names} for part in (mean, variance))
    prior, reason = _prior(posterior, names)
    precision = precision_of(posterior, names) if isinstance(rule, PosteriorDamage) else {}
    groups = posterior.groups() if hasattr(posterior, "groups") else ()
    return Belief(chosen_mean, chosen_variance, precision, prior, reason, groups)


def _prior(posterior: Posterior, names: list[str]) -> tuple[tuple[Params, Params] | None, str]:
    try:
        mean, variance = posterior.prior()
    except UnsupportedError as error:
        return None, str(error)
    return ({name: mean[name] for name in names}, {name: variance[name] for name in names}), ""


def precision_of(posterior: Posterior, names: list[str]) -> Params:
    """Return the diagonal of the precision, 0 where a weight is not random.

    It is exact for Laplace of any structure; for other families it is 1/σ², as if weights were independent.
    """
    if isinstance(posterior, LaplacePosterior):
        diagonal = posterior.precision_diagonal()
        return {name: diagonal[name] for name in names}
    _, variance = posterior.marginals()
    return {name: torch.where(variance[name] > 0, 1 / variance[name], 0.0) for name in names}


def adapted(posterior: Posterior, keep: dict[str, Tensor]) -> Params:
    r"""Return the mean of the weights that stay, given that the others are zero.

    For the Gaussian $\mathcal N(\mu, P^{-1})$ this solves $P_{SS}\,w_S = (P\mu)_S$ by conjugate gradients: the weight
    update of optimal brain surgeon for all removed weights at once. Only Laplace posteriors have a P that joins
    weights; for others the mean stays.
    """
    if not isinstance(posterior, LaplacePosterior):
        return posterior.mean()
    selection, mean = posterior.selection, posterior.mean()
    stays = selection.ravel({n: keep.get(n, torch.ones_like(v, dtype=torch.bool)) for n, v in mean.items()}).double()
    center = selection.ravel(mean).double()

    def matmul(vector: Tensor) -> Tensor:
        return stays * posterior.precision_matmul(stays * vector)

    def precondition(vector: Tensor) -> Tensor:
        return stays * posterior.covariance.solve(stays * vector)

    solution = conjugate_gradients(matmul, precondition, stays * posterior.precision_matmul(center), stays * center)
    return selection.merge(mean, solution.to(posterior.dtype))


def conjugate_gradients(
    matmul: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], right: Tensor, start: Tensor
) -> Tensor:
    """Solve ``A x = right`` for a positive semi-definite A and a `precondition` near its inverse."""
    solution = start
    residual = right - matmul(solution)
    direction = precondition(residual)
    inner, goal = residual.dot(direction), TOLERANCE * right.norm()
    for _ in range(MOST_STEPS):
        if residual.norm() <= goal:
            break
        product = matmul(direction)
        step = inner / direction.dot(product)
        solution, residual = solution + step * direction, residual - step * product
        turned = precondition(residual)
        inner, before = residual.dot(turned), inner
        direction = turned + inner / before * direction
    return solution
