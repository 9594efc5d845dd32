"""The `SGMCMC` recipe: stochastic-gradient samplers on any selection of weights."""

from __future__ import annotations

from typing import Annotated, Literal

from dubito.beliefs.priors import Normal, Prior
from dubito.core.constraints import Count, CountOrZero, Positive, Range, Start
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.recipe import Sampler, check_sampler
from dubito.methods.mcmc.schedule import Schedule
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule


@setting
class SGMCMC(Sampler):
    r"""Sample weights along noisy gradient descent on mini-batches.

    $$p(w \mid D)^{1/T} \propto \exp\big(-U(w)/T\big), \qquad U(w) = -\sum_n \log p(y_n \mid x_n, w) - \log p(w)$$

    A kernel (see `dubito.mcmc.kernels` for the equations and their errors) moves the selected weights only; what comes
    before the first random layer is computed once where the data is in memory. A chain makes
    ``burn_in + thinning * num_samples`` steps; `Training` gives only the batch size and the checkpoint.

    Args:
        kernel: ``"sgld"``, ``"psgld"``, ``"sghmc"`` or ``"sgnht"``.
        schedule: ``"constant"``, ``"decay"`` or ``"cyclical"``; see `dubito.mcmc.schedule.Schedule`.
        weights: Which weights are random; the rest stay at their trained value.
        prior: One of `dubito.priors`, with numbers.
        chains: How many chains; under several processes they are shared out.
        burn_in: Steps before the first that can be kept.
        thinning: Steps from one sample to the next.
        num_samples: Samples that are kept of each chain.
        temperature: T; below 1 makes the posterior narrower.
        step_size: The learning rate that descent on the mean loss would have; ``"auto"`` takes a fraction of what is
            stable at the start, from the largest curvature.
        friction: The share of the momentum that is lost in a step, for ``"sghmc"`` and ``"sgnht"``.
        cycles: How many cycles, for ``"cyclical"``.
        start: ``"model"`` starts all chains at the model's weights, ``"fresh"`` each at newly drawn ones.
        memory: Megabytes of samples that are held in memory; more are kept in files.
    """

    setting_name = "SGMCMC"
    kernel: Literal["sgld", "psgld", "sghmc", "sgnht"] = "sghmc"
    schedule: Literal["constant", "decay", "cyclical"] = "constant"
    weights: SelectionRule = all_weights()
    prior: Prior = Normal()
    chains: Count = 1
    burn_in: CountOrZero = 1000
    thinning: Count = 20
    num_samples: Count = 100
    temperature: Positive = 1.0
    step_size: Positive | Literal["auto"] = "auto"
    friction: Annotated[float, Range(0, 1, above=True)] = 0.1
    cycles: Count = 4
    start: Start = "model"
    memory: Positive = 64.0

    def __post_init__(self) -> None:
        check_sampler(self)
        if self.kernel == "psgld" and self.burn_in == 0:
            raise InputError("SGMCMC('psgld') learns its preconditioner during burn-in: give it some steps.")

    @property
    def explores_modes(self) -> bool:
        """Whether samples come from several modes."""
        return self.schedule == "cyclical" or (self.starts_fresh and self.chains > 1)

    @property
    def sample_schedule(self) -> Schedule:
        """When a chain moves how far, and when it is kept."""
        return Schedule(self.schedule, self.burn_in, self.thinning, self.num_samples, self.cycles)

    def build_after(self, problem: Problem, before: ParticlePosterior | None) -> Inference:
        """Return the transitions; after an earlier posterior its particles are prior and start."""
        from dubito.methods.mcmc.transitions import Transitions

        return Transitions(self, problem, before).inference()
