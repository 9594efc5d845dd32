"""The posterior of `MCDropout`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.batches import Data
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator, draw_seed
from dubito.fitting.posterior import Posterior, Predictor
from dubito.methods.ensembles.masks import OWN, bernoulli, dropping
from dubito.networks.layers import require_rule


class DropoutPosterior(Posterior):
    """A network with dropout: each set of masks is one posterior sample, the same for all inputs of a call.

    Args:
        model: The network, in evaluation mode, so its own dropout layers are off.
        likelihood: The likelihood.
        recipe: The recipe.
        num_data: The number of examples.
        rates: The dropout rate at each site: a layer's input, or a dropout layer.
    """

    family = "MCDropout"
    saved = ("rates",)
    more_spread = (
        "Give a larger rate; where the noise of a regression is small, masks cost more than they tell: use an Ensemble."
    )

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, rates: dict[str, float]
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.rates = rates

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights: those of dropped inputs of a layer are 0, the others are multiplied by ``1/(1-p)``."""
        generator, mean = default_generator(generator), self.mean()
        names = self._weights()
        drawn = []
        for _ in range(num_samples):
            draw, weights = bernoulli(self.rates, draw_seed(generator)), dict(mean)
            for site, name in names.items():
                layer = self.model.get_submodule(site)
                rule = require_rule(layer, "sampling weights of MCDropout")
                mask = draw(site, (rule.num_inputs(layer),), mean[name])
                weights[name] = mean[name] * rule.weight_factors(layer, mask, "input")
            drawn.append(weights)
        return params.stack(drawn)

    def marginals(self) -> tuple[Params, Params]:
        """Return the weights and the variances ``w² p/(1-p)`` of those whose inputs are dropped."""
        mean, names = self.mean(), self._weights()
        variance = params.zeros_like(mean)
        for site, name in names.items():
            variance[name] = mean[name].square() * (self.rates[site] / (1 - self.rates[site]))
        return mean, variance

    def _weights(self) -> dict[str, str]:
        """Return the parameter that the masks of each site multiply."""
        places = {site: self.model.get_submodule(site) for site in self.rates}
        if not self.recipe.filterwise or any(type(layer) in OWN for layer in places.values()):
            raise UnsupportedError(
                "This posterior drops activations, not weights: use MCDropout(where='layers', filterwise=True) for a "
                "distribution over weights."
            )
        named = {id(value): name for name, value in self.model.named_parameters()}
        found = {site: named[id(layer.weight)] for site, layer in places.items()}
        shared = len(set(found.values())) < len(found)
        if shared:
            raise UnsupportedError(
                "Two layers share a weight but drop different inputs, so there is no weight to draw: use predict."
            )
        return found

    def prior(self) -> tuple[Params, Params]:
        """Return the normal prior of the weights."""
        precision = self.recipe.prior_precision
        if precision == 0:
            raise UnsupportedError(
                "A flat prior has no variance: fit MCDropout(prior_precision=...) to have a normal prior."
            )
        random = set(self._weights().values())
        mean = {name: torch.zeros_like(v) if name in random else v for name, v in self.mean().items()}
        return mean, {name: torch.full_like(v, (name in random) / precision) for name, v in mean.items()}

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["masks", "mean"] = "masks",
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution as a function of inputs.

        Args:
            num_samples: The number of sets of masks.
            generator: The source of randomness.
            method: ``"masks"``: the network under random masks; ``"mean"``: the weight-scaling rule, one pass without
                dropout and without epistemic uncertainty.
            options: No other option is known.
        """
        if method == "mean":
            return lambda inputs: self.likelihood.predict(params.call(self.model, inputs))
        draws = [bernoulli(self.rates, draw_seed(generator)) for _ in range(num_samples)]

        def predict(inputs: Any) -> Any:
            outputs = []
            for draw in draws:
                with dropping(self.model, list(self.rates), draw, filterwise=self.recipe.filterwise, shared=True):
                    outputs.append(params.call(self.model, inputs))
            return self.likelihood.predict_samples(torch.stack(outputs))

        return predict

    def _updated(self, data: Data, **options: Any) -> Posterior:
        """Continue training from these weights at these rates; this is fine-tuning, which can forget earlier data."""
        recipe = self.recipe.replace(start="model", train=True, rate=dict(self.rates))
        posterior = recipe.fit(self.model, data, likelihood=self.likelihood, **options)
        posterior.num_data += self.num_data
        return posterior
