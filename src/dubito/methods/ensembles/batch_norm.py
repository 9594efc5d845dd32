"""The `BatchNormNoise` recipe: random BatchNorm statistics as the source of uncertainty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import distributed, params
from dubito.core.batches import Source
from dubito.core.constraints import Count, NonNegative, Start
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Buffers, Params
from dubito.core.randomness import derive_seed, draw_seed
from dubito.core.settings import setting
from dubito.fitting.functions import weight_predictor
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.methods.map.recipe import MAP
from dubito.networks.normalization import batch_norms, batch_statistics

_NOT_IN_WEIGHTS = "BatchNormNoise has random batch statistics, not random weights: use only predict, or another recipe."


@setting
class BatchNormNoise(Recipe):
    r"""Predict with BatchNorm layers in training mode: each sample uses the statistics of a random batch.

    $$p(y \mid x) \approx \frac1S \sum_s p(y \mid f(x; w, \mu_s, \sigma_s)), \qquad
      (\mu_s, \sigma_s) \text{ those of training batch } s$$

    (Teye et al. 2018, https://arxiv.org/abs/1802.06455). ``predict(x, method="mean")`` uses the running statistics, as
    in evaluation mode. The smaller the batches, ``Training(batch_size=...)``, the larger the noise.

    Args:
        num_samples: The number of batches whose statistics are stored after training.
        prior_precision: The precision of a zero-mean normal prior on every weight; 0 is a flat prior.
        train: False keeps the model's weights as they are.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "ensembles.BatchNormNoise"
    old_fields: ClassVar[Mapping[str, str]] = {"samples": "num_samples"}
    num_samples: Count = 32
    prior_precision: NonNegative = 0.0
    train: bool = True
    start: Start = "model"

    def __post_init__(self) -> None:
        self._point()

    def _point(self) -> MAP:
        return MAP(prior_precision=self.prior_precision, train=self.train, start=self.start)

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        if not batch_norms(problem.model):
            raise InputError("BatchNormNoise needs a BatchNorm layer with running statistics; the network has none.")
        problem.source.refuse_shards("BatchNormNoise")
        plain = self._point().build(problem)

        def posterior(state: State) -> BatchNormPosterior:
            found = plain.posterior(state)
            batches = _random_batches(problem.source, self.num_samples, draw_seed(problem.generator))
            drawn = [batch_statistics(found.model, inputs) for inputs in batches]
            for statistics in drawn:
                distributed.mean_(list(statistics.values()))
            return BatchNormPosterior(found.model, found.likelihood, self, problem.num_data, params.stack(drawn))

        return plain._replace(posterior=posterior)


class BatchNormPosterior(Posterior):
    """One network with the BatchNorm statistics of many batches.

    Args:
        model: The network, with its running statistics.
        likelihood, recipe, num_data: As for `Posterior`.
        statistics: Means and variances of each batch ``[S, ...]``, by the names of the model's buffers.
    """

    family = "BatchNormNoise"
    saved = ("statistics",)

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, statistics: Buffers
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.statistics = statistics

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Raise an error: the weights are not random."""
        raise UnsupportedError(_NOT_IN_WEIGHTS)

    def marginals(self) -> tuple[Params, Params]:
        """Raise an error: the weights are not random."""
        raise UnsupportedError(_NOT_IN_WEIGHTS)

    def prior(self) -> tuple[Params, Params]:
        """Raise an error: the weights are not random."""
        raise UnsupportedError(_NOT_IN_WEIGHTS)

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["batches", "mean"] = "batches",
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution as a function of inputs.

        Args:
            num_samples: The number of batches.
            generator: Not used.
            method: ``"batches"``: a mixture over their statistics; ``"mean"``: one pass with the running statistics.
            options: No other option is known.
        """
        if method == "mean":
            return lambda inputs: self.likelihood.predict(params.call(self.model, inputs))
        ready = len(next(iter(self.statistics.values())))
        if num_samples > ready:
            raise InputError(
                f"The statistics of {ready} batches are stored, got num_samples={num_samples}: use fewer samples, or "
                "fit BatchNormNoise(num_samples=...) with more."
            )
        return self._over(list(range(num_samples)))

    @property
    def default_samples(self) -> int:
        """The default number, but at most the number of batches with stored statistics."""
        return min(super().default_samples, len(next(iter(self.statistics.values()))))

    def predictors(self, num_samples: int, generator: torch.Generator, **options: Any) -> list[Predictor]:
        """Return one predictor per batch with stored statistics; batches are reused if there are too few."""
        if options:
            return super().predictors(num_samples, generator, **options)
        ready = len(next(iter(self.statistics.values())))
        return [self._over([s % ready]) for s in range(num_samples)]

    def _over(self, numbers: list[int]) -> Predictor:
        """Return the mixture over the statistics of batches by number."""
        weights = {name: value.expand(len(numbers), *value.shape) for name, value in self.mean().items()}
        buffers = {name: value[numbers] for name, value in self.statistics.items()}
        return weight_predictor(self.model, self.likelihood, weights, buffers=buffers)


def _random_batches(source: Source, count: int, seed: int) -> Iterator[Any]:
    """Yield the inputs of `count` full batches, from as many passes over the data as needed."""
    states, size, found, turn = source.generator_states(), source.first().size, 0, 0
    if size < 2:
        raise InputError("A batch of one example has no variance: use a larger batch_size.")
    while found < count:
        before = found
        for batch in source.epoch(source.stream(derive_seed(seed, turn))):
            if found < count and batch.size >= size and batch.num_rows > 1:  # a short last batch would be noisier
                found += 1
                yield batch.inputs
        if found == before:
            raise InputError("Each process has too few rows of a batch to compute a variance: use a larger batch_size.")
        turn += 1
    source.set_generator_states(states)
