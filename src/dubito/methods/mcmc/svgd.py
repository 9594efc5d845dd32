"""The `SVGD` recipe: particles that move towards the posterior and repel each other."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from dubito.beliefs.priors import Prior
from dubito.core import distributed
from dubito.core.batches import Batch
from dubito.core.constraints import Count, Positive, Start
from dubito.core.errors import UnsupportedError
from dubito.core.params import Buffers, Params
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Info, NonFinite, Problem, State
from dubito.fitting.optimizers import Optimizer
from dubito.fitting.training import Training
from dubito.methods.mcmc.cached_head import cached_features
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.recipe import Sampler
from dubito.methods.mcmc.sampling import Setup
from dubito.networks.normalization import running_norms
from dubito.select import all as all_weights
from dubito.select.rule import SelectionRule

# The initial spread of the particles around one network, relative to the root mean square of its weights.
SPREAD = 0.1


@setting
class SVGD(Sampler):
    r"""Move a set of particles to the posterior by Stein variational gradient descent.

    $$w_i \leftarrow w_i + \frac{\eta}{n} \sum_j \Big[ -k(w_j, w_i)\, \nabla U(w_j)/T + \nabla_{w_j} k(w_j, w_i) \Big],
      \qquad k(a, b) = \exp\big(-\|a - b\|^2 / h\big)$$

    with $h$ the median squared distance over $\log(n + 1)$ (Liu & Wang 2016, https://arxiv.org/abs/1608.04471). The
    first term moves particles towards the posterior, the second keeps them apart. With far fewer particles than weights
    their variance is too small: select few weights.

    Args:
        num_particles: n, the number of particles.
        weights: Which weights are random; the others stay at their trained values.
        prior: As for `SGMCMC`.
        temperature: T; below 1 makes the posterior narrower.
        start: ``"model"`` starts around the model's weights, ``"fresh"`` at newly initialized ones,
            ``"head"`` with a new output layer.
    """

    setting_name = "SVGD"
    trains = True
    is_chain: ClassVar[bool] = False
    num_particles: Count = 20
    weights: SelectionRule = all_weights()
    prior: Prior | None = None
    temperature: Positive = 1.0
    start: Start = "model"

    @property
    def explores_modes(self) -> bool:
        """Whether particles come from several modes of the posterior."""
        return self.redraws and self.num_particles > 1

    def default_training(self) -> Training:
        """Return settings with a larger learning rate than for one network, as particles start close together."""
        return Training(epochs=50, lr=1e-2)

    def build_after(self, problem: Problem, before: ParticlePosterior | None) -> Inference:
        """Return the steps; in an update, the particles of `before` are the prior and the start."""
        return _Particles(self, problem, before).inference()


def stein_direction(particles: Tensor, gradients: Tensor) -> Tensor:
    r"""Return the direction ``[n, D]`` in which particles move, given the gradients of U at them.

    $$\phi_i = \frac1n \sum_j \Big[ -k_{ij} g_j + \tfrac2h\, k_{ij} (w_i - w_j) \Big]$$

    >>> one = torch.tensor([[1.0, 2.0]])
    >>> stein_direction(one, one).tolist()  # a single particle descends
    [[-1.0, -2.0]]
    """
    count = len(particles)
    distance = torch.cdist(particles, particles).square()
    bandwidth = distance.new_ones((), dtype=torch.float64)
    if count > 1:
        apart = distance.flatten()[1:].reshape(count - 1, count + 1)[:, :-1]  # all but the diagonal, without a mask
        bandwidth = (apart.median().double() / math.log(count + 1)).clamp_min(1e-30)
    kernel = torch.exp(-distance / bandwidth)
    repulsion = particles * kernel.sum(1, keepdim=True) - kernel @ particles
    return (-kernel @ gradients + 2 / bandwidth * repulsion) / count


class _Particles:
    """The steps of `SVGD`: processes divide the rows of a batch, and all hold the same particles."""

    def __init__(self, recipe: SVGD, problem: Problem, before: ParticlePosterior | None) -> None:
        if recipe.starts_fresh and running_norms(problem.model):
            raise UnsupportedError(
                "SVGD(start='fresh') has no BatchNorm statistics: train the network first, then use start='model'."
            )
        self.recipe, self.before = recipe, before
        self.setup = Setup(recipe, problem, before)
        head = self.setup.head
        features = None if head is None else cached_features(head, problem.source)
        self.problem = dataclasses.replace(problem, source=features or problem.source)
        self.target = self.setup.target(None if features is None else head)
        self.optimizer = Optimizer(problem.training, ["particles"], weight_decay={"particles": 0.0})

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        problem = self.problem
        return Inference(self.init, self.update, self.posterior, epochs=problem.training.epochs, source=problem.source)

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the initial particles: around the network, newly initialized, or those of the last fit."""
        particles = self._start(generator)
        return {"particles": particles, "optimizer": self.optimizer.init({"particles": particles}), "step": 0}

    def _start(self, generator: torch.Generator) -> Tensor:
        if self.before is not None:
            return self.before.flat.to(self.setup.start).clone()
        particles = self.setup.starts(self.recipe.num_particles)
        if self.recipe.starts_fresh:
            return particles
        noise = torch.randn(particles.shape, generator=generator, dtype=particles.dtype, device=generator.device)
        size = self.setup.start[: self.setup.selection.num_weights].square().mean().sqrt().clamp_min(1e-3)
        return particles + SPREAD * size * noise.to(particles.device)

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one step with all particles."""
        particles = state["particles"]
        gradients, loss = torch.zeros_like(particles), particles.new_zeros(())
        if batch.num_rows:
            for particle, gradient in zip(particles, gradients, strict=True):
                one, found = self.target.likelihood_gradient(particle, batch, self.problem.num_data / batch.size)
                gradient.copy_(found)
                loss += one / len(particles)
        distributed.sum_([loss, gradients])
        finite = torch.isfinite(loss + gradients.sum())
        if finite.device.type == "cpu" and not bool(finite):
            raise NonFinite(f"The potential became {float(loss):g} with a gradient that is not finite")
        for particle, gradient in zip(particles, gradients, strict=True):
            self.target.density.add_gradient_(gradient, particle)
        direction = stein_direction(particles, gradients / self.recipe.temperature)
        lr = self.problem.training.rate(self.problem.progress_at(state["step"]))
        directions = {"particles": -direction / self.problem.num_data}
        self.optimizer.step({"particles": particles}, directions, state["optimizer"], lr)
        state["step"] += 1
        return state, {"loss": torch.where(finite, loss / self.problem.num_data, torch.nan), "lr": lr}

    def posterior(self, state: State) -> ParticlePosterior:
        """Return the particles as a posterior."""
        return self.setup.posterior(state["particles"].detach().clone()[None], {}, {})
