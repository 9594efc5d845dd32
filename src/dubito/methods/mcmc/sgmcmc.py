"""The `SGMCMC` recipe: stochastic-gradient samplers on any selection of weights."""

from __future__ import annotations

from typing import Annotated, Literal

from dubito.beliefs.priors import Prior
from dubito.core.constraints import Count, CountOrZero, Positive, Range, Start
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.training import Training
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.recipe import Sampler
from dubito.methods.mcmc.schedule import Schedule
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule


@setting
class SGMCMC(Sampler):
    r"""Sample weights by gradient descent on mini-batches with injected noise.

    $$p(w \mid D)^{1/T} \propto \exp\big(-U(w)/T\big), \qquad U(w) = -\sum_n \log p(y_n \mid x_n, w) - \log p(w)$$

    A kernel (see `dubito.mcmc.kernels` for the equations and their errors) moves the selected weights only. If the data
    is in memory, the layers before the first random one are computed once. A chain makes
    ``burn_in + thinning * num_samples`` steps; of `Training` only the batch size and the checkpoint are used.

    Args:
        kernel: ``"sgld"``, ``"psgld"``, ``"sghmc"`` or ``"sgnht"``.
        schedule: ``"constant"``, ``"decay"`` or ``"cyclical"``; see `dubito.mcmc.schedule.Schedule`.
        weights: Which weights are random; the others stay at their trained values.
        prior: One of `dubito.priors`, with fixed scales. None is a normal density around the model's weights with a
            quarter of their root mean square as standard deviation; the standard normal if the start is fresh, or if
            they are all 0, as the coordinates of a subspace are.
        chains: The number of chains; several processes divide them among themselves.
        burn_in: The number of first steps, which are dropped.
        thinning: The number of steps between two samples.
        num_samples: The number of samples per chain.
        temperature: T; below 1 makes the posterior narrower.
        step_size: The learning rate of gradient descent on the mean loss; ``"auto"`` takes a fraction of the largest
            stable one, given the largest curvature at the start and during burn-in, and less if the noise of mini-batch
            gradients would heat the chain.
        friction: The fraction of the momentum that one step removes, for ``"sghmc"`` and ``"sgnht"``.
        cycles: The number of cycles, for ``"cyclical"``.
        start: ``"model"`` starts all chains at the model's weights, ``"fresh"`` each at newly initialized ones,
            ``"head"`` with a new output layer.
        memory: Samples up to this many megabytes are held in memory; more are stored in files.
    """

    setting_name = "SGMCMC"
    kernel: Literal["sgld", "psgld", "sghmc", "sgnht"] = "sghmc"
    schedule: Literal["constant", "decay", "cyclical"] = "constant"
    weights: SelectionRule = all_weights()
    prior: Prior | None = None
    chains: Count = 1
    burn_in: CountOrZero = 1000
    thinning: Count = 50
    num_samples: Count = 100
    temperature: Positive = 1.0
    step_size: Positive | Literal["auto"] = "auto"
    friction: Annotated[float, Range(0, 1, above=True)] = 0.05
    cycles: Count = 4
    start: Start = "model"
    memory: Positive = 64.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel == "psgld" and self.burn_in == 0:
            raise InputError("SGMCMC('psgld') adapts its preconditioner during burn-in: set burn_in to at least 1.")

    @property
    def explores_modes(self) -> bool:
        """Whether samples come from several modes of the posterior."""
        return self.schedule == "cyclical" or (self.redraws and self.chains > 1)

    @property
    def sample_schedule(self) -> Schedule:
        """The schedule of the chain's steps and samples."""
        return Schedule(self.schedule, self.burn_in, self.thinning, self.num_samples, self.cycles)

    def default_training(self) -> Training:
        """Return settings with batches that are large enough for little noise in the gradients."""
        return Training(batch_size=1024)

    def build_after(self, problem: Problem, before: ParticlePosterior | None) -> Inference:
        """Return the transitions; in an update, the particles of `before` are the prior and the start."""
        from dubito.methods.mcmc.transitions import Transitions

        return Transitions(self, problem, before).inference()
