"""The `HMC` recipe: full-batch Hamiltonian Monte Carlo, the gold standard for small selections."""

from __future__ import annotations

from typing import Annotated, Literal

from dubito.beliefs.priors import Prior
from dubito.core.constraints import Count, CountOrZero, OpenProbability, Positive
from dubito.core.settings import Absent, setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.recipe import Sampler
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule

ChainStart = Annotated[
    Literal["model", "fresh", "head"] | Posterior | Absent, "'model', 'fresh', 'head' or a posterior to start from"
]


@setting
class HMC(Sampler):
    r"""Sample weights by Hamiltonian trajectories over all the data: exact up to Monte Carlo error.

    $$p(w \mid D)^{1/T}, \qquad H(w, p) = U(w)/T + \tfrac12 p^\top M^{-1} p$$

    One update is one transition of every chain, each with tens to hundreds of passes over all the data: for selections
    of up to about ten thousand weights and data that fits in memory. Burn-in adapts the step size by dual averaging and
    the masses to the variance of the positions (Hoffman & Gelman 2014, https://arxiv.org/abs/1111.4246).

    Args:
        method: ``"nuts"`` chooses the length of each trajectory; ``"hmc"`` takes `num_steps` leapfrog steps;
            ``"microcanonical"`` takes as many steps of unit speed (see `dubito.mcmc.hamiltonian`); MILE does so
            from the members of an ensemble.
        weights: Which weights are random; the others stay at their trained values.
        prior: As for `SGMCMC`.
        adapt: Whether burn-in adapts step size and masses; otherwise `step_size` and unit masses are used.
        num_samples: The number of samples per chain.
        chains: The number of chains; several processes divide them among themselves.
        burn_in: The number of transitions before the first sample.
        thinning: The number of transitions between two samples.
        num_steps: The number of leapfrog steps of ``"hmc"``.
        step_size: The initial leapfrog step size; ``"auto"`` finds one.
        acceptance: The target acceptance probability of the adaptation.
        max_depth: The largest number of doublings of ``"nuts"``.
        temperature: T; below 1 makes the posterior narrower.
        start: ``"model"`` starts all chains at the model's weights, ``"fresh"`` each at newly initialized ones,
            ``"head"`` with a new output layer; a posterior, such as an `Ensemble`, starts each chain at a sample of
            it, which is a member.
        memory: Samples up to this many megabytes are held in memory; more are stored in files.
    """

    setting_name = "HMC"
    method: Literal["nuts", "hmc", "microcanonical"] = "nuts"
    weights: SelectionRule = all_weights()
    prior: Prior | None = None
    adapt: bool = True
    num_samples: Count = 250
    chains: Count = 2
    burn_in: CountOrZero = 250
    thinning: Count = 1
    num_steps: Count = 30
    step_size: Positive | Literal["auto"] = "auto"
    acceptance: OpenProbability = 0.8
    max_depth: Count = 10
    temperature: Positive = 1.0
    start: ChainStart = "model"
    memory: Positive = 64.0

    @property
    def explores_modes(self) -> bool:
        """Whether samples come from several modes of the posterior."""
        return (self.redraws or not isinstance(self.start, str)) and self.chains > 1

    def default_training(self) -> Training:
        """Return settings that read all the data in order; every step sums the gradients of all batches."""
        return Training(batch_size=1024, shuffle=False)

    def build_after(self, problem: Problem, before: ParticlePosterior | None) -> Inference:
        """Return the transitions; in an update, the particles of `before` are the prior and the start."""
        from dubito.methods.mcmc.trajectories import Trajectories

        return Trajectories(self, problem, before).inference()
