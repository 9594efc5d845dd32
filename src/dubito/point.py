"""`MAP`: the network itself as a posterior, a single point. The baseline that stands beside every method."""

from __future__ import annotations

import copy
import json
import math
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dubito import distributed, params
from dubito.batches import Data, Source
from dubito.descent import Descent, negative_log_likelihood, validation_score
from dubito.errors import InputError, UnsupportedError
from dubito.inference import Inference, Problem, State
from dubito.likelihoods import Bernoulli, Categorical, Likelihood
from dubito.map_prior import PriorDescent, check_map_prior, prior_moments
from dubito.numeric import minimize_scalar
from dubito.params import Params
from dubito.posterior import Posterior, Predictor
from dubito.priors import Prior
from dubito.recipe import Recipe
from dubito.settings import Setting, setting
from dubito.training import Training


@setting
class MAP(Recipe):
    """Train the network to its most probable weights, or take a trained one as it is.

        ŵ = argmax_w Σ_n log p(y_n | f(x_n, w)) − ½ λ ‖w‖²

    Args:
        prior_precision: λ, the precision of a zero-mean normal prior on every weight; 0 is a flat prior.
        prior: Another prior, one of `dubito.priors`, of every matrix; biases and other vectors then have a flat one.
            `priors.Mixture` is learned along with the weights, which it makes share few values.
        prior_weight: The power of that prior; below 1 it says less than the data.
        temperature: A number by which logits are divided, or ``"validation"`` to choose it by the likelihood of
            validation data (Guo et al. 2017, https://arxiv.org/abs/1706.04599). For regression it multiplies the noise.
        train: False takes the model's weights as they are.
        start: ``"model"`` trains on from the model's weights, ``"fresh"`` from newly drawn ones.
    """

    setting_name = "MAP"
    prior_precision: float = 0.0
    temperature: float | Literal["validation"] = 1.0
    train: bool = True
    start: Literal["model", "fresh"] = "model"
    prior: Prior | None = None
    prior_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.prior_precision < math.inf:
            raise InputError(f"prior_precision must be a number, 0 or above, got {self.prior_precision}.")
        given = self.temperature
        if given != "validation" and not (isinstance(given, int | float) and 0 < given < math.inf):
            raise InputError(f"temperature must be a positive number or 'validation', got {given!r}.")
        if self.start not in ("model", "fresh"):
            raise InputError(f"start must be 'model' or 'fresh', got {self.start!r}.")
        if self.start == "fresh" and not self.train:
            raise InputError("MAP(start='fresh', train=False) would be an untrained network: drop one of the two.")

        check_map_prior(self.prior, self.prior_weight, self.prior_precision)

    def build(self, problem: Problem) -> Inference:
        """Return the steps of plain training."""
        if self.temperature == "validation" and problem.validation is None:
            raise InputError("temperature='validation' needs data to judge by: pass `validation=` to fit.")
        if self.prior_precision and problem.training.optimizer == "adamw":
            raise InputError("The decoupled decay of 'adamw' is no prior: use 'adam' or 'sgd' with prior_precision.")
        epochs = problem.training.epochs if self.train else 0
        by_evidence = self.train and problem.training.evidence_every is not None
        if by_evidence and self.prior is not None:
            raise InputError("evidence_every chooses the precision of a normal prior: drop it, or the prior of MAP.")
        descent = self._descent(problem, epochs, by_evidence)

        def posterior(state: State) -> PointPosterior:
            module = copy.deepcopy(descent.load(state))
            hyper = {name: value.detach() for name, value in state["hyper"].items()}
            if "log_noise" in hyper and not by_evidence:
                hyper["log_noise"] = fit_log_noise(module, problem)
            likelihood = problem.likelihood.resolved(hyper)
            temperature = self.temperature
            if temperature == "validation":
                assert problem.validation is not None
                temperature = tune_temperature(module, likelihood, problem.validation)
            precision = {name: float(value) for name, value in state["precision"].items()} if by_evidence else None
            prior = descent.prior_at(state) if isinstance(descent, PriorDescent) else None
            return PointPosterior(module, likelihood, self, problem.num_data, float(temperature), precision, prior)

        score = validation_score(problem, descent.load)
        return Inference(descent.init, descent.update, posterior, epochs=epochs, score=score)

    def _descent(self, problem: Problem, epochs: int, by_evidence: bool) -> Descent:
        if by_evidence:
            from dubito.laplace.marginal import EvidenceDescent

            return EvidenceDescent(problem, self.prior_precision, epochs)
        if self.prior is not None and epochs:
            return PriorDescent(problem, self.prior, self.prior_weight, epochs)
        decay = problem.training.weight_decay + self.prior_precision / problem.num_data
        return Descent(
            problem,
            problem.model,
            negative_log_likelihood(problem),
            hyper=problem.likelihood.hyper(),
            weight_decay={name: decay for name, _ in problem.model.named_parameters()},
            epochs=epochs,
        )


