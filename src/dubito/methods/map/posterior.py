"""`PointPosterior`: a posterior that is concentrated on one point, the trained weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.priors import Prior
from dubito.core import params
from dubito.core.batches import Data
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.settings import Setting
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.fitting.traceable import Traceable
from dubito.methods.map.prior import prior_moments


class PointPosterior(Posterior):
    """A point mass at the trained weights. Its epistemic uncertainty is zero."""

    family = "MAP"
    default_samples = 1
    has_spread = False

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Recipe,
        num_data: int,
        temperature: float = 1.0,
        precision: dict[str, float] | None = None,
        learned_prior: Prior | None = None,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.temperature = temperature
        self.learned_prior = learned_prior  # the prior of all matrices, if it was trained with them; else None
        self.precision = precision  # of the prior, by parameter, if the evidence chose it; else None

    def learned_priors(self) -> Mapping[str, Prior]:
        """Return the prior that was trained with all matrices."""
        if self.learned_prior is None:
            return {}
        moving = [name for name, value in self.model.named_parameters() if value.ndim > 1 and value.requires_grad]
        return dict.fromkeys(moving, self.learned_prior)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Return the same weights `num_samples` times."""
        return {name: value.expand(num_samples, *value.shape) for name, value in self.mean().items()}

    def marginals(self) -> tuple[Params, Params]:
        """Return the weights and zero variances."""
        mean = self.mean()
        return mean, params.zeros_like(mean)

    def prior(self) -> tuple[Params, Params]:
        """Return the mean and the variance of the prior that the weights were trained with."""
        if self.recipe.prior is not None:
            return prior_moments(self.learned_prior or self.recipe.prior, self.model)
        if self.precision is None and self.recipe.prior_precision == 0:
            raise UnsupportedError("A flat prior has no variance: fit MAP with a positive prior_precision.")
        precision = self.precision or dict.fromkeys(params.trainable(self.model), self.recipe.prior_precision)
        variance = {
            name: torch.full_like(value.detach(), 1 / precision[name] if name in precision else 0.0)
            for name, value in self.model.named_parameters()
        }
        return params.zeros_like(variance), variance

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the network's own prediction at the chosen temperature."""

        def predict(inputs: Any) -> Any:
            outputs, likelihood = self.likelihood.temper(params.call(self.model, inputs), self.temperature)
            return likelihood.predict(outputs)

        return predict

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the network's own prediction."""
        yield Traceable(self.predictor(num_samples, generator, **options), "one network")

    def _updated(self, data: Data, **options: Any) -> Posterior:
        """Fine-tune these weights on new data. Old data may be forgotten, because a point keeps no uncertainty."""
        recipe = self.recipe.replace(start="model", train=True, temperature=self.temperature)
        posterior = recipe.fit(self.model, data, likelihood=self.likelihood, **options)
        posterior.num_data += self.num_data
        return posterior

    def state(self) -> dict[str, Any]:
        """Return what is saved beside the weights: the temperature and a learned prior."""
        tensors: dict[str, Tensor] = {}
        prior = None if self.learned_prior is None else json.dumps(self.learned_prior.to_json(tensors))
        found = {"temperature": self.temperature, "precision": self.precision}
        return {**found, "learned_prior": prior, "prior_tensors": tensors}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Recipe, num_data: int, state: Any) -> Self:
        """Rebuild the posterior from its saved state."""
        text = state.get("learned_prior")
        prior = None if text is None else Setting.from_json(json.loads(text), state["prior_tensors"])
        return cls(model, likelihood, recipe, num_data, state["temperature"], state["precision"], prior)
