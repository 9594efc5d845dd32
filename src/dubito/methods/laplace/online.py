r"""Update a Laplace posterior with new data: the old posterior is the prior.

$$\hat w' = \arg\min_w\; -\tfrac1T \log p(D' \mid w) + \tfrac12 (w - \hat w)^\top P\,(w - \hat w),
  \qquad P' = P + \tfrac1T H'$$

with the curvature $H'$ of the new data at $\hat w'$ (Ritter et al. 2018, https://arxiv.org/abs/1805.07810). For a
linear model with full structure this is exact Bayesian updating. The prior precision and the noise do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import distributed, params
from dubito.core.batches import Batch, Data, Source
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.curvature import matrices as linalg
from dubito.curvature.kronecker import reduce_factors, whole_factors
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP
from dubito.networks.twin import light_copy
from dubito.select import mask

# The largest number of Gauss-Newton steps; a linear model needs one.
MOST_STEPS = 20
MOST_HALVINGS = 10


@distributed.together()
def update(
    posterior: LaplacePosterior,
    data: Data,
    *,
    training: Training | None,
    generator: torch.Generator | None,
    progress: bool,
) -> LaplacePosterior:
    """Return the posterior after `data`.

    Without `training` the mean moves by Gauss-Newton steps, each halved until the objective decreases: one step is
    exact for linear models, and a few improve networks. With `training` the random weights are trained on the new data
    with the old posterior as a quadratic penalty, as a new task needs.
    """
    if posterior.recipe.structure in ("ekfac", "sampled"):
        raise UnsupportedError(
            f"A posterior with structure='{posterior.recipe.structure}' cannot be updated with new data: fit it with "
            "structure='kron', whose curvature of the old data is a sum."
        )
    if distributed.is_active():
        distributed.check_same(posterior.digest(), "posteriors")
    moved = light_copy(posterior.model)
    if training is None:
        params.load_(moved, _gauss_newton(posterior, data, generator))
    else:
        point = PenalizedTraining(posterior).fit(
            moved, data, likelihood=posterior.likelihood, training=training, generator=generator, progress=progress
        )
        moved = point.model
    fresh = _curvature_at(posterior, moved, data, generator, progress)
    merged = LaplacePosterior(
        moved, posterior.likelihood, posterior.recipe, posterior.num_data + fresh.num_data, posterior.selection,
        _add_sums(posterior, fresh), posterior.fit + fresh.fit, posterior.prior_precision,
    )  # fmt: skip
    merged.known_evidence = _chained_evidence(posterior, merged, fresh)
    return merged


def _curvature_at(
    posterior: LaplacePosterior, model: nn.Module, data: Data, generator: torch.Generator | None, progress: bool
) -> LaplacePosterior:
    """Return the curvature of the new data alone, over the same weights."""
    chosen = {name: value for name, value in posterior.selection.masks().items() if bool(value.any())}
    recipe = posterior.recipe.replace(
        weights=mask(chosen), prior_precision=1.0, prior_groups="all", prior_scaling="plain"
    )
    return recipe.fit(model, data, likelihood=posterior.likelihood, generator=generator, progress=progress)


def _gauss_newton(posterior: LaplacePosterior, data: Data, generator: torch.Generator | None) -> Params:
    """Minimize the penalized loss from the old mean, with the curvature at the old mean."""
    selection, scale = posterior.selection, posterior.scale
    source = Source(data, batch_size=256, device=posterior.device, dtype=posterior.dtype)
    new = _curvature_at(posterior, posterior.model, data, generator, progress=False)
    metric = _sum_matrices(posterior, new).covariance(posterior.prior_precision, scale)
    tolerance = 100 * torch.finfo(posterior.dtype).eps
    center = flat = selection.ravel(posterior.mean()).double()
    value, gradient = _objective(posterior, source, flat, center)
    for _ in range(MOST_STEPS):
        step = -metric.solve(gradient)
        if -float(step @ gradient) <= tolerance * max(abs(value), 1.0):
            break
        for _ in range(MOST_HALVINGS):
            at_trial, gradient_at_trial = _objective(posterior, source, flat + step, center)
            if at_trial <= value:
                break
            step = step / 2
        else:
            break
        flat, value, gradient = flat + step, at_trial, gradient_at_trial
    return selection.merge(posterior.mean(), flat.to(posterior.dtype))


def _objective(posterior: LaplacePosterior, source: Source, at: Tensor, center: Tensor) -> tuple[float, Tensor]:
    """Return the penalized loss ``−log p(D'|w)/T + ½ δᵀPδ`` at some random weights, and its gradient."""
    base, likelihood = posterior.mean(), posterior.likelihood
    flat = at.to(posterior.dtype, copy=True).requires_grad_()
    sums = at.new_zeros(1 + len(at))
    for batch in source.replay():
        if batch.num_rows:
            with torch.enable_grad():
                outputs = params.functional_call(posterior.model, posterior.selection.merge(base, flat), batch.inputs)
                loss = -likelihood.log_prob(outputs, batch.targets).double().sum() / posterior.recipe.temperature
            sums += torch.cat([loss.detach().reshape(1), torch.autograd.grad(loss, flat)[0].double()])
    distributed.sum_([sums])
    moved = at - center
    pull = posterior.precision_matmul(moved)
    return float(sums[0] + 0.5 * moved @ pull), sums[1:] + pull


@setting
class PenalizedTraining(Recipe):
    """Train the random weights of a Laplace posterior on new data, with that posterior as a quadratic penalty.

    Args:
        posterior: The posterior that is the prior.
    """

    setting_name = "laplace.Continue"
    posterior: Any

    def build(self, problem: Problem) -> Inference:
        """Return the training steps, which change the random weights only; their posterior is a point."""
        old: LaplacePosterior = self.posterior
        module = _Selected(problem.model, old)
        plain = negative_log_likelihood(problem)

        def loss(module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
            moved = module.flat - module.center  # type: ignore[operator]
            pull = old.precision_matmul(moved.detach().double()).to(moved)
            share = batch.num_rows / batch.size / problem.num_data
            surrogate = (moved * pull).sum() * share
            penalty = surrogate - 0.5 * surrogate.detach()  # has the value ½ δᵀPδ and the gradient Pδ
            return plain(module, batch, hyper, generator) / old.recipe.temperature + penalty

        descent = GradientDescent(problem, module, loss)

        def posterior(state: State) -> Posterior:
            weights = old.selection.merge(old.mean(), state["params"]["flat"].detach())
            model = params.load_(light_copy(problem.model), weights)
            return PointPosterior(model, problem.likelihood, MAP(), problem.num_data)

        return Inference(descent.init, descent.update, posterior, epochs=problem.training.epochs)


class _Selected(nn.Module):
    """A network whose only trainable parameter is the flat vector of the selected weights.

    It runs in evaluation mode: dropout is off, and normalization layers keep their running statistics.
    """

    def __init__(self, model: nn.Module, posterior: LaplacePosterior) -> None:
        super().__init__()
        self.selection = posterior.selection
        self.base = posterior.mean()
        self.register_buffer("center", self.selection.ravel(self.base))
        self.flat = nn.Parameter(self.selection.ravel(self.base).clone())
        self.network = [model]  # in a list, so that its own parameters are not registered here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with the weights of the vector."""
        model = self.network[0].eval()
        with params.swapped(model, self.selection.merge(self.base, self.flat)):
            return model(*args, **kwargs)


def _add_sums(old: LaplacePosterior, new: LaplacePosterior) -> dict[str, Any]:
    if old.recipe.structure == "low-rank":
        return {"matrix": _sum_matrices(old, new).state()}
    total = _whole_sums(old, new)
    return reduce_factors(total, old.recipe.factor_rank, old.model) if old.recipe.structure == "kron" else total


def _whole_sums(old: LaplacePosterior, new: LaplacePosterior) -> dict[str, Any]:
    """Return the sums of both; reduced Kronecker factors are written out, as only whole ones can be added."""
    if old.recipe.structure != "kron":
        return dict(_add_trees(old.sums, new.sums))
    both = ({name: whole_factors(part) for name, part in each.sums.items()} for each in (old, new))
    return dict(_add_trees(*both))


def _add_trees(a: Any, b: Any) -> Any:
    return {key: _add_trees(a[key], b[key]) for key in a} if isinstance(a, dict) else a + b


def _sum_matrices(old: LaplacePosterior, new: LaplacePosterior) -> linalg.Matrix:
    if isinstance(old.matrix, linalg.LowRank) and isinstance(new.matrix, linalg.LowRank):
        return linalg.low_rank.add(old.matrix, new.matrix, old.recipe.rank)
    return old.matrix_of(_whole_sums(old, new))


def _chained_evidence(old: LaplacePosterior, merged: LaplacePosterior, new: LaplacePosterior) -> float:
    r"""Return $\log p(D) + \log p(D' \mid D)$, each by the Laplace approximation; exact for linear models."""
    scale = old.scale
    moved = (merged.selection.ravel(merged.mean()) - old.selection.ravel(old.mean())).double()
    log_det = merged.matrix.log_det(old.prior_precision, scale) - old.matrix.log_det(old.prior_precision, scale)
    explained = new.fit.at(old.noise) / old.recipe.temperature
    return float(old.log_evidence() + explained - 0.5 * (log_det + moved @ old.precision_matmul(moved)))