class PointPosterior(Posterior):
    """All belief in one point: the trained weights. Its epistemic uncertainty is zero."""

    family = "MAP"
    default_samples = 1

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: MAP,
        num_data: int,
        temperature: float = 1.0,
        precision: dict[str, float] | None = None,
        learned_prior: Prior | None = None,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.temperature = temperature
        self.learned_prior = learned_prior  # of all matrices, where it was trained along with them
        self.precision = precision  # of the prior, by parameter, where the evidence chose it

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Return the same weights `num_samples` times."""
        return {name: value.expand(num_samples, *value.shape) for name, value in self.mean().items()}

    def marginals(self) -> tuple[Params, Params]:
        """Return the weights and zero variances."""
        mean = self.mean()
        return mean, params.zeros_like(mean)

    def prior(self) -> tuple[Params, Params]:
        """Return mean and variance of the prior that the weights were trained under."""
        if self.recipe.prior is not None:
            return prior_moments(self.learned_prior or self.recipe.prior, self.model)
        if self.precision is None and self.recipe.prior_precision == 0:
            raise UnsupportedError("This point was found under a flat prior; MAP(prior_precision=...) has one.")
        precision = self.precision or dict.fromkeys(params.trainable(self.model), self.recipe.prior_precision)
        variance = {
            name: torch.full_like(value.detach(), 1 / precision[name] if name in precision else 0.0)
            for name, value in self.model.named_parameters()
        }
        return params.zeros_like(variance), variance

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the network's own prediction at the chosen temperature."""
        if options:
            raise InputError(f"A MAP posterior has no predict option '{next(iter(options))}'.")

        def predict(inputs: Any) -> Any:
            outputs, likelihood = self.likelihood.temper(params.call(self.model, inputs), self.temperature)
            return likelihood.predict(outputs)

        return predict

    def update(
        self,
        data: Data,
        *,
        training: Training | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> Posterior:
        """Train on from these weights: plain fine-tuning, which forgets. A point has no spread to hold on to."""
        recipe = self.recipe.replace(start="model", train=True, temperature=self.temperature)
        posterior = recipe.fit(
            self.model, data, likelihood=self.likelihood, training=training, generator=generator, progress=progress
        )
        posterior.num_data += self.num_data
        return posterior

    def state(self) -> dict[str, Any]:
        """Return what is beyond the weights: the temperature, and a prior that was learned."""
        tensors: dict[str, Tensor] = {}
        prior = None if self.learned_prior is None else json.dumps(self.learned_prior.to_json(tensors))
        found = {"temperature": self.temperature, "precision": self.precision}
        return {**found, "learned_prior": prior, "prior_tensors": tensors}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: MAP, num_data: int, state: Any) -> Self:
        """Make the point again."""
        text = state.get("learned_prior")
        prior = None if text is None else Setting.from_json(json.loads(text), state["prior_tensors"])
        return cls(model, likelihood, recipe, num_data, state["temperature"], state["precision"], prior)


@torch.no_grad()
def outputs_of(module: nn.Module, source: Source) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of `module` in float64 and the targets, batch by batch, for this process's rows."""
    module.eval()
    parts = (batch for batch in source.replay() if batch.num_rows)
    return [(params.call(module, batch.inputs).double(), batch.targets) for batch in parts]


def tune_temperature(module: nn.Module, likelihood: Likelihood, validation: Source) -> float:
    """Return the temperature that maximizes the validation likelihood, by golden section on its logarithm.

    The negative log-likelihood is convex in 1/T for a softmax, hence it has one minimum in log T. A standard normal
    prior on log T keeps it finite where a classifier makes no error on the validation data; a few errors outweigh it.
    """
    parts = outputs_of(module, validation)
    doubt = 0.5 if isinstance(likelihood, Categorical | Bernoulli) else 0.0

    def loss(log_temperature: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=validation.device)
        for outputs, targets in parts:
            tempered, scaled = likelihood.temper(outputs, math.exp(log_temperature))
            total -= scaled.log_prob(tempered, targets).sum()
        distributed.sum_([total])
        return float(total) + doubt * log_temperature**2

    return math.exp(minimize_scalar(loss, math.log(1e-2), math.log(1e2)))


def fit_log_noise(module: nn.Module, problem: Problem) -> Tensor:
    """Return the logarithm of the noise that maximizes the likelihood: of the root mean square of the residuals.

    The gradient steps that learn it along with the weights get there too, but only slowly.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=problem.source.device)
    for outputs, targets in outputs_of(module, problem.source):
        residuals = outputs - targets.reshape(outputs.shape)
        sums += torch.stack([residuals.square().sum(), residuals.new_tensor(residuals.numel())])
    distributed.sum_([sums])
    return (sums[0] / sums[1]).clamp_min(1e-12).log() / 2
