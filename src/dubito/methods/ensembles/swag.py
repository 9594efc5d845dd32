"""The `SWAG` recipe and its posterior: a Gaussian fitted to the iterates of stochastic gradient descent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.batches import Batch
from dubito.core.constraints import Count, CountOrZero, NonNegative, Positive, Share, Start, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Buffers, Params
from dubito.core.randomness import default_generator, derive_seed, draw_seed
from dubito.core.settings import setting
from dubito.fitting.functions import Functions, network_functions, weight_predictor
from dubito.fitting.gradient_training import plain_descent
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.ensembles.points import check_training, point
from dubito.methods.map.recipe import MAP
from dubito.networks.normalization import recalibrate, running_norms, running_statistics
from dubito.networks.selection import Selection
from dubito.networks.twin import light_copy
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule


@setting
class SWAG(Recipe):
    r"""Continue training at a constant learning rate and fit a Gaussian, diagonal plus low rank, to the iterates.

    $$q(w) = \mathcal N\Big(\bar w,\ \tfrac12 \operatorname{diag}(s^2) + \tfrac12 \hat D \hat D^\top\Big)$$

    with $\bar w$ and $s^2$ the mean and variance of all collected weights, and $\hat D \hat D^\top$ the covariance of
    the last `rank` of them (Maddox et al. 2019, https://arxiv.org/abs/1902.02476). Deviations are from
    the final mean, so that each half is an unbiased estimate; in the paper they are from the running mean.

    BatchNorm statistics depend on the weights: they are recomputed on the training data for the mean, and for
    `num_samples` posterior samples, which predictions then use.

    The learning rate stays at ``Training.lr`` for the first half of the burn-in, falls linearly to `lr` in the second,
    and stays constant; ``Training(schedule=...)`` is ignored.

    Args:
        rank: The number of last iterates in the low-rank part; with 0 the Gaussian is diagonal.
        burn_in: The fraction of all steps before the first iterate is collected; use 0 for a trained network.
        collect_every: The number of steps between collected iterates; None collects once per epoch.
        lr: The learning rate while collecting; None is a fifth of ``Training.lr``.
        weights: Which weights are random; the others stay at their mean over the collected iterates.
        prior_precision: The precision of a zero-mean normal prior on every weight; 0 is a flat prior.
        temperature: A factor of the covariance; below 1 makes the posterior narrower.
        num_samples: The number of posterior samples with their own BatchNorm statistics, if there are such layers.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "SWAG"
    old_fields: ClassVar[Mapping[str, str]] = {"samples": "num_samples"}
    rank: CountOrZero = 20
    burn_in: Share = 0.5
    collect_every: Count | None = None
    lr: Positive | None = None
    weights: SelectionRule = all_weights()
    prior_precision: NonNegative = 0.0
    temperature: Positive = 1.0
    num_samples: Count = 32
    start: Start = "model"

    @property
    def assumed_precision(self) -> float:
        """The prior precision, or 1 if the prior is flat."""
        return self.prior_precision or 1.0

    def epochs_after_search(self, found: int, batches: int) -> int:
        """Return twice as many: one half to train, one half to collect, and enough to collect `rank` networks."""
        every = (self.collect_every or batches) / batches
        return max(2 * found, math.ceil(every * (self.rank + 2) / (1 - self.burn_in)))

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training and collecting."""
        check_training("SWAG", problem.training)
        run = _SWAGRun(self, problem, problem.selection)
        return Inference(run.init, run.update, run.posterior, epochs=problem.training.epochs)


@setting
class Averaging(Training):
    """Training with a learning rate that is high at first and constant in the end.

    >>> [round(Averaging(lr=1.0, burn_in=0.5, end_lr=0.2).rate(progress), 3) for progress in (0.2, 0.375, 0.5, 0.9)]
    [1.0, 0.6, 0.2, 0.2]
    """

    burn_in: float = 0.5
    end_lr: float = 0.01

    def rate(self, progress: float) -> float:
        """Return the learning rate at a fraction `progress` of all steps."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        past = min(progress / self.burn_in, 1.0) if self.burn_in else 1.0
        return self.lr + (self.end_lr - self.lr) * max(2 * past - 1, 0.0)


def nothing_collected(weights: Params, selection: Selection) -> State:
    """Return the moments of no network."""
    zeros = {name: torch.zeros_like(value, requires_grad=False) for name, value in weights.items()}
    return {"count": 0, "mean": zeros, "squares": torch.zeros_like(selection.ravel(zeros)), "iterates": []}


@torch.no_grad()
def collect(moments: State, weights: Params, selection: Selection, rank: int) -> State:
    """Add weights to the running mean and sum of squares (Welford), in place, and keep the last `rank` ones."""
    mean, count = moments["mean"], moments["count"] + 1
    chosen, before = selection.ravel(weights), selection.ravel(mean)
    for name, value in mean.items():
        value.add_(weights[name] - value, alpha=1 / count)
    moments["squares"].add_((chosen - before) * (chosen - selection.ravel(mean)))
    iterates = [*moments["iterates"], chosen.detach().clone()][-rank:] if rank else []
    return {"count": count, "mean": mean, "squares": moments["squares"], "iterates": iterates}


class _SWAGRun:
    def __init__(self, recipe: SWAG, problem: Problem, selection: Selection, collected: State | None = None) -> None:
        self.recipe, self.problem, self.selection, self.collected = recipe, problem, selection, collected
        training = problem.training
        per_epoch = problem.source.num_batches or 1
        self.every = recipe.collect_every or per_epoch
        self.first = recipe.burn_in * per_epoch * training.epochs
        planned = per_epoch * training.epochs // self.every - math.floor(self.first / self.every)
        if planned < 2 and collected is None:
            raise InputError(
                f"SWAG would collect {max(planned, 0)} networks in {per_epoch * training.epochs} steps and needs 2: "
                "train for more epochs, or give a smaller collect_every or burn_in."
            )
        end = training.lr / 5 if recipe.lr is None else recipe.lr
        averaging = Averaging(**training.fields(), burn_in=recipe.burn_in, end_lr=end)
        self.descent = plain_descent(replace(problem, training=averaging), recipe.prior_precision)

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        state = self.descent.init(initial, buffers, generator)
        return {**state, **(self.collected or nothing_collected(state["params"], self.selection))}

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        state, info = self.descent.update(state, batch, generator)
        if state["step"] > self.first and state["step"] % self.every == 0:
            state = {**state, **collect(state, state["params"], self.selection, self.recipe.rank)}
        return state, {**info, "collected": float(state["count"])}

    @torch.no_grad()
    def posterior(self, state: State) -> SWAGPosterior:
        """Return the Gaussian; before the first iterate is collected, its mean is the current network."""
        problem, count = self.problem, state["count"]
        model = light_copy(self.descent.load(state))
        params.load_(model, state["mean"] if count else {})
        recalibrate(model, problem.source)
        centre = point(MAP(prior_precision=self.recipe.prior_precision), problem, model, state["hyper"])
        deviations = self._deviations(state)
        variance = state["squares"] / max(count - 1, 1)
        parts = (self.selection, variance.clone(), deviations, draw_seed(problem.generator))
        found = SWAGPosterior(centre.model, centre.likelihood, self.recipe, problem.num_data, *parts)
        if running_norms(model):
            drawn = [self._statistics(found, s) for s in range(self.recipe.num_samples)]
            found.buffers = params.stack(drawn)
        return found

    def _deviations(self, state: State) -> Tensor:
        r"""Rows $r_k$ ``[K, D]`` with $\sum_k r_k r_k^\top$ an unbiased estimate of the covariance."""
        count, kept = state["count"], state["iterates"]
        if count < 2 or not kept:
            return state["squares"].new_zeros((0, self.selection.num_weights))
        return (torch.stack(kept) - self.selection.ravel(state["mean"])) / math.sqrt(len(kept) * (count - 1) / count)

    def _statistics(self, found: SWAGPosterior, s: int) -> Buffers:
        model = params.load_(light_copy(found.model), found.draw(s))
        return running_statistics(running_norms(recalibrate(model, self.problem.source)))


class SWAGPosterior(Posterior):
    r"""A Gaussian around an average of iterates, $\mathcal N(\bar w, \tfrac T2 (\operatorname{diag}(s^2) + R^\top R))$.

    Args:
        model: The network at the mean, with BatchNorm statistics recomputed for it.
        likelihood, recipe, num_data: As for `Posterior`.
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
