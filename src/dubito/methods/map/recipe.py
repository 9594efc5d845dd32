"""The `MAP` recipe: one trained network as the posterior, the baseline for all other methods."""

from __future__ import annotations

from typing import Literal

from dubito.beliefs.priors import FunctionSpace, Prior
from dubito.core.constraints import NonNegative, Positive, Start
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.fitting.automatic import has_learned_noise
from dubito.fitting.gradient_training import GradientDescent, plain_descent, prior_decay, validation_score
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.output_noise import fit_hyper, tune_temperature, unfitted_noise
from dubito.fitting.recipe import Recipe
from dubito.methods.map.evidence import EvidenceDescent
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.prior import FunctionDescent, PriorDescent, check_map_prior
from dubito.networks.twin import light_copy


@setting
class MAP(Recipe):
    """Train the network to its most probable weights, or take a trained one as it is.

        ŵ = argmax_w Σ_n log p(y_n | f(x_n, w)) − ½ λ ‖w‖²

    Args:
        prior_precision: λ, the precision of a zero-mean normal prior on every weight; 0 is a flat prior.
        prior: A prior from `dubito.priors` for every matrix; biases and other vectors then have a flat one.
            `priors.Mixture` is learned with the weights, and makes them cluster around few values.
            `priors.FunctionSpace` is a prior of the outputs instead.
        prior_weight: The factor of the log prior; below 1 it weakens the prior.
        temperature: A number by which logits are divided, or ``"validation"`` to maximize the likelihood of
            validation data (Guo et al. 2017, https://arxiv.org/abs/1706.04599). For regression it multiplies the noise.
        train: False keeps the model's weights as they are.
        start: ``"model"`` starts from the model's weights, ``"fresh"`` from newly initialized ones,
            ``"head"`` with a new output layer.
    """

    setting_name = "MAP"
    has_score = True
    prior_precision: NonNegative = 0.0
    temperature: Positive | Literal["validation"] = 1.0
    train: bool = True
    start: Start = "model"
    prior: Prior | FunctionSpace | None = None
    prior_weight: Positive = 1.0

    def __post_init__(self) -> None:
        if self.redraws and not self.train:
            raise InputError(
                f"MAP(start='{self.start}', train=False) would return an untrained network: drop one of the two."
            )

        check_map_prior(self.prior, self.prior_precision)

    @property
    def needs_trained_model(self) -> bool:
        """Whether the model must be trained already."""
        return not self.train

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        if self.temperature == "validation" and problem.validation is None:
            raise InputError("temperature='validation' needs validation data: pass `validation=` to fit.")
        prior_decay(problem.training, self.prior_precision, problem.num_data)  # raises if it is no prior
        epochs = problem.training.epochs if self.train else 0
        by_evidence = self.train and problem.training.evidence_every is not None
        if by_evidence and self.prior is not None:
            raise InputError("evidence_every chooses the precision of a normal prior: drop it, or drop `prior`.")
        descent = self._descent(problem, epochs, by_evidence)

        def posterior(state: State) -> PointPosterior:
            module = light_copy(descent.load(state))
            hyper = {name: value.detach() for name, value in state["hyper"].items()}
            if not by_evidence:
                hyper |= fit_hyper(module, problem)
            likelihood = problem.likelihood.resolved(hyper)
            if not by_evidence and has_learned_noise(problem.likelihood):
                noise = unfitted_noise(module, likelihood.noise, problem.source, problem.validation)  # type: ignore[attr-defined]
                likelihood = likelihood if noise is None else likelihood.replace(noise=noise)
            temperature = self.temperature
            if temperature == "validation":
                assert problem.validation is not None
                temperature = tune_temperature(module, likelihood, problem.validation)
            precision = {name: float(value) for name, value in state["precision"].items()} if by_evidence else None
            prior = descent.prior_at(state) if isinstance(descent, PriorDescent) else None
            return PointPosterior(module, likelihood, self, problem.num_data, float(temperature), precision, prior)

        score = validation_score(problem, descent.load)
        return Inference(descent.init, descent.update, posterior, epochs=epochs, score=score)

    def _descent(self, problem: Problem, epochs: int, by_evidence: bool) -> GradientDescent:
        if by_evidence:
            return EvidenceDescent(problem, self.prior_precision, epochs)
        if isinstance(self.prior, FunctionSpace) and epochs:
            return FunctionDescent(problem, self.prior, self.prior_weight, epochs)
        if isinstance(self.prior, Prior) and epochs:
            return PriorDescent(problem, self.prior, self.prior_weight, epochs)
        return plain_descent(problem, self.prior_precision, epochs)
