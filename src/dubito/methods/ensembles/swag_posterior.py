"""The posterior of `SWAG`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.constraints import Count, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Buffers, Params
from dubito.core.randomness import default_generator, derive_seed
from dubito.fitting.functions import Functions, network_functions, weight_predictor
from dubito.fitting.posterior import Posterior, Predictor
from dubito.networks.selection import Selection


class SWAGPosterior(Posterior):
    r"""A Gaussian around an average of iterates, $\mathcal N(\bar w, \tfrac T2 (\operatorname{diag}(s^2) + R^\top R))$.

    Args:
        model: The network at the mean, with BatchNorm statistics recomputed for it.
        likelihood: The likelihood.
        recipe: The recipe.
        num_data: The number of examples.
        selection: Which weights are random.
        variance: $s^2$ ``[D]``, the variance of each weight over the collected iterates.
        deviations: $R$ ``[K, D]``; without rows the covariance is $T \operatorname{diag}(s^2)$.
        seed: The seed of the samples with their own BatchNorm statistics.
        buffers: These statistics, ``[S, ...]`` by name; empty if the network has no such layers.
    """

    family = "SWAG"
    saved = ("selection", "variance", "deviations", "seed", "buffers")
    more_spread = "Collect at a larger learning rate (lr), or select more weights."

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Selection,
        variance: Tensor,
        deviations: Tensor,
        seed: int,
        buffers: Buffers | None = None,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.selection, self.variance, self.deviations = selection, variance, deviations
        self.seed, self.buffers = seed, buffers or {}

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights; for a network with BatchNorm layers, statistics must be recomputed for each sample."""
        generator, like = default_generator(generator), self.variance
        noise = [
            torch.randn((num_samples, size), generator=generator, dtype=like.dtype, device=generator.device)
            for size in (len(like), len(self.deviations))
        ]
        spread = noise[0].to(like.device) * like.sqrt() + noise[1].to(like.device) @ self.deviations
        return self.selection.merge(self.mean(), self.selection.ravel(self.mean()) + spread * self._share**0.5)

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions, as `Posterior.functions`; with BatchNorm layers, of the samples that have statistics."""
        if not self.buffers:
            return super().functions(num_functions, generator=generator)
        check("num_functions", Count, num_functions)
        ready = len(next(iter(self.buffers.values())))
        chosen = [s % ready for s in range(num_functions)]
        own = [{name: value[s] for name, value in self.buffers.items()} for s in chosen]
        return network_functions(self.model, [self.draw(s) | extra for s, extra in zip(chosen, own, strict=True)])

    def draw(self, s: int) -> Params:
        """Return the weights of one of the samples with their own BatchNorm statistics."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, s))
        return params.unstack(self.sample(1, generator=generator))[0]

    def marginals(self) -> tuple[Params, Params]:
        """Return means and variances; the variance of a weight that is not random is 0."""
        mean, variance = self.mean(), self._share * (self.variance + self.deviations.square().sum(dim=0))
        return mean, self.selection.merge(params.zeros_like(mean), variance)

    def prior(self) -> tuple[Params, Params]:
        """Return the normal prior of the weights."""
        precision = self.recipe.prior_precision
        if precision == 0:
            raise UnsupportedError(
                "A flat prior has no variance: fit SWAG(prior_precision=...) to have a normal prior."
            )
        mean = self.mean()
        flat = torch.full_like(self.variance, 1 / precision)
        return self.selection.merge(mean, torch.zeros_like(flat)), self.selection.merge(params.zeros_like(mean), flat)

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["weights", "mean"] = "weights",
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution as a function of inputs.

        Args:
            num_samples: The number of weight samples.
            generator: The source of randomness, if the network has no BatchNorm layers.
            method: ``"weights"``: the network at sampled weights, the same for all inputs of a call; ``"mean"``: the
                network at the mean, one pass without epistemic uncertainty (stochastic weight averaging).
            options: No other option is known.
        """
        if method == "mean":
            return lambda inputs: self.likelihood.predict(params.call(self.model, inputs))
        if not self.buffers:
            return weight_predictor(self.model, self.likelihood, self.sample(num_samples, generator=generator))
        ready = len(next(iter(self.buffers.values())))
        if num_samples > ready:
            raise InputError(
                f"BatchNorm statistics exist for {ready} samples, got num_samples={num_samples}: use fewer samples, or "
                "fit SWAG(num_samples=...) with more."
            )
        return self._over(list(range(num_samples)))

    @property
    def default_samples(self) -> int:
        """The default number, but at most the number of samples with their own statistics."""
        return min([super().default_samples, *(len(value) for value in self.buffers.values())])

    def predictors(self, num_samples: int, generator: torch.Generator, **options: Any) -> list[Predictor]:
        """Return one predictor per sample; samples with statistics are reused if there are too few."""
        if not self.buffers or options:
            return super().predictors(num_samples, generator, **options)
        ready = len(next(iter(self.buffers.values())))
        return [self._over([s % ready]) for s in range(num_samples)]

    def _over(self, draws: list[int]) -> Predictor:
        """Return the mixture over samples by number, with their statistics."""
        buffers = {name: value[draws] for name, value in self.buffers.items()}
        drawn = params.stack([self.draw(s) for s in draws])
        return weight_predictor(self.model, self.likelihood, drawn, buffers=buffers)

    @property
    def _share(self) -> float:
        """The factor of each of the two parts of the covariance."""
        return float(self.recipe.temperature) * (0.5 if len(self.deviations) else 1.0)
