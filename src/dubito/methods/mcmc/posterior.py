"""The posterior of samplers: a set of particles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import limits, params
from dubito.core.constraints import Count, check
from dubito.core.errors import UnsupportedError
from dubito.core.params import Params
from dubito.core.randomness import default_generator
from dubito.fitting.functions import Functions, network_functions
from dubito.fitting.history import History
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.fitting.working_copies import shared_property
from dubito.methods.mcmc.cached_head import RandomHead, split
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    from dubito.core.batches import Data
    from dubito.methods.mcmc.diagnosis import ChainDiagnosis


class ParticlePosterior(Posterior):
    """A set of equally weighted particles: the samples of chains, or the result of SVGD.

    Args:
        model: The network at the mean of the particles, or at the last one if they come from several modes.
        likelihood: The likelihood; a sampled noise is at its mean.
        recipe: The recipe.
        num_data: The number of examples of all fits together.
        selection: Which weights are random.
        samples: ``[K, S, D + H]``: for each chain the selected weights, then the logarithm of a sampled noise.
        prior_moments: Mean and variance of the prior ``[D]``, or None if they are not finite.
        statistics: Statistics of every sample ``[K, S]``, such as ``"energy"`` and ``"acceptance"``.
        trace: Outputs at some training inputs for every sample, ``[K, S, P]``.
        buffers: Buffers of every sample ``[K, S, ...]``, if they changed during sampling.
        settings: Settings that the sampler adapted, such as ``"step_size"``, one per chain.
    """

    family = "Particles"
    saved = ("selection", "samples", "prior_moments", "statistics", "trace", "buffers", "settings")
    default_samples = 64

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        recipe: Any,
        num_data: int,
        selection: Selection,
        samples: Tensor,
        prior_moments: Sequence[Tensor] | None,
        statistics: dict[str, Tensor],
        trace: Tensor,
        buffers: Params | None = None,
        settings: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(model, likelihood, recipe, num_data)
        self.selection, self.samples = selection, samples
        self.prior_moments = None if prior_moments is None else (prior_moments[0], prior_moments[1])
        self.statistics, self.trace = statistics, trace
        self.buffers, self.settings = buffers or {}, settings or {}

    @property
    def num_particles(self) -> int:
        """The number of particles of all chains."""
        return self.samples.shape[0] * self.samples.shape[1]

    @property
    def samples_noise(self) -> bool:
        """Whether the likelihood's learned number, such as the noise, was sampled with the weights."""
        return self.samples.shape[-1] > self.selection.num_weights

    @property
    def _open_likelihood(self) -> Likelihood:
        """The likelihood whose learned number, such as the noise, is open if it was sampled."""
        return self.likelihood.opened() if self.samples_noise else self.likelihood

    @property
    def has_one_mode(self) -> bool:
        """Whether all particles belong to one mode, so that their mean is a useful network."""
        return not self.recipe.explores_modes

    @shared_property
    def flat(self) -> Tensor:
        """All particles ``[K·S, D + H]``."""
        return self.samples.flatten(0, 1)

    def sample(self, num_samples: int, *, generator: torch.Generator | None = None) -> Params:
        """Draw particles with replacement."""
        generator = default_generator(generator)
        shape = (num_samples,)
        chosen = torch.randint(self.num_particles, shape, generator=generator, device=generator.device)
        return self._merged(self.flat[chosen.to(self.flat.device)])

    def functions(self, num_functions: Count, *, generator: torch.Generator | None = None) -> Functions:
        """Draw particles as functions, each with its own buffers."""
        check("num_functions", Count, num_functions)
        generator = default_generator(generator)
        chosen = torch.randint(self.num_particles, (num_functions,), generator=generator, device=generator.device)
        return network_functions(self.model, [self.member(index) for index in chosen.tolist()])

    def marginals(self) -> tuple[Params, Params]:
        """Return the mean and the variance of the particles; the variance is 0 for weights that are not random."""
        self._require_one_mode("marginals")
        _, variance = mean_and_variance(self.flat[:, : self.selection.num_weights])
        mean, variance = self.mean(), variance.to(self.device, self.dtype)
        return mean, self.selection.merge(params.zeros_like(mean), variance)

    def prior(self) -> tuple[Params, Params]:
        """Return the mean and the variance of the prior; a weight that is not random has its value as the mean."""
        if self.prior_moments is None:
            raise UnsupportedError(f"The prior {self.recipe.prior!r} has no finite mean and variance.")
        mean = self.mean()
        center, variance = (part.to(self.device, self.dtype) for part in self.prior_moments)
        return self.selection.merge(mean, center), self.selection.merge(params.zeros_like(mean), variance)

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the mixture over at most `num_samples` particles, evenly spaced."""
        return self._over(self.spaced(num_samples))

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the mixture over the particles; layers without random weights are computed once."""
        count = min(num_samples, self.num_particles)
        yield Traceable(self.predictor(num_samples, generator, **options), f"{count} weight samples")

    def predictors(self, num_samples: int, generator: torch.Generator, **options: Any) -> list[Predictor]:
        """Return one predictor for each of `num_samples` evenly spaced particles; if there are fewer, they repeat."""
        if options:
            return super().predictors(num_samples, generator, **options)
        chosen = self.spaced(num_samples)
        return [self._over([chosen[s % len(chosen)]]) for s in range(num_samples)]

    def _over(self, chosen: list[int]) -> Predictor:
        """Return the mixture over the particles with the given indices."""
        members = [self.member(index) for index in chosen]
        numbers = self.flat[chosen, -1].to(self.device) if self.samples_noise else None
        hyper = None if numbers is None else {f"log_{self.likelihood.learned_setting}": numbers}
        heads: list[RandomHead | None] = []  # found with the first batch

        def predict(inputs: Any) -> Any:
            if not heads:
                heads.append(None if self.buffers else split(self.model, self.selection.names, inputs))
            if heads[0] is None:
                outputs = [params.functional_call(self.model, member, inputs) for member in members]
            else:
                outputs = self._through(heads[0], members, inputs)
            return self._open_likelihood.predict_samples(torch.stack(outputs), hyper)

        return predict

    def _through(self, head: RandomHead, members: list[Params], inputs: Any) -> list[Tensor]:
        """Run the layers before the first random one once, and the others for every member."""
        features, outputs = head.features(inputs), []
        for member in members:
            with params.swapped(self.model, member):
                outputs.append(head(features))
        return outputs

    def spaced(self, count: int) -> list[int]:
        """Return the indices of `count` evenly spaced particles, or of all if there are fewer."""
        total = self.num_particles
        if count >= total:
            return list(range(total))
        return [int((i + 0.5) * total / count) for i in range(count)]

    def member(self, index: int) -> Params:
        """Return the random weights of one particle, and its buffers if it has its own."""
        flat = self.flat[index, : self.selection.num_weights].to(self.device)
        base = {name: value.detach() for name, value in self.model.named_parameters() if name in self.selection.names}
        own = {name: value.flatten(0, 1)[index].to(self.device) for name, value in self.buffers.items()}
        return {**self.selection.merge(base, flat), **own}

    def _updated(self, data: Data, **options: Any) -> ParticlePosterior:
        """Update with new data: the particles' moments are the prior, and chains continue where they ended."""
        from dubito.methods.mcmc.recipe import UpdateParticles

        self._require_one_mode("an update")
        return UpdateParticles(self).fit(self.model, data, likelihood=self._open_likelihood, **options)  # type: ignore[return-value]

    def diagnose(self) -> ChainDiagnosis:
        """Return whether the samples can be trusted, and what to change if not."""
        from dubito.methods.mcmc.diagnosis import diagnose

        return diagnose(self)

    def history(self) -> History | None:
        """Return the text of the diagnosis and the traces that mix worst; None without a chain."""
        from dubito.methods.mcmc.diagnosis import history

        return history(self) if self.recipe.is_chain else None

    def _merged(self, flat: Tensor) -> Params:
        return self.selection.merge(self.mean(), flat[..., : self.selection.num_weights].to(self.device))

    def _require_one_mode(self, what: str) -> None:
        if not self.has_one_mode:
            raise UnsupportedError(
                f"The particles of {self.recipe!r} come from several modes, across which {what} would be meaningless: "
                "use one chain with a constant or decaying step size, or sample()."
            )

    def state(self) -> dict[str, Any]:
        """Return the selection, the particles and their statistics."""
        moments = None if self.prior_moments is None else list(self.prior_moments)
        return {**super().state(), "prior_moments": moments}


def mean_and_variance(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of samples ``[S, D]`` in float64, in parts, as they may exceed memory.

    >>> mean, variance = mean_and_variance(torch.tensor([[1.0], [3.0]]))
    >>> mean.item(), variance.item()
    (2.0, 1.0)
    """
    parts = samples.split(max(1, limits.current().drawn_weights // (8 * samples.shape[1])))
    mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(samples)
    squares = torch.stack([(part.double() - mean).square().sum(0) for part in parts]).sum(0)
    return mean, squares / len(samples)


def function_values(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return the traced values, flat: log-probabilities of classes, or the outputs of a regression."""
    canonical = likelihood.canonical(outputs)
    return (canonical.log_softmax(-1) if isinstance(likelihood, Categorical) else canonical).flatten()
