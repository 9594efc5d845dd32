"""The `Variational` recipe."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from dubito.errors import InputError, UnsupportedError
from dubito.inference import Inference, Problem
from dubito.objectives import ELBO, Objective
from dubito.priors import Normal, Prior
from dubito.priors.base import require_real
from dubito.recipe import Recipe
from dubito.select import all as all_weights
from dubito.selection import SelectionRule
from dubito.settings import setting
from dubito.variational.convert import BIASES, ESTIMATORS, convert


@setting
class Variational(Recipe):
    r"""Train a factorised normal posterior by maximizing a bound on the evidence.

    $$q(w) = \prod_i \mathcal N(\mu_i, \sigma_i^2), \qquad
      \max_q\; \mathbb E_q[\log p(D \mid w)] - T\,\mathrm{KL}(q \,\|\, p)$$

    (Graves 2011; Blundell et al. 2015, https://arxiv.org/abs/1505.05424). The mean starts at the model's weights, the
    scale small. At temperature 1 a wide network tends to underfit; `posterior.diagnose()` says when, and colder
    temperatures or fewer random weights are the remedies.

    Args:
        prior: One of `dubito.priors`.
        objective: ``ELBO()`` or ``Renyi(alpha)``.
        estimator: ``"local"`` reparameterization, ``"flipout"`` or ``"weight"`` sampling.
        weights: Which weights are random. The others are held at their value, or trained if the start is fresh.
        biases: Whether biases and the gains of normalization layers are random too, or trained as points.
        initial_scale: The standard deviation of every weight at the start.
        start: ``"model"`` starts at the model's weights, ``"fresh"`` at newly drawn ones.
        kl_warmup: The fraction of all steps over which the weight of the divergence rises from 0 to `temperature`.
        temperature: The weight of the divergence; below 1 makes the posterior narrower.
    """

    setting_name = "Variational"
    prior: Prior = Normal()
    objective: Objective = ELBO()
    estimator: Literal["local", "flipout", "weight"] = "local"
    weights: SelectionRule = all_weights()
    biases: Literal["deterministic", "random"] = "deterministic"
    initial_scale: float = 0.03
    start: Literal["model", "fresh"] = "model"
    kl_warmup: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in {"prior": Prior, "objective": Objective, "weights": SelectionRule}.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"Variational({name}={getattr(self, name)!r}) must be one of dubito.{_HOME[name]}.")
        require_real(self.prior)
        choices = {"estimator": ESTIMATORS, "biases": BIASES, "start": ("model", "fresh")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"Variational({name}={getattr(self, name)!r}) is not one of {', '.join(allowed)}.")
        for name, good in _RANGES.items():
            if not good(getattr(self, name)):
                raise InputError(f"Variational({name}={getattr(self, name)!r}) is out of range.")
        if self.objective.needs_weight_samples and self.estimator != "weight":
            raise InputError(f"{self.objective!r} needs joint draws of all weights: use estimator='weight' with it.")
        if self.starts_fresh and isinstance(getattr(self.prior, "loc", None), str):
            raise InputError("A prior around the model's weights needs start='model': fresh weights are no knowledge.")

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        from dubito.variational.trainer import Trainer

        chosen = self.weights.resolve(
            problem.model, problem.source, problem.likelihood,
            prior_precision=self._precision(), generator=problem.generator,
        )  # fmt: skip
        module = convert(
            problem.model, prior=self.prior, estimator=self.estimator, initial_scale=self.initial_scale,
            biases=self.biases, weights=chosen, rest="train" if self.starts_fresh else "hold",
        )  # fmt: skip
        return Trainer(self, problem, module).inference()

    def _precision(self) -> float:
        """A prior precision for rules that choose weights by their variance; 1 where the prior has no single one."""
        try:
            variance = self.prior.variance()
        except (UnsupportedError, InputError):
            return 1.0
        return 1.0 if isinstance(variance, Tensor) else 1 / variance


_HOME = {"prior": "priors", "objective": "objectives", "weights": "select"}
_RANGES = {
    "initial_scale": lambda value: 0 < value < float("inf"),
    "kl_warmup": lambda value: 0 <= value <= 1,
    "temperature": lambda value: 0 < value < float("inf"),
}
