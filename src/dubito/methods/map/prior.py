"""Train to the most probable weights under any prior, including one that is learned with the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import FunctionSpace, Prior
from dubito.beliefs.priors.base import require_real, unchecked
from dubito.core import params
from dubito.core.batches import Batch
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
from dubito.fitting.inference import Problem, State

# Factors of the learning rate for the fields of a mixture, which all weights share: smaller for the means, larger
# for the logarithms of scales and proportions (Ullrich et al. 2017).
RATES = {"means": 0.2, "log_scales": 6.0, "logits": 6.0}
LEARNED = "prior_"


class PriorDescent(GradientDescent):
    r"""Gradient steps on $-\frac1B \sum_n \log p(y_n \mid x_n, w) - \frac\tau N \log p(w)$.

    Args:
        problem: Data, likelihood and model.
        prior: The prior of every trained matrix; all of them share its learned fields.
        weight: τ.
        epochs: The number of epochs of the learning rate schedule.
    """

    def __init__(self, problem: Problem, prior: Prior, weight: float, epochs: int) -> None:
        self.weight = weight
        matrices = {n: v for n, v in problem.model.named_parameters() if v.ndim > 1 and v.requires_grad}
        if not matrices:
            raise InputError("`prior` needs a trainable matrix, and the model has none: use prior_precision.")
        if prior.learned_fields:
            together = torch.cat([value.detach().flatten() for value in matrices.values()])
            self.priors = dict.fromkeys(matrices, prior.resolve("", together))
        else:
            self.priors = {name: prior.resolve(name, value.detach()) for name, value in matrices.items()}
        first = next(iter(self.priors.values()))
        self.fields = first.learned_fields
        learned = {f"{LEARNED}{name}": getattr(first, name) for name in self.fields}
        self.explain = negative_log_likelihood(problem)
        super().__init__(
            problem, problem.model, self._loss, hyper={**problem.likelihood.hyper(), **learned},
            rates={f"hyper.{LEARNED}{name}": RATES.get(name, 1.0) for name in self.fields}, epochs=epochs,
        )  # fmt: skip

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        values: Params = dict(module.named_parameters())
        share = self.weight * batch.num_rows / batch.size / self.problem.num_data
        return self.explain(module, batch, hyper, generator) - share * self._log_prior(values, hyper)

    def _log_prior(self, values: Params, hyper: Params) -> Tensor:
        if not self.fields:
            return torch.stack([prior.log_prob(values[name]).sum() for name, prior in self.priors.items()]).sum()
        prior: Any = self._learned(hyper)
        together = torch.cat([values[name].flatten() for name in self.priors])
        return prior.log_prob(together).sum() - prior.penalty()

    def prior_at(self, state: State) -> Prior | None:
        """Return the prior with its learned fields, or None if it has none."""
        return self._learned({n: v.detach().clone() for n, v in state["hyper"].items()}) if self.fields else None

    def _learned(self, hyper: Params) -> Prior:
        prior = next(iter(self.priors.values()))
        return unchecked(prior, **{name: hyper[f"{LEARNED}{name}"] for name in self.fields})


def check_map_prior(prior: Prior | FunctionSpace | None, prior_precision: float) -> None:
    """Raise an error unless the weights have a most probable value under this prior."""
    if prior is None:
        return
    if prior_precision:
        raise InputError("Give either prior or prior_precision, not both: they describe the same prior.")
    if isinstance(prior, FunctionSpace):
        return
    require_real(prior)
    if not prior.proper:
        raise InputError(
            f"{prior!r} is improper: it is infinite at 0, so no weights are most probable. Use priors.Normal()."
        )


def prior_moments(prior: Prior | FunctionSpace, model: nn.Module) -> tuple[Params, Params]:
    """Return the mean and the variance of the prior of each weight; the flat prior of vectors has no variance."""
    if isinstance(prior, FunctionSpace):
        raise UnsupportedError("A prior over functions has no mean and variance of each weight: read `recipe.prior`.")
    if any(value.ndim < 2 for value in model.parameters()):
        raise UnsupportedError("Biases have a flat prior, which has no variance: read `recipe.prior` for the matrices.")
    mean: Params = {}
    variance: Params = {}
    for name, value in params.of(model).items():
        own = prior.resolve(name, value)
        mean[name] = torch.zeros_like(value) + torch.as_tensor(own.mean())
        variance[name] = torch.zeros_like(value) + torch.as_tensor(own.variance())
    return mean, variance


class FunctionDescent(GradientDescent):
    r"""Gradient steps on $-\frac1B \sum_n \log p(y_n \mid x_n, w) + \frac{\tau}{2N} \|W (f_w(C) - m)\|^2$.

    Every step runs the network on the context points too. They are run in evaluation mode, as predictions are, so that
    they change no statistics of batch normalization.

    Args:
        problem: Data, likelihood and model.
        prior: The prior over functions.
        weight: τ.
        epochs: The number of epochs of the learning rate schedule.
    """

    def __init__(self, problem: Problem, prior: FunctionSpace, weight: float, epochs: int) -> None:
        self.weight, self.prior = weight, prior.at_context(problem.source)
        self.explain = negative_log_likelihood(problem)
        super().__init__(problem, problem.model, self._loss, hyper=problem.likelihood.hyper(), epochs=epochs)

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        share = self.weight * batch.num_rows / batch.size / self.problem.num_data
        module.eval()
        energy = self.prior.energy(params.call(module, self.prior.points))
        module.train()
        return self.explain(module, batch, hyper, generator) + share * energy
