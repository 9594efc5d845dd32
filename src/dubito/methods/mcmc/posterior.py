"""The posterior that samplers find: particles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import limits, params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.fitting.history import History
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.working_copies import shared_property
from dubito.methods.mcmc.cached_head import Tail, split
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    from dubito.core.batches import Data
    from dubito.fitting.training import Training
    from dubito.methods.mcmc.diagnosis import Diagnosis


class ParticlePosterior(Posterior):
    """A set of equally likely weights: what chains visited, or where particles settled.

    Args:
        model: The network at the mean of the particles; at the last one where they sit in several modes.
        likelihood: The likelihood, its noise at the mean of what was sampled.
        recipe: The recipe.
        num_data: The number of examples seen in all.
        selection: Which weights are random.
        samples: ``[K, S, D + H]``: of each chain the selected weights, then the logarithm of a sampled noise.
        prior_moments: Mean and variance of the prior ``[D]``, or None where it has none.
        statistics: Numbers of every sample ``[K, S]``, such as ``"energy"`` and ``"acceptance"``.
        trace: What the network says at every sample about some training inputs, ``[K, S, P]``.
        buffers: Buffers of every sample ``[K, S, ...]``, where they moved along.
        settings: What the sampler chose by itself, such as ``"step_size"``, one per chain.
    """

    family = "Particles"
    default_samples = 64

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Selection,
        samples: Tensor,
        prior_moments: tuple[Tensor, Tensor] | None,
        statistics: dict[str, Tensor],
        trace: Tensor,
        buffers: Params | None = None,
        settings: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.selection, self.samples, self.prior_moments = selection, samples, prior_moments
        self.statistics, self.trace = statistics, trace
        self.buffers, self.settings = buffers or {}, settings or {}

    @property
    def num_particles(self) -> int:
        """How many particles there are in all."""
        return self.samples.shape[0] * self.samples.shape[1]

    @property
    def samples_noise(self) -> bool:
        """Whether the noise of a regression was sampled along with the weights."""
        return self.samples.shape[-1] > self.selection.num_weights

    @property
    def _open_likelihood(self) -> Likelihood:
        """The likelihood before its noise was a number, where that was sampled."""
        return self.likelihood.replace(noise="learn") if self.samples_noise else self.likelihood

    @property
    def has_one_mode(self) -> bool:
        """Whether all particles belong to one neighbourhood, so that their mean is a network of the same kind."""
        return not self.recipe.explores_modes

    @shared_property
    def flat(self) -> Tensor:
        """All particles ``[K·S, D + H]``."""
        return self.samples.flatten(0, 1)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw particles, with replacement."""
        generator = default_generator(generator)
        shape = (num_samples,)
        chosen = torch.randint(self.num_particles, shape, generator=generator, device=generator.device)
        return self._merged(self.flat[chosen.to(self.flat.device)])

    def marginals(self) -> tuple[Params, Params]:
        """Return mean and variance over the particles; the variance is 0 where a weight is not random."""
        self._require_one_mode("marginals")
        _, variance = mean_and_variance(self.flat[:, : self.selection.num_weights])
        mean, variance = self.mean(), variance.to(self.device, self.dtype)
        return mean, self.selection.merge(params.zeros_like(mean), variance)

    def prior(self) -> tuple[Params, Params]:
        """Return mean and variance of the prior; a weight that is not random keeps its value."""
        if self.prior_moments is None:
            raise UnsupportedError(f"The prior {self.recipe.prior!r} has no finite mean and variance.")
        mean = self.mean()
        center, variance = (part.to(self.device, self.dtype) for part in self.prior_moments)
        return self.selection.merge(mean, center), self.selection.merge(params.zeros_like(mean), variance)

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the mixture over `num_samples` particles, evenly spaced among all of them (or over all)."""
        if options:
            raise InputError(f"A Particles posterior has no predict option '{next(iter(options))}'.")
        return self._over(self.spaced(num_samples))

    def predictors(self, num_samples: int, generator: torch.Generator, **options: Any) -> list[Predictor]:
        """Return a predictor for each of as many particles, evenly spaced; where there are fewer they come again."""
        if options:
            return super().predictors(num_samples, generator, **options)
        chosen = self.spaced(num_samples)
        return [self._over([chosen[s % len(chosen)]]) for s in range(num_samples)]

    def _over(self, chosen: list[int]) -> Predictor:
        """The mixture over particles by number."""
        members = [self.member(index) for index in chosen]
        hyper = {"log_noise": self.flat[chosen, -1].to(self.device)} if self.samples_noise else None
        tails: list[Tail | None] = []  # looked for at the first batch

        def predict(inputs: Any) -> Any:
            if not tails:
                tails.append(None if self.buffers else split(self.model, self.selection.names, inputs))
            if tails[0] is None:
                outputs = [params.functional_call(self.model, member, inputs) for member in members]
            else:
                outputs = self._through(tails[0], members, inputs)
            return self._open_likelihood.predict_samples(torch.stack(outputs), hyper)

        return predict

    def _through(self, tail: Tail, members: list[Params], inputs: Any) -> list[Tensor]:
        """Run what comes before the first random layer once, and the rest for every member."""
        features, outputs = tail.features(inputs), []
        for member in members:
            with params.swapped(self.model, member):
                outputs.append(tail(features))
        return outputs

    def spaced(self, count: int) -> list[int]:
        """Return the numbers of `count` particles, evenly spaced, or of all if there are no more."""
        total = self.num_particles
        if count >= total:
            return list(range(total))
        return [int((i + 0.5) * total / count) for i in range(count)]

    def member(self, index: int) -> Params:
        """Return the weights of one particle, and its buffers where it has its own; what is not random is left out."""
        flat = self.flat[index, : self.selection.num_weights].to(self.device)
        base = {name: value.detach() for name, value in self.model.named_parameters() if name in self.selection.names}
        own = {name: value.flatten(0, 1)[index].to(self.device) for name, value in self.buffers.items()}
        return {**self.selection.merge(base, flat), **own}

    def update(
        self,
        data: Data,
        *,
        training: Training | None = None,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> ParticlePosterior:
        """Learn on from new data: the particles' moments are the prior, and chains go on where they ended."""
        from dubito.methods.mcmc.online import Continue

        self._require_one_mode("an update")
        options: dict[str, Any] = {"training": training, "generator": generator, "progress": progress}
        return Continue(self).fit(self.model, data, likelihood=self._open_likelihood, **options)  # type: ignore[return-value]

    def diagnose(self) -> Diagnosis:
        """Say in plain words whether to trust the samples, and what to change if not."""
        from dubito.methods.mcmc.diagnosis import diagnose

        return diagnose(self)

    def history(self) -> History | None:
        """Return the diagnosis in words, and the traces of what mixes worst; None without a chain."""
        from dubito.methods.mcmc.history import history

        return history(self) if self.recipe.is_chain else None

    def _merged(self, flat: Tensor) -> Params:
        return self.selection.merge(self.mean(), flat[..., : self.selection.num_weights].to(self.device))

    def _require_one_mode(self, what: str) -> None:
        if not self.has_one_mode:
            raise UnsupportedError(
                f"The particles of {self.recipe!r} sit in several modes, over which {what} would mean nothing: use one "
                "chain with a constant or decaying step, or sample()."
            )

    def state(self) -> dict[str, Any]:
        """Return selection, particles and what was measured along the way."""
        return {
            "selection": self.selection.to_state(),
            "samples": self.samples,
            "prior_moments": None if self.prior_moments is None else list(self.prior_moments),
            "statistics": self.statistics,
            "trace": self.trace,
            "buffers": self.buffers,
            "settings": self.settings,
        }

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        selection, moments = Selection.from_state(state["selection"], model), state["prior_moments"]
        rest = [state[name] for name in ("statistics", "trace", "buffers", "settings")]
        pair = None if moments is None else (moments[0], moments[1])
        return cls(model, likelihood, recipe, num_data, selection, state["samples"], pair, *rest)


def mean_and_variance(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of samples ``[S, D]`` in float64, a few at a time: they may be larger than memory.

    >>> mean, variance = mean_and_variance(torch.tensor([[1.0], [3.0]]))
    >>> mean.item(), variance.item()
    (2.0, 1.0)
    """
    parts = samples.split(max(1, limits.current().drawn_weights // (8 * samples.shape[1])))
    mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(samples)
    squares = torch.stack([(part.double() - mean).square().sum(0) for part in parts]).sum(0)
    return mean, squares / len(samples)


def function_values(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return what is traced of the outputs: log-probabilities of classes, else the outputs themselves; flat."""
    canonical = likelihood.canonical(outputs)
    return (canonical.log_softmax(-1) if isinstance(likelihood, Categorical) else canonical).flatten()
