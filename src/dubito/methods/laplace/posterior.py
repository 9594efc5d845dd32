"""The posterior of `Laplace`: a Gaussian over the selected weights around the trained ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import Prediction
from dubito.core import batches, io, params
from dubito.core.batches import Data
from dubito.core.constraints import Count, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.curvature import links
from dubito.curvature import matrices as linalg
from dubito.curvature.engine import Engine
from dubito.curvature.evidence import DataFit, Evidence, as_precision, known_noise
from dubito.curvature.linearized import Linearized
from dubito.curvature.structures import matrix_from_sums
from dubito.curvature.tryout import Trial
from dubito.fitting.diagnosis import Finding
from dubito.fitting.functions import Functions, network_functions, weight_predictor
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.fitting.working_copies import shared_property
from dubito.methods.laplace.conditional_mean import conditional_mean
from dubito.methods.laplace.findings import Tuning, findings
from dubito.methods.laplace.forms import draws_outputs, linearized_forms
from dubito.methods.laplace.sampled_variance import variance_function
from dubito.networks.selection import Selection


class LaplacePosterior(Posterior):
    r"""The result of `Laplace`: $N(\hat w, P^{-1})$ over the selected weights, $P = s H + \Lambda$.

    Args:
        model: The network at the trained weights.
        likelihood, recipe, num_data: As for `Posterior`.
        selection: Which weights are random.
        sums: The accumulated curvature at unit noise.
        fit: The fit of the trained weights to the data.
        prior_precision: A number, or one value per random weight.
        known_evidence: After an update, the log evidence; else None.
        tuning: How the prior precision was chosen.
    """

    family = "Laplace"
    default_samples = 32
    trial: Trial | None = None  # of the engine that summed the curvature, if it was summed here
    draws_functions = False  # the linearized prediction draws the outputs of each input separately

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Selection,
        sums: dict[str, Any],
        fit: DataFit,
        prior_precision: Tensor | None = None,
        known_evidence: float | None = None,
        tuning: Tuning = Tuning(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.tuning = tuning
        is_here = all(tensor.device == self.device for tensor in io.tensors(sums))  # not if read from a file
        self.sums = io.contiguous(sums if is_here else io.clone(sums, self.device))
        self.selection, self.fit, self.known_evidence = selection, fit, known_evidence
        one = torch.ones((), dtype=torch.float64)
        self.prior_precision = (one if prior_precision is None else prior_precision.double()).to(self.device)

    # ------------------------------------------------------------------ the Gaussian

    @cached_property
    def engine(self) -> Engine:
        """The engine that computes gradients of the outputs."""
        return Engine(self.model, self.selection.names, self.trial)

    @shared_property
    def matrix(self) -> linalg.Matrix:
        """The curvature at unit noise."""
        return self.matrix_of(self.sums)

    def matrix_of(self, sums: dict[str, Any]) -> linalg.Matrix:
        """Return the curvature of accumulated sums."""
        if "matrix" in sums:  # a low-rank matrix after an update, which needs no further pass
            return linalg.LowRank.from_state(sums["matrix"])
        return matrix_from_sums(self.recipe.structure, sums, self.selection, self.model, self.recipe.rank)

    def owning(self) -> Self:
        """Mark the sums as used here only, so that a covariance root may overwrite the unused half of a matrix."""
        if self.recipe.structure == "full" and isinstance(self.matrix, linalg.Dense):
            self.matrix.lends = True
        return self

    def precision_matmul(self, vectors: Tensor) -> Tensor:
        """Return ``P v`` for the posterior's precision P."""
        return self.matrix.precision_matmul(vectors, self.prior_precision, self.scale)

    def precision_diagonal(self) -> Params:
        """Return the diagonal of the posterior's precision by parameter, zero for weights that are not random.

        Its inverse is the variance of a weight given all others; `marginals` returns the variances when none is known.
        """
        diagonal = self.scale * self.matrix.diagonal().double() + self.prior_precision
        zeros = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.mean().items()}
        return self.selection.merge(zeros, diagonal)

    def conditional_mean(self, keep: Mapping[str, Tensor]) -> Params:
        """Return the mean of the weights where `keep` is true, given that the others are zero."""
        return conditional_mean(self, keep)

    @property
    def noise(self) -> Tensor:
        """The noise of a Gaussian likelihood; 1 for others."""
        return known_noise(self.likelihood)

    @property
    def scale(self) -> Tensor:
        """The factor of the curvature in the precision; see `Evidence`."""
        return self.fit.scale(self.noise, self.recipe.temperature)

    @shared_property
    def evidence(self) -> Evidence:
        """The evidence as a function of prior precision and noise."""
        center = self.selection.ravel(self.mean()).double()
        prior_mean = torch.as_tensor(self.recipe.prior_mean, dtype=torch.float64, device=self.device)
        return Evidence(self.matrix, (center - prior_mean).square(), self.fit, self.recipe.temperature)

    @shared_property
    def covariance(self) -> linalg.Covariance:
        """The covariance of the random weights."""
        return self.matrix.covariance(self.prior_precision, self.scale)

    def with_settings(
        self, prior_precision: Tensor, likelihood: Likelihood, tuning: Tuning | None = None
    ) -> LaplacePosterior:
        """Return this posterior with another prior precision and noise; both share the curvature."""
        other = type(self)(
            self.model, likelihood, self.recipe, self.num_data, self.selection, self.sums, self.fit, prior_precision,
            tuning=tuning or self.tuning,
        )  # fmt: skip
        for name in ("engine", "matrix", "trial"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights from the Gaussian."""
        generator, size = default_generator(generator), self.selection.num_weights
        center = self.selection.ravel(self.mean())
        noise = self.covariance.sample(num_samples, size, generator, center)
        return self.selection.merge(self.mean(), noise.add_(center))

    def marginals(self) -> tuple[Params, Params]:
        """Return the trained weights and the marginal variances, zero for weights that are not random."""
        mean, variance = self.mean(), self.covariance.variance().to(self.device, self.dtype)
        return mean, self.selection.merge(params.zeros_like(mean), variance)

    def prior(self) -> tuple[Params, Params]:
        """Return the mean and the variance of the prior; a weight that is not random has its value as the mean."""
        mean, size = self.mean(), self.selection.num_weights
        center = torch.as_tensor(self.recipe.prior_mean, dtype=self.dtype, device=self.device).expand(size)
        variance = (1 / self.prior_precision).to(self.device, self.dtype).expand(size)
        return self.selection.merge(mean, center), self.selection.merge(params.zeros_like(mean), variance)

    def log_evidence(
        self, prior_precision: Tensor | float | None = None, noise: Tensor | float | None = None
    ) -> Tensor:
        """Return the log marginal likelihood; differentiable in both arguments.

        Args:
            prior_precision: A number or one per random weight; by default the posterior's own.
            noise: The standard deviation of a Gaussian likelihood; by default the posterior's own.
        """
        if self.known_evidence is not None:
            if prior_precision is not None or noise is not None:
                raise UnsupportedError("After an update, log_evidence() takes no arguments: call it without any.")
            return torch.tensor(self.known_evidence, dtype=torch.float64)
        prior = self.prior_precision
        if prior_precision is not None:
            prior = as_precision(prior_precision, self.selection, self.recipe.structure).to(self.device)
        return self.evidence.log(prior, self.noise if noise is None else torch.as_tensor(noise, dtype=torch.float64))

    def log_prob(self, weights: Params) -> Tensor:
        r"""Return the log-density of weights, $\tfrac12(\log\det P - \delta^\top P\,\delta - D \log 2\pi)$.

        Args:
            weights: One tensor per parameter, or ``[S, ...]`` as from `sample`; only random weights are used.
        """
        center, size = self.selection.ravel(self.mean()), self.selection.num_weights
        moved = (self.selection.ravel(weights).to(center) - center).double()
        log_det = self.matrix.log_det(self.prior_precision, self.scale)
        distance = (moved * self.precision_matmul(moved)).sum(-1)
        return 0.5 * (log_det - distance - size * math.log(2 * math.pi))

    # ------------------------------------------------------------------ the outputs

    @cached_property
    def linearized(self) -> Linearized:
        """The moments of the linearized outputs."""
        return Linearized(self.engine, self.matrix, self.selection, self.likelihood)

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw functions of the inputs, as `Posterior.functions`, of the linearized network that `predict` uses."""
        check("num_functions", Count, num_functions)
        draws, random = self.sample(num_functions, generator=generator), set(self.selection.names)
        center = {name: value for name, value in self.mean().items() if name in random}
        return network_functions(self.model, params.unstack(draws), center=center)

    def functional(self, inputs: Any, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of the linearized outputs, without noise.

        Args:
            inputs: One batch.
            joint: Whether the covariance is between all inputs; it builds their Jacobian, so use few inputs.

        Returns:
            The mean ``[B, O]`` of all outputs of an example in canonical order, and the covariance ``[B, O, O]``, or
            ``[B·O, B·O]`` if `joint`.
        """
        with self.working_copy() as own:
            return own.linearized.whole_covariance(self._placed(inputs), self.covariance, joint)

    def functional_samples(
        self, inputs: Any, num_samples: Count, *, joint: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw linearized outputs ``[S, B, O]``; if `joint`, one function per sample over all inputs.

        Otherwise all inputs use the same noise, but correlations between inputs are not those of the posterior.
        """
        check("num_samples", Count, num_samples)
        mean, covariance = self.functional(inputs, joint=joint)
        noise = links.Noise(num_samples, default_generator(generator))
        if not joint:
            return links.draw(mean, covariance, noise)
        return links.draw(mean.reshape(1, -1), covariance[None], noise).reshape(-1, *mean.shape)

    def predict(
        self,
        x: Any,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int = 1024,
        differentiable: bool = False,
        **options: Any,
    ) -> Prediction:
        """Predict; see `Posterior.predict`, and `predictor` for the options.

        Args:
            x: The inputs.
            num_samples: The number of samples of the outputs (or of the weights).
            generator: The source of randomness; by default the same call gives the same numbers.
            batch_size: The number of rows that are predicted at a time.
            differentiable: Keep gradients in `x` (tensors only) of mean and variance, or of the probit link's
                probabilities: for Bayesian optimization and other uses with few inputs.
            options: `method`, `link`, `centred`, `exact`, `top_k`.
        """
        if not differentiable:
            return super().predict(x, num_samples=num_samples, generator=generator, batch_size=batch_size, **options)
        if options:
            given = next(iter(options))
            raise InputError(f"A differentiable prediction is linearized with the probit link: drop '{given}'.")
        noise = links.Noise(num_samples or self.default_samples, default_generator(generator))
        centred = links.has_null_direction(self.likelihood)
        with self.working_copy() as own:
            outputs, variance = own.linearized.differentiable(self._placed(x), self.covariance, centred=centred)
        return links.predict(self.likelihood, outputs, variance, noise, centred=centred)

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["linearized", "weights"] = "linearized",
        link: links.LinkName = "probit",
        centred: bool = True,
        exact: bool | None = None,
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution as a function of inputs.

        Args:
            num_samples: The number of samples of the outputs (or of the weights).
            generator: The source of randomness.
            method: ``"linearized"``: Gaussian outputs; ``"weights"``: the nonlinear network at weight samples.
            link: How Gaussian logits become probabilities. Of numbers that are not Gaussian given the outputs, ``"mc"``
                draws a datum's outputs with their covariances, where the others take them as independent.
            centred: Ignore the variance along the direction that adds one constant to all logits, which changes no
                probability, in the probit link.
            exact: Whether the variance of every output is computed exactly, which takes a backward pass for each, or
                estimated from weight samples. By default exactly, except for more than 1,024 outputs of an example.
            options: No other option is known.
        """
        check("exact", bool | None, exact)
        found = links.find_link(link, self.likelihood)
        if method == "weights":
            return weight_predictor(self.model, self.likelihood, self.sample(num_samples, generator=generator))
        noise = links.Noise(num_samples, generator)
        if draws_outputs(self.likelihood, found):
            return lambda inputs: self._drawn(inputs, noise)
        centred = centred and links.has_null_direction(self.likelihood)
        moments = variance_function(self, generator, centred, exact)
        if links.is_classification(self.likelihood) and found.reads_covariance:
            moments = lambda inputs: self.linearized.covariance(inputs, self.covariance)  # noqa: E731
        return lambda inputs: links.predict(self.likelihood, *moments(inputs), noise, found, centred)

    def _drawn(self, inputs: Any, noise: links.Noise) -> Prediction:
        """Return the mixture over outputs that are drawn together; one output alone is integrated exactly."""
        outputs, covariance = self.linearized.covariance(inputs, self.covariance)
        if covariance.shape[-1] == 1:
            return links.predict(self.likelihood, outputs, covariance.squeeze(-1), noise)
        drawn = links.draw(self.likelihood.canonical(outputs), covariance, noise)
        return self.likelihood.predict_samples(self.likelihood.restore(drawn, outputs))

    def forms(
        self,
        example: Any,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["linearized", "weights"] = "linearized",
        link: links.LinkName = "probit",
        centred: bool = True,
        **options: Any,
    ) -> Iterator[Traceable]:
        """Yield the linearized prediction, in closed form if only the last layer is random; see `predictor`."""
        predict = self.predictor(num_samples, generator, method=method, link=link, **options)
        if method == "weights":
            yield Traceable(predict, f"{num_samples} weight samples")
            return
        noise = links.Noise(num_samples, generator)
        yield from linearized_forms(self, example, noise, links.find_link(link, self.likelihood), centred)

    def _placed(self, inputs: Any) -> Any:
        return self._checked(batches.place(batches.as_tensors(inputs), self.device, self.dtype))

    # ------------------------------------------------------------------ learning on, saving

    def own_findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the prior precision or the samples."""
        yield from findings(self.tuning, self.prior_precision, self.sums.get("error", 0.0), self.recipe.draws)

    def _updated(self, data: Data, **options: Any) -> LaplacePosterior:
        """Update with new data, with this posterior as the prior; see `dubito.methods.laplace.online`."""
        from dubito.methods.laplace.online import update

        return update(self, data, **options)

    def state(self) -> dict[str, Any]:
        """Return the sums, the selection and the tuned settings."""
        return {
            "selection": self.selection.to_state(),
            "sums": self.sums | {key: self.sums[key].triu() for key in ("full",) if key in self.sums},
            "fit": vars(self.fit),
            "prior_precision": self.prior_precision,
            "known_evidence": self.known_evidence,
            "tuning": self.tuning._asdict(),
        }

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        state = io.clone(state, torch.device("cpu"))  # sums stay on the CPU, whatever the model's device
        selection, fit = Selection.from_state(state["selection"], model), DataFit(**state["fit"])
        tuning = Tuning(**state.get("tuning", {}))  # files of the first version have none
        settings = (state["prior_precision"], state["known_evidence"], tuning)
        return cls(model, likelihood, recipe, num_data, selection, state["sums"], fit, *settings).owning()
