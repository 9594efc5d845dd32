"""Hamiltonian Monte Carlo as an `Inference`: one update is one transition of every chain, over all the data."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from dubito.core.batches import Batch
from dubito.core.errors import InputError, NonFiniteError, UnsupportedError
from dubito.core.params import Buffers, Params
from dubito.fitting.inference import Inference, Info, LossWatch, Problem, State
from dubito.methods.mcmc.adaptation import Masses, StepSize, reasonable_step, settling, windows
from dubito.methods.mcmc.blocks import Blocks, make_blocks
from dubito.methods.mcmc.chains import KEPT, Chains, chain_view
from dubito.methods.mcmc.hamiltonian import NoUTurn, Point, Transition, at, hmc_transition, microcanonical_transition
from dubito.methods.mcmc.hmc import HMC
from dubito.methods.mcmc.numbers import Number, number
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.sampling import Setup
from dubito.methods.mcmc.schedule import Schedule
from dubito.methods.mcmc.target import Potential
from dubito.networks.normalization import running_norms

STATISTICS = ("energy", "acceptance", "divergent", "num_steps")


class Trajectories:
    """The steps of `HMC`.

    Every process sees all the data and moves its own chains.

    Args:
        before: In an update, the posterior whose particles are the prior and the start.
    """

    def __init__(self, recipe: HMC, problem: Problem, before: ParticlePosterior | None = None) -> None:
        self.recipe = recipe
        if recipe.starts_fresh and running_norms(problem.model):
            raise UnsupportedError(
                "HMC(start='fresh') has no BatchNorm statistics: train the network first, then use start='model'."
            )
        self.schedule = Schedule("constant", recipe.burn_in, recipe.thinning, recipe.num_samples, 1)
        self.setup = Setup(recipe, problem, before)
        self.problem = dataclasses.replace(problem, source=problem.source.kept_whole("HMC"))
        self.target = self.setup.target(self.setup.head)
        self.step, self.masses, self.windows = StepSize(recipe.acceptance), Masses(), windows(recipe.burn_in)
        size = len(self.setup.start)
        if recipe.method == "microcanonical" and size < 2:
            raise InputError("HMC(method='microcanonical') needs at least two random weights: use method='nuts'.")
        self.chains = Chains(recipe.chains, recipe.num_samples, size, recipe.memory, problem.training.checkpoint)
        self.whole: Batch | None = None  # all the data, as one batch for the target
        self._potential: Potential  # of them
        self.watches = [LossWatch() for _ in range(recipe.chains)]
        self._at_start = list(map(copy.copy, self.watches))  # the watches at the start of each chain's block
        self.blocks = make_blocks(recipe.max_depth, self.setup.start.device) if recipe.method == "nuts" else None

    def inference(self) -> Inference:
        """Return the steps for the fit loop."""
        return Inference(
            self.init, self.update, self.posterior, epochs=self.schedule.total, batches="full", additive=True,
            source=self.problem.source, checks_itself=True,
        )  # fmt: skip

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the initial state of all chains."""
        recipe, starts = self.recipe, self.setup.starts(self.recipe.chains)
        counts = (recipe.chains, recipe.num_samples)
        step = 1.0 if recipe.step_size == "auto" else float(recipe.step_size)
        many = {"steps": self.step.init(step, starts.device), "masses": self.masses.init(starts[0])}
        state = {
            **self.chains.init(starts, generator),
            "position": starts,
            "inverse_mass": torch.ones_like(starts),
            **{k: {n: torch.stack([v] * recipe.chains) for n, v in values.items()} for k, values in many.items()},
            **{name: torch.zeros(counts, dtype=torch.float64, device=starts.device) for name in STATISTICS},
        }
        return self.chains.at_first(state if self.blocks is None else self.blocks.init(state))

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Make one transition of every chain of this process."""
        self.chains.place(state)
        if self.whole is None:
            features = batch.inputs if self.setup.head is None else self.setup.head.features(batch.inputs)
            self.whole = batch._replace(inputs=features)
            self._potential = self.target.potential(self.whole, self.recipe.temperature)
        info: Info = {}
        for k in self.chains.mine:
            if not int(state["diverged"][k]):
                info = self._move(state, k)
                info = info if self.blocks is None else self._end_block(self.blocks, state, k, info)
        self.chains.remember(state)
        if self.chains.meet():
            self._stop_if_diverged(state)
        return state, info

    def _end_block(self, blocks: Blocks, state: State, k: int, info: Info) -> Info:
        """At the end of a block, repeat it with more doublings until all its trajectories have ended."""
        done = int(state["step"][k])
        if not blocks.is_full(state, k) and done < self.schedule.total:
            return info
        while not blocks.ended(state, k):
            self._go_back(blocks, state, k)
            while int(state["step"][k]) < done and not int(state["diverged"][k]):
                info = self._move(state, k)
        blocks.begin(state, k, self.chains.generator(k))
        self._at_start[k] = copy.copy(self.watches[k])
        return info

    def _go_back(self, blocks: Blocks, state: State, k: int) -> None:
        blocks.go_back(state, k, self.chains.generator(k))
        self.watches[k] = copy.copy(self._at_start[k])

    def _move(self, state: State, k: int) -> Info:
        done, generator, potential = int(state["step"][k]), self.chains.generator(k), self._potential
        start = at(potential, state["position"][k].clone())
        if not self._can_start(state, k, start):
            return {}
        own = chain_view({name: state[name] for name in ("steps", "masses", "inverse_mass")}, k)
        if done == 0 and self.recipe.step_size == "auto":
            self.step.restart(own["steps"], reasonable_step(potential, start.position, own["inverse_mass"], generator))
        burning = done < self.recipe.burn_in
        step = number(own["steps"]["log_step" if burning else "log_mean"].exp())
        depth = self.recipe.max_depth if self.blocks is None else self.blocks.depth(state, k)
        moved = self._transition(start, step, own["inverse_mass"], depth, generator)
        if self.blocks is not None:
            self.blocks.note(state, k, moved, generator)
        state["position"][k] = moved.point.position
        if burning and self.recipe.adapt:
            self._learn(done + 1, moved, own, generator)
        state["step"][k] = done + 1
        index = self.schedule.sample_at(done + 1)
        if index is not None:
            self.chains.keep(state, k, index, moved.point.position)
            for name in STATISTICS:
                state[name][k, index] = getattr(moved, name)
        return {"potential": moved.point.potential, "acceptance": moved.acceptance, "step_size": step}

    def _can_start(self, state: State, k: int, start: Point) -> bool:
        """Return whether potential and gradient are finite; on an accelerator, whether none is known not to be.

        There they are read once in a while, at the start of a block. A chain that cannot start stays where it is.
        """
        watch, done = self.watches[k], int(state["step"][k])
        is_finite = torch.as_tensor(start.potential).isfinite() & start.gradient.isfinite().all()
        watch.add(is_finite, (0, done))
        is_first = self.blocks is None or self.blocks.done(state, k) == 0
        is_due = is_finite.device.type == "cpu" or done == 0 or (watch.is_due and is_first)
        return not is_due or self._is_sound(state, k)

    def _is_sound(self, state: State, k: int) -> bool:
        """Read whether a chain could start all its transitions so far; if not, stop it at the first it could not."""
        bad = self.watches[k].read()
        if bad is not None:
            state["step"][k] = bad[1]  # the positions kept since then are no samples
            energy, _ = self._potential(state["position"][k])
            self.chains.stop(state, k, bad[1] + 1, by_gradient=bool(energy.isfinite()))
        return bad is None

    def _transition(
        self, start: Point, step: Number, inverse_mass: Tensor, depth: int, generator: torch.Generator
    ) -> Transition:
        recipe, potential = self.recipe, self._potential
        if recipe.method != "nuts":
            move = hmc_transition if recipe.method == "hmc" else microcanonical_transition
            return move(potential, start, step, inverse_mass, recipe.num_steps, generator)
        return NoUTurn(potential, step, inverse_mass, depth, generator).transition(start)

    def _learn(
        self, done: int, moved: Transition, own: dict[str, dict[str, Tensor]], generator: torch.Generator
    ) -> None:
        """Adapt the step size and, at the end of each window, the masses."""
        self.step.learn(own["steps"], moved.acceptance)
        if not self.windows or not settling(self.recipe.burn_in) < done <= self.windows[-1]:
            return
        self.masses.learn(own["masses"], moved.point.position)
        if done in self.windows:
            inverse_mass = self.masses.inverse_mass(own["masses"])
            own["inverse_mass"].copy_(inverse_mass)  # type: ignore[attr-defined]
            step = reasonable_step(self._potential, moved.point.position, inverse_mass, generator)
            self.step.restart(own["steps"], step)

    def posterior(self, state: State) -> ParticlePosterior:
        """Return the samples of all chains as a posterior."""
        self.chains.place(state)
        for k in self.chains.mine:
            if self.blocks is not None and not self.blocks.ended(state, k):
                self._go_back(self.blocks, state, k)  # the samples of this block are not exact
            self._is_sound(state, k)
        self._stop_if_diverged(state)
        return self._collect(state)

    def _stop_if_diverged(self, state: State) -> None:
        """Raise an error if a chain cannot continue; the error holds the samples so far."""
        found = self.chains.first_diverged(state)
        if found is None:
            return
        kept = self.schedule.count(found.step - 1) > 0
        what = "gradient of the potential" if found.by_gradient else "potential"
        raise NonFiniteError(
            f"Chain {found.chain + 1} of {self.recipe.chains} cannot start its transition {found.step}: the {what} "
            "there is not finite; check for extreme inputs or weights, and that the prior allows the weights"
            + (KEPT if kept else "."),
            self._collect(state) if kept else None,
        )

    def _collect(self, state: State) -> ParticlePosterior:
        count = self.schedule.count(int(self.chains.whole(state["step"]).min()))
        if count == 0:  # no sample yet: return the current positions
            samples, statistics = self.chains.whole(state["position"])[:, None], {}
        else:
            samples = self.chains.gather(state, count)
            statistics = {name: self.chains.whole(state[name])[:, :count].cpu().double() for name in STATISTICS}
        step = self.chains.whole(state["steps"]["log_mean"]).exp().cpu().double()
        settings = {"step_size": step, "inverse_mass": self.chains.whole(state["inverse_mass"])}
        return self.setup.posterior(samples, statistics, settings)
