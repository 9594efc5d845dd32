"""The `Variational` recipe."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.beliefs.objectives import ELBO, Objective, kl_weight
from dubito.beliefs.priors import ByName, GroupPrior, Normal, Prior
from dubito.beliefs.priors.base import require_real
from dubito.core.constraints import Count, NonNegative, Positive, Probability, Start
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.variational.conversion import Biases, Estimator, check_family, convert
from dubito.methods.variational.joint import Family
from dubito.methods.variational.natural import check_prior
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule


@setting
class Variational(Recipe):
    r"""Train a normal posterior, mean-field by default, by maximizing a bound on the evidence.

    $$q(w) = \prod_i \mathcal N(\mu_i, \sigma_i^2), \qquad
      \max_q\; \mathbb E_q[\log p(D \mid w)] - T\,\mathrm{KL}(q \,\|\, p)$$

    (Graves 2011; Blundell et al. 2015, https://arxiv.org/abs/1505.05424). The means start at the model's weights, the
    scales at a small value. At temperature 1 a wide network tends to underfit (Wenzel et al. 2020,
    https://arxiv.org/abs/2002.02405), hence the default.

    Args:
        prior: One of `dubito.priors`.
        objective: ``ELBO()`` or ``Renyi(alpha)``.
        estimator: ``"local"`` reparameterization, ``"flipout"`` or ``"weight"`` sampling. None is ``"weight"`` where
            the objective, the optimizer or the family needs joint samples of all weights, else ``"local"``.
        weights: Which weights are random. The others keep their values, or are trained if the start is fresh.
        biases: Whether biases and the gains of normalization layers are random too, or trained as points.
        initial_scale: The initial standard deviation of every weight.
        start: Where training starts, as for `MAP`.
        kl_warmup: The fraction of all steps over which the weight of the KL divergence rises from 0 to `temperature`;
            or a pair, the fractions at which the rise begins and ends.
        kl_cycles: The number of warm-ups, in equal parts of the training; `kl_warmup` is then a fraction of one part
            (Fu et al. 2019, https://arxiv.org/abs/1903.10145).
        scale_rate: A factor of the learning rate for the scales; 0.5 is recommended for sparse variational dropout.
        temperature: The weight of the KL divergence; below 1 makes the posterior narrower. ``"auto"`` is 0.1 for
            classification under a normal prior and 0.3 for regression by independent weights under one, which at 1
            underfit; it is 1 otherwise.
        optimizer: ``"gradient"``: the optimizer of the training settings moves means and scales. ``"natural"``: natural
            gradients (see `dubito.variational.natural`), at about the cost of Adam; they always sample weights,
            whatever the estimator.
        family: ``"mean-field"``: independent weights. ``"low-rank"`` and ``"full"``: correlated weights, for small
            selections (see `dubito.variational.joint`); they always sample weights, whatever the estimator.
        rank: The rank of the correlations of ``"low-rank"``.
    """

    setting_name = "Variational"
    prior: Prior = Normal()
    objective: Objective = ELBO()
    estimator: Estimator | None = None
    weights: SelectionRule = all_weights()
    biases: Biases = "deterministic"
    initial_scale: Positive = 0.03
    start: Start = "model"
    kl_warmup: Probability | tuple[Probability, Probability] = 0.0
    kl_cycles: Count = 1
    scale_rate: NonNegative = 1.0
    temperature: Positive | Literal["auto"] = "auto"
    optimizer: Literal["gradient", "natural"] = "gradient"
    family: Family = "mean-field"
    rank: Count = 10

    def __post_init__(self) -> None:
        require_real(self.prior)
        if isinstance(self.kl_warmup, tuple) and not self.kl_warmup[0] < self.kl_warmup[1]:
            raise InputError(f"`kl_warmup` must be a pair (begin, end) with begin < end, got {self.kl_warmup!r}.")
        if self.objective.needs_weight_samples and self.sampling != "weight":
            raise InputError(f"{self.objective!r} needs joint samples of all weights: use estimator='weight'.")
        if self.kl_cycles > 1 and self._rise[1] == 0:
            raise InputError("kl_cycles repeats the warm-up of the KL divergence: set kl_warmup, too, such as 0.5.")
        check_family(self.family, self.prior)
        if self.optimizer == "natural":
            self._check_natural()
        if isinstance(self.prior, GroupPrior):
            self._check_groups()
        if self.redraws and _is_around_the_model(self.prior):
            raise InputError(f"start='{self.start}' discards weights this prior is centred on: use start='model'.")

    def _check_natural(self) -> None:
        if not isinstance(self.objective, ELBO):
            raise InputError(f"optimizer='natural' needs objective ELBO, got {self.objective!r}.")
        if self.family != "mean-field":
            raise InputError(f"optimizer='natural' needs family='mean-field', got '{self.family}'.")
        if self._rise[1]:
            raise InputError("Natural gradients need no warm-up of the KL divergence: drop kl_warmup.")
        if self.scale_rate != 1:
            raise InputError("Natural gradients have their own step size for scales: drop scale_rate.")
        if not isinstance(self.prior, ByName):
            check_prior(self.prior)

    @property
    def sampling(self) -> Estimator:
        """The estimator in use: natural gradients and correlated families always sample weights."""
        if self.optimizer == "natural" or self.family != "mean-field":
            return "weight"
        return self.estimator or ("weight" if self.objective.needs_weight_samples else "local")

    def kl_temperature(self, likelihood: Likelihood) -> float:
        """Return the temperature as a number.

        >>> from dubito import likelihoods
        >>> [Variational().kl_temperature(each) for each in (likelihoods.Categorical(), likelihoods.Gaussian())]
        [0.1, 0.3]
        """
        if self.temperature != "auto":
            return self.temperature
        if not isinstance(self.prior, Normal):
            return 1.0
        if isinstance(likelihood, Categorical | Bernoulli):
            return 0.1
        is_regression = isinstance(likelihood, Gaussian | HeteroscedasticGaussian)
        return 0.3 if is_regression and self.family == "mean-field" else 1.0

    def kl_weight(self, progress: float) -> float:
        """Return the weight of the KL divergence after a fraction of all steps, divided by the temperature.

        >>> recipe = Variational(kl_warmup=0.5, kl_cycles=2)
        >>> [recipe.kl_weight(done) for done in (0.0, 0.125, 0.25, 0.375, 0.5, 1.0)]
        [0.0, 0.5, 1.0, 1.0, 0.0, 1.0]
        >>> [Variational(kl_warmup=(0.25, 0.75)).kl_weight(done) for done in (0.0, 0.25, 0.5, 0.75)]
        [0.0, 0.0, 0.5, 1.0]
        """
        return kl_weight(progress, self._rise, self.kl_cycles)

    @property
    def _rise(self) -> tuple[float, float]:
        """The fractions of all steps, or of a cycle, at which the KL weight begins and ends to rise."""
        return self.kl_warmup if isinstance(self.kl_warmup, tuple) else (0.0, self.kl_warmup)

    def epochs_after_search(self, found: int, batches: int) -> int:
        """Return three times as many, and at least 1,000 steps: scales converge later than means."""
        return max(3 * found, math.ceil(1000 / batches))

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        from dubito.methods.variational.trainer import VariationalTrainer

        module = convert(
            problem.model, prior=self.prior, estimator=self.sampling, initial_scale=self.initial_scale,
            biases=self.biases, weights=problem.selection, rest="train" if self.starts_fresh else "hold",
            family=self.family, rank=self.rank,
        )  # fmt: skip
        if isinstance(self.prior, GroupPrior):
            from dubito.methods.variational.groups.posterior import GroupTrainer

            return GroupTrainer(self, problem, module).inference()
        return VariationalTrainer(self, problem, module).inference()

    def _check_groups(self) -> None:
        """Raise an error if a setting does not support a prior with groups."""
        bad = {"objective": self.objective.needs_weight_samples, "estimator": self.estimator == "flipout"}
        for name, is_bad in {**bad, "biases": self.biases == "random"}.items():
            if is_bad:
                given = f"{name}={getattr(self, name)!r}"
                raise InputError(f"{self.prior!r} has group scales and cannot be used with {given}.")

    @property
    def assumed_precision(self) -> float:
        """The prior precision for selection rules that use the variance; 1 if the prior has no single precision."""
        try:
            variance = self.prior.variance()
        except (UnsupportedError, InputError):
            return 1.0
        return 1.0 if isinstance(variance, Tensor) else 1 / variance


def _is_around_the_model(prior: Prior) -> bool:
    if isinstance(prior, ByName):
        return any(_is_around_the_model(part) for part in prior.priors.values())
    return isinstance(getattr(prior, "loc", None), str)
