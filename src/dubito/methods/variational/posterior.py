"""The posterior of `Variational`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import Prediction
from dubito.beliefs.priors import GroupPrior, Prior
from dubito.beliefs.priors.base import Value, unchecked
from dubito.core import limits, params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.limits import numbers
from dubito.core.params import Params
from dubito.core.randomness import default_generator, draw_seed
from dubito.core.settings import Setting
from dubito.fitting.functions import weight_predictor
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.methods.variational.diagnosis import diagnose
from dubito.methods.variational.joint import Correlations
from dubito.methods.variational.predicting import local_predictor, moment_forms, predict_to
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    from dubito.core.batches import Data
    from dubito.methods.variational.diagnosis import VariationalDiagnosis
    from dubito.methods.variational.module import VariationalModule


@dataclass(frozen=True)
class Record:
    """Measurements on the training data after the fit; log-likelihoods are sums over the data, in nats.

    Args:
        num_data: The number of examples of this fit.
        log_likelihood: The expected log-likelihood under the posterior, from several samples.
        log_likelihood_error: Its standard error.
        log_likelihood_at_mean: The log-likelihood of the network at the means.
        log_likelihood_at_start: The log-likelihood of the network before the fit; None for a fresh start.
        kl: The KL divergence from the prior.
        gradient_noise: The fraction of the last squared gradients that is noise; None if the optimizer has no moments.
        moving_scales: The fraction of scales that had not converged when training ended; None as above.
        earlier_bound: In an update, the ELBO of the earlier data.
    """

    num_data: int
    log_likelihood: float
    log_likelihood_error: float
    log_likelihood_at_mean: float
    log_likelihood_at_start: float | None
    kl: float
    gradient_noise: float | None
    moving_scales: float | None
    earlier_bound: float | None


class VariationalPosterior(Posterior):
    r"""The result of `Variational`: a normal distribution over the selected weights, independent by default.

    Args:
        model: The network at the means.
        likelihood, recipe, num_data: As for `Posterior`.
        selection: Which weights are random.
        scale: The marginal standard deviations ``[D]`` of the random weights.
        priors: The prior of each parameter's random entries, with its learned values.
        record: The measurements on the training data.
        factor: The correlations of a ``"low-rank"`` or ``"full"`` family; see `dubito.variational.joint`.
    """

    family = "Variational"
    noise_shrinks = False  # the bound pays for the uncertainty of weights

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Selection,
        scale: Tensor,
        priors: dict[str, Prior],
        record: Record,
        factor: Tensor | None = None,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.selection, self.scale, self.priors, self.record = selection, scale, priors, record
        self.factor = factor

    @property
    def correlations(self) -> Correlations | None:
        """The correlations of the weights, or None if they are independent."""
        return None if self.factor is None else Correlations(self.recipe.family, self.factor)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw weights."""
        generator, center = default_generator(generator), self.selection.ravel(self.mean())
        shape = (num_samples, self.selection.num_weights)
        noise = torch.randn(shape, generator=generator, dtype=center.dtype, device=generator.device).to(center.device)
        correlations = self.correlations
        if correlations is not None:
            noise = correlations.apply(noise, generator).div_(correlations.spread())
        return self.selection.merge(self.mean(), noise.mul_(self.scale).add_(center))

    def marginals(self) -> tuple[Params, Params]:
        """Return means and variances; the variance is 0 for weights that are not random."""
        mean = self.mean()
        return mean, self.selection.merge(params.zeros_like(mean), self.scale.square())

    def prior(self) -> tuple[Params, Params]:
        """Return the mean and the variance of the prior; a weight that is not random has its value as the mean."""
        mean, zeros = self.mean(), params.zeros_like(self.mean())
        center = self._by_weight(lambda prior: prior.mean())
        variance = self._by_weight(lambda prior: prior.variance())
        return self.selection.merge(mean, center), self.selection.merge(zeros, variance)

    def predict(
        self,
        x: Any,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        batch_size: int = 1024,
        standard_error: float | None = None,
        **options: Any,
    ) -> Prediction:
        """Predict; see `Posterior.predict`.

        Args:
            x: The inputs.
            num_samples: The number of weight samples; with `standard_error`, the largest number (by default 1,024).
            generator: The source of randomness; by default the same call gives the same numbers.
            batch_size: The number of rows that are predicted at a time.
            standard_error: Draw samples until every class probability (in regression: every mean) has this standard
                error. The result equals that of a call with the final number of samples.
            options: ``method="weights"``, ``"local"`` or ``"mean"``; see `predictor`.
        """
        options |= {"batch_size": batch_size}
        if standard_error is None:
            return super().predict(x, num_samples=num_samples, generator=generator, **options)
        if options.get("method") == "mean":
            raise InputError("method='mean' draws no samples and has no standard error: drop standard_error.")
        seed = draw_seed(default_generator(generator))

        def predict(count: int) -> Prediction:
            own = torch.Generator().manual_seed(seed)
            return Posterior.predict(self, x, num_samples=count, generator=own, **options)

        keep = options.pop("keep_samples", None)  # applies to the result; the error is estimated from samples
        options["keep_samples"] = True
        found = predict_to(standard_error, num_samples, predict)
        return found.summary() if keep is False else found

    def predictor(
        self,
        num_samples: int,
        generator: torch.Generator,
        *,
        method: Literal["weights", "local", "mean"] = "weights",
        **options: Any,
    ) -> Predictor:
        """Return the predictive distribution as a function of inputs.

        Args:
            num_samples: The number of weight samples.
            generator: The source of randomness.
            method: ``"weights"``: the network at weight samples, the same for all inputs of a call. ``"local"``: noise
                on the outputs of each layer, which is cheaper because all samples share the first layer's moments; the
                samples of different inputs are then independent. ``"mean"``: the network at the means, one pass without
                epistemic uncertainty.
            options: No other option is known.
        """
        if method == "mean":
            return lambda inputs: self.likelihood.predict(params.call(self.model, inputs))
        if method == "local":
            return local_predictor(self._converted(), self.likelihood, num_samples)
        return self._weight_predictor(num_samples, generator)

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield moments that are propagated through the layers, if weights are independent, and then weight samples."""
        if not options and self.factor is None and not isinstance(self.recipe.prior, GroupPrior):
            yield from moment_forms(self, example)
        if options.get("method") == "local":
            raise UnsupportedError("method='local' draws noise for each input, which a file cannot: use 'weights'.")
        yield Traceable(self.predictor(num_samples, generator, **options), f"{num_samples} weight samples")

    def _weight_predictor(self, num_samples: int, generator: torch.Generator) -> Predictor:
        if num_samples * self.selection.num_weights <= numbers(limits.current().kept_weights):
            return weight_predictor(self.model, self.likelihood, self.sample(num_samples, generator=generator))
        seeds = [draw_seed(generator) for _ in range(num_samples)]
        return lambda inputs: self.likelihood.predict_samples(
            torch.stack([self._outputs(inputs, torch.Generator().manual_seed(seed)) for seed in seeds])
        )

    def _converted(self) -> VariationalModule:
        """Return the posterior as a module that puts noise on outputs."""
        from dubito.methods.variational.conversion import convert

        if self.factor is not None or isinstance(self.recipe.prior, GroupPrior):
            raise InputError("method='local' needs independent weights: use method='weights' with this posterior.")
        scales = self.by_name(self.scale)
        return convert(self.model, estimator="local", initial_scale=scales, biases="random", weights=self.selection)

    def by_name(self, flat: Tensor) -> Params:
        """Split values ``[D]`` by parameter, each in its shape, or as a vector if only some entries are random."""
        found = {}
        for name, span in self.selection.slices.items():
            whole = self.selection.is_whole(name)
            found[name] = flat[span].reshape(self.selection.shapes[name]) if whole else flat[span]
        return found

    def _outputs(self, inputs: Any, generator: torch.Generator) -> Tensor:
        weights = params.unstack(self.sample(1, generator=generator))[0]
        return params.functional_call(self.model, weights, inputs)

    @property
    def bound(self) -> float | None:
        """The evidence lower bound of all data so far, or None if the prior is improper."""
        if not all(prior.proper for prior in self.priors.values()):
            return None
        return self.record.log_likelihood - self.record.kl + (self.record.earlier_bound or 0.0)

    def log_evidence(self) -> Tensor:
        r"""Return the evidence lower bound $\mathbb E_q[\log p(D \mid w)] - \mathrm{KL}(q \,\|\, p) \le \log p(D)$.

        It is the bound at temperature 1, whatever the temperature of the fit. After updates it is the sum of the bounds
        of all fits, each with the posterior before it as the prior.
        """
        if self.bound is None:
            raise UnsupportedError("A log-uniform prior is improper and defines no evidence; use priors.ARD() instead.")
        return torch.tensor(self.bound, dtype=torch.float64)

    def _updated(self, data: Data, **options: Any) -> VariationalPosterior:
        """Update with new data, with this posterior as the prior; see `dubito.variational.online`."""
        from dubito.methods.variational.online import UpdateVariational

        return UpdateVariational(self).fit(self.model, data, likelihood=self.likelihood, **options)  # type: ignore[return-value]

    def learned_priors(self) -> Mapping[str, Prior]:
        """Return the priors of the parameters that are random as a whole."""
        return {name: prior for name, prior in self.priors.items() if self.selection.is_whole(name)}

    def diagnose(self) -> VariationalDiagnosis:
        """Return whether the posterior can be trusted, and what to change if not."""
        return diagnose(self)

    def divergences(self) -> Tensor | None:
        """Return the KL divergence of each random weight from its prior ``[D]``, or None without a closed form."""
        mean = self.selection.ravel(self.mean())
        parts = []
        for name, prior in self.priors.items():
            span = self.selection.slices[name]
            tensors = {n: v.flatten() for n, v in prior.fields().items() if isinstance(v, Tensor) and v.ndim}
            part = unchecked(prior, **tensors).kl(mean[span], self.scale[span])
            if part is None:
                return None
            parts.append(part)
        return torch.cat(parts)

    def _by_weight(self, value_of: Callable[[Prior], Value]) -> Tensor:
        """Return a value of each weight's prior as one vector ``[D]``."""
        parts = []
        for name, prior in self.priors.items():
            span = self.selection.slices[name]
            value = torch.as_tensor(value_of(prior), dtype=self.dtype, device=self.device)
            parts.append(value.flatten().expand(span.stop - span.start))
        return torch.cat(parts)

    def state(self) -> dict[str, Any]:
        """Return the selection, the scales, the priors and the record."""
        tensors: dict[str, Tensor] = {}
        priors = {name: json.dumps(prior.to_json(tensors)) for name, prior in self.priors.items()}
        return {
            "selection": self.selection.to_state(),
            "scale": self.scale,
            "priors": priors,
            "prior_tensors": tensors,
            "record": asdict(self.record),
            "factor": self.factor,
        }

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        tensors = state["prior_tensors"]
        priors = {name: Setting.from_json(json.loads(text), tensors) for name, text in state["priors"].items()}
        selection, record = Selection.from_state(state["selection"], model), Record(**state["record"])
        found = (selection, state["scale"], priors, record, state.get("factor"))
        return cls(model, likelihood, recipe, num_data, *found)
