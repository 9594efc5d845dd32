"""Stochastic-gradient sampling as an `Inference`: one update is one transition of every chain."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from dubito.core import batches, io
from dubito.core.batches import Batch
from dubito.core.errors import NonFiniteError
from dubito.core.params import Buffers, Params
from dubito.core.precision import computes_in
from dubito.fitting.inference import Inference, Info, LossWatch, Problem, State
from dubito.methods.mcmc.cached_head import cached_features
from dubito.methods.mcmc.chains import KEPT, Chains, chain_view
from dubito.methods.mcmc.kernels import KernelStep, make_kernel
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.sampling import Setup
from dubito.methods.mcmc.sgmcmc import SGMCMC
from dubito.networks.normalization import running_norms

# The number of power iterations for the largest curvature, and for another look every so many steps of burn-in.
POWER_STEPS, FEW_POWER_STEPS, LOOK_AGAIN = 12, 4, 50
# The number of positions around the start at which it is measured, and their largest distance over the weights' size.
NUM_AROUND, AROUND = 3, 0.5
# The largest share by which the noise of mini-batch gradients at the start may heat a chain, and the number of parts of
# a batch from which that noise is estimated.
HEAT, NOISE_PARTS = 0.1, 8
# The advice if the loss is finite and its gradient is not.
NO_GRADIENT = "check the network for a square root or logarithm at 0, and for extreme weights"


class Transitions:
    """The steps of `SGMCMC`.

    Every process sees whole batches and moves its own chains.

    Args:
        before: In an update, the posterior whose particles are the prior and the start.
    """

    def __init__(self, recipe: SGMCMC, problem: Problem, before: ParticlePosterior | None = None) -> None:
        self.recipe, self.schedule = recipe, recipe.sample_schedule
        self.setup = Setup(recipe, problem, before)
        source = problem.source.kept_whole("SGMCMC")
        self.norms = running_norms(self.setup.model) if recipe.starts_fresh and before is None else {}
        head = None if self.norms else self.setup.head
        features = None if head is None else cached_features(head, source)
        self.problem = dataclasses.replace(problem, source=features or source)
        self.target = self.setup.target(None if features is None else head)
        self.probes = self.setup.probes if self.target.head is None else self.target.head.features(self.setup.probes)
        for norm in self.norms.values():
            norm.train()
        self.kernel = make_kernel(recipe.kernel, recipe.friction)
        self._adapts = recipe.step_size == "auto"
        size, training = len(self.setup.start), problem.training
        self.chains = Chains(recipe.chains, recipe.num_samples, size, recipe.memory, training.checkpoint)
        self.noise = torch.empty_like(self.setup.start)
        self.watches = [LossWatch() for _ in range(recipe.chains)]  # on an accelerator

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        epochs = math.ceil(self.schedule.total / (self.problem.source.num_batches or 1))
        return Inference(
            self.init, self.update, self.posterior, epochs=epochs, additive=True, source=self.problem.source,
            checks_itself=True,
        )  # fmt: skip

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the initial state of all chains."""
        starts, recipe = self.setup.starts(self.recipe.chains), self.recipe
        first = self.kernel.init(starts[0])
        step_size = self._choose_step() if recipe.step_size == "auto" else float(recipe.step_size)
        counts, own = (recipe.chains, recipe.num_samples), self._buffers()
        state = {
            **self.chains.init(starts, generator),
            "position": starts,
            "kernel": {key: torch.stack([value] * recipe.chains) for key, value in first.items()},
            "step_size": torch.full((recipe.chains,), step_size, dtype=torch.float64),
            "potential": torch.zeros(counts, dtype=torch.float64),
            "kinetic": torch.zeros(counts, dtype=torch.float64),
            "buffers": {name: torch.stack([value] * recipe.chains) for name, value in own.items()},
            "kept": {name: value.new_zeros(*counts, *value.shape) for name, value in own.items()},
        }
        return self.chains.at_first(state)

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Move every chain of this process by one step."""
        self.chains.place(state)
        potential = torch.zeros((), dtype=torch.float64)
        for k in self.chains.mine:
            if int(state["step"][k]) < self.schedule.total and not int(state["diverged"][k]):
                potential = self._move(state, k, batch)
        self.chains.remember(state)
        if self.chains.meet():
            self._stop_if_diverged(state)
        return state, {"potential": potential / self.problem.num_data}

    def _move(self, state: State, k: int, batch: Batch) -> Tensor:
        done, position = int(state["step"][k]), state["position"][k]
        loss, gradient = self._gradient(state, k, batch)
        if self._adapts and 0 < done <= self.schedule.burn_in and done % LOOK_AGAIN == 0:
            state["step_size"][k] = min(float(state["step_size"][k]), self._stable_step(position))
        noisy = self.schedule.is_noisy(done)
        size = float(state["step_size"][k]) * self.schedule.factor(done) / self.problem.num_data
        step = KernelStep(size, self.recipe.temperature if noisy else 0.0, done < self.schedule.burn_in, done)
        if noisy:
            self.noise.normal_(generator=self.chains.generator(k))
        own = chain_view(state["kernel"], k)
        self.kernel.move(position, own, gradient, self.noise, step)
        index = self.schedule.sample_at(done + 1)
        # a non-finite gradient makes the position non-finite
        finite = torch.stack([loss, position.dot(position), *(v for v in own.values() if not v.ndim)]).isfinite().all()
        if position.device.type != "cpu":
            self.watches[k].add(finite, (0, done))
            bad = self.watches[k].read() if index is not None or self.watches[k].is_due else None
            if bad is not None:
                self._diverge(state, k, bad[1] + 1, by_gradient=False)
                return loss
        elif not bool(finite):
            fault = bool(loss.isfinite()) and not bool(gradient.isfinite().all())
            self._diverge(state, k, done + 1, by_gradient=fault)
            return loss
        if self._keep(state, k, index, loss):
            state["step"][k] = done + 1
        else:
            self._diverge(state, k, done + 1, by_gradient=False)
        return loss

    def _gradient(self, state: State, k: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Estimate the potential's gradient from a batch; a fresh chain also updates its BatchNorm statistics."""
        own = self._buffers()
        for name, value in own.items():
            value.copy_(state["buffers"][name][k])
        scale = self.problem.num_data / batch.num_rows
        loss, gradient = self.target.gradient(state["position"][k], batch, scale)
        for name, value in own.items():
            state["buffers"][name][k] = value
        return loss, gradient

    def _keep(self, state: State, k: int, index: int | None, loss: Tensor) -> bool:
        """Store a sample if one is due; return False if its prediction is not finite."""
        if index is None:
            return True
        position = state["position"][k]
        potential = loss.double() + self.target.density.energy(position).double()
        outputs = self.target.outputs(position, self.probes)
        if not bool(potential.isfinite()) or not self.setup.is_finite(outputs, position):
            return False
        self.chains.keep(state, k, index, position)
        state["potential"][k, index] = potential
        if self.kernel.has_momentum:
            state["kinetic"][k, index] = state["kernel"]["momentum"][k].double().square().mean()
        for name, value in state["buffers"].items():
            state["kept"][name][k, index] = value[k]
        return True

    def _diverge(self, state: State, k: int, step: int, *, by_gradient: bool) -> None:
        """Stop a chain, and make its state finite so that the fit loop does not raise its own error."""
        self.chains.stop(state, k, step, by_gradient=by_gradient)
        for tensor in io.tensors(chain_view({name: state[name] for name in ("position", "kernel", "buffers")}, k)):
            tensor.nan_to_num_(0.0, 0.0, 0.0)

    def _buffers(self) -> Buffers:
        """Return the BatchNorm statistics that change during sampling, by name."""
        return {f"{name}.{own}": b for name, norm in self.norms.items() for own, b in norm.named_buffers(recurse=False)}

    def _relative_reach(self) -> float:
        """Return how far apart two gradients must be taken, so that rounding does not dominate their difference."""
        dtype = computes_in(max((p.dtype for p in self.target.chosen), key=lambda each: torch.finfo(each).eps))
        return {torch.float64: 1e-5, torch.float32: 1e-3}.get(dtype, 0.2 * torch.finfo(dtype).eps ** (1 / 3))

    def _choose_step(self) -> float:
        r"""Return ℓ for which ε times the largest curvature of the potential is a fixed fraction, or less.

        It is less if the noise of mini-batch gradients would heat the chain by more than the share `HEAT`. The
        curvature is the largest of those at the start and at positions as far from it as the prior reaches: where a
        network fits its data perfectly, the potential is flat, and steps that are stable there are not elsewhere.
        """
        before = {name: value.clone() for name, value in self._buffers().items()}
        if not bool(self._gradient_at(self.setup.start).isfinite().all()):
            raise NonFiniteError(f"The gradient at the start is not finite: {NO_GRADIENT}.")
        found = [self._curvature(position) for position in self._around_the_start()]
        noise = self._gradient_noise()
        for name, value in self._buffers().items():
            value.copy_(before[name])
        curvature = max((value for value in found if math.isfinite(value)), default=0.0)
        if not 0 < found[0] < math.inf or not curvature:
            raise NonFiniteError(
                "The curvature at the start is not a positive number, so no step size can be chosen: check for extreme "
                "inputs or weights, or pass step_size as a number."
            )
        most = self.kernel.most / curvature
        if noise > 0:
            most = min(most, HEAT * self.recipe.temperature * self.kernel.cooling / noise)
        return most * self.problem.num_data

    def _gradient_noise(self) -> float:
        """Return the variance of a mini-batch gradient at the start, the mean over all directions and batches.

        It is estimated from equal parts of one batch. Batches are drawn without replacement, so the variance is less by
        the fraction of the data that a batch holds; the last batch may be smaller, and noisier, than the others.
        """
        first, total = self.problem.source.first(), self.problem.num_data
        size, rows = first.num_rows, first.num_rows // NOISE_PARTS
        if rows == 0 or size >= total:
            return 0.0
        parts = []
        for start in range(0, rows * NOISE_PARTS, rows):
            inputs, targets = batches.take((first.inputs, first.targets), slice(start, start + rows))
            part = Batch(inputs, targets, rows)
            parts.append(self.target.gradient(self.setup.start, part, total / rows)[1])
        of_one = float(torch.stack(parts).double().var(0).mean()) * rows
        sizes = [size] * (total // size) + [total % size] * (total % size > 0)
        return of_one * sum(1 / each - 1 / total for each in sizes) / len(sizes)

    def _stable_step(self, position: Tensor) -> float:
        """Return ℓ for the curvature at a position, infinite if it is flat: a chain may move to where it is larger."""
        before = {name: value.clone() for name, value in self._buffers().items()}
        curvature = self._curvature(position, FEW_POWER_STEPS)
        for name, value in self._buffers().items():
            value.copy_(before[name])
        return self.kernel.most / curvature * self.problem.num_data if 0 < curvature < math.inf else math.inf

    def _around_the_start(self) -> list[Tensor]:
        """Return the start, and positions around it at the distance of the prior's spread, or of the weights' size."""
        start, size = self.setup.start, self.setup.selection.num_weights
        moments = self.setup.density.moments()
        spread = start[:size].double().square().mean().sqrt() * AROUND
        if moments is not None:
            spread = torch.minimum(spread, moments[1][:size].double().sqrt().mean().to(spread))
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(NUM_AROUND, len(start), generator=generator, dtype=torch.float64)
        noise[:, size:] = 0.0  # a noise level stays as it is
        return [start, *(start + (float(spread) * each).to(start) for each in noise)]

    def _gradient_at(self, position: Tensor) -> Tensor:
        first = self.problem.source.first()
        return self.target.gradient(position, first, self.problem.num_data / first.num_rows)[1]

    def _curvature(self, position: Tensor, steps: int = POWER_STEPS) -> float:
        """Return the largest curvature at a position, by power iteration with gradient differences.

        It is 0 where the potential is flat, and not finite where gradients are not.
        """
        noise = torch.Generator().manual_seed(0)
        direction = torch.randn(position.shape, generator=noise, dtype=torch.float64).to(position)
        # all on the device: the host reads one number at the end
        reach = self._relative_reach() * position.norm().clamp_min(1.0)
        smallest = torch.finfo(position.dtype).tiny
        for _ in range(steps):
            direction = direction / direction.norm().clamp_min(smallest)
            ends = [self._gradient_at(position + sign * reach * direction) for sign in (1, -1)]
            direction = (ends[0] - ends[1]) / (2 * reach)
        return float(direction.norm())

    def posterior(self, state: State) -> ParticlePosterior:
        """Return the samples of all chains as a posterior."""
        self.chains.place(state)
        for k in self.chains.mine:
            bad = self.watches[k].read()
            if bad is not None:
                self._diverge(state, k, bad[1] + 1, by_gradient=False)
        self._stop_if_diverged(state)
        return self._collect(state)

    def _stop_if_diverged(self, state: State) -> None:
        """Raise an error if a chain has diverged; the error holds the samples so far."""
        found = self.chains.first_diverged(state)
        if found is None:
            return
        size = float(self.chains.whole(state["step_size"]).max())
        who, when = f"Chain {found.chain + 1} of {self.recipe.chains}", f"in step {found.step} of {self.schedule.total}"
        if found.by_gradient:
            words = f"{who} stopped {when}: the loss is finite but its gradient is not; {NO_GRADIENT}"
        else:
            words = (
                f"{who} diverged {when}: lower step_size (now {size:.3g}), train the network longer first, or check "
                "for extreme inputs"
            )
        kept = self.schedule.count(found.step - 1) > 0
        raise NonFiniteError(words + (KEPT if kept else "."), self._collect(state) if kept else None)

    def _collect(self, state: State) -> ParticlePosterior:
        count = self.schedule.count(int(self.chains.whole(state["step"]).min()))
        names = ("potential", *(("kinetic",) if self.kernel.has_momentum else ()))
        if count == 0:  # no sample yet: return the current positions
            samples, statistics, kept = self.chains.whole(state["position"])[:, None], {}, {}
        else:
            samples = self.chains.gather(state, count)
            statistics = {name: self.chains.whole(state[name])[:, :count] for name in names}
            kept = {name: self.chains.whole(value)[:, :count] for name, value in state["kept"].items()}
        settings = {"step_size": self.chains.whole(state["step_size"])}
        return self.setup.posterior(samples, statistics, settings, kept)
