"""The `Snapshot` recipe: several networks from one training run."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from dubito.core import io, params
from dubito.core.batches import Batch
from dubito.core.constraints import Count, NonNegative, Start
from dubito.core.errors import InputError
from dubito.core.params import Buffers, Params
from dubito.core.settings import setting
from dubito.fitting.gradient_training import plain_descent
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.ensembles.points import check_training, point
from dubito.methods.ensembles.posterior import EnsemblePosterior
from dubito.methods.map.recipe import MAP
from dubito.networks.twin import light_copy


@setting
class Snapshot(Recipe):
    r"""Train once with a cyclic learning rate, and keep the network at the end of every cycle.

    $$\alpha(t) = \frac{\alpha_0}2 \Big(\cos \frac{\pi \, (t \bmod T/M)}{T/M} + 1\Big)$$

    with T steps in M cycles (Huang et al. 2017, https://arxiv.org/abs/1704.00109): an ensemble at the cost of one
    training run, whose members are closer to each other than those of `Ensemble`. ``Training(schedule=...)`` is
    ignored; there is one warm-up, at the start.

    Args:
        cycles: The number of cycles, which is the number of members.
        prior_precision: The precision of a zero-mean normal prior on every weight; 0 is a flat prior.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "Snapshot"
    cycles: Count = 5
    prior_precision: NonNegative = 0.0
    start: Start = "model"

    def epochs_after_search(self, found: int, batches: int) -> int:
        """Return four times as many, of which every cycle has a part."""
        return max(4 * found, self.cycles)

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        check_training("Snapshot", problem.training)
        steps = (problem.source.num_batches or 1) * problem.training.epochs
        if self.cycles > steps:
            raise InputError(f"{self.cycles} cycles do not fit into {steps} steps: train for more epochs.")
        run = _SnapshotRun(self, problem, steps)
        return Inference(run.init, run.update, run.posterior, epochs=problem.training.epochs)


@setting
class Cyclic(Training):
    """Training with a learning rate that falls by a half cosine in every cycle.

    >>> [round(Cyclic(lr=1.0, cycles=2).rate(progress), 3) for progress in (0.0, 0.25, 0.49, 0.5)]
    [1.0, 0.5, 0.001, 1.0]
    """

    cycles: int = 1

    def rate(self, progress: float) -> float:
        """Return the learning rate at a fraction `progress` of all steps."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (progress * self.cycles % 1.0)))


class _SnapshotRun:
    def __init__(self, recipe: Snapshot, problem: Problem, steps: int) -> None:
        self.recipe, self.problem, self.steps = recipe, problem, steps
        training = Cyclic(**problem.training.fields(), cycles=recipe.cycles)
        self.descent = plain_descent(replace(problem, training=training), recipe.prior_precision)

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        return {**self.descent.init(initial, buffers, generator), "members": []}

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        state, info = self.descent.update(state, batch, generator)
        if len(state["members"]) < state["step"] * self.recipe.cycles // self.steps:
            state = {**state, "members": [*state["members"], self._member(state)]}
        return state, info

    def _member(self, state: State) -> State:
        return io.clone({key: state[key] for key in ("params", "buffers", "hyper")})

    def posterior(self, state: State) -> EnsemblePosterior:
        """Return the networks at the ends of cycles; the current network if no cycle has ended."""
        recipe = MAP(prior_precision=self.recipe.prior_precision)
        members = [
            point(recipe, self.problem, self._model(found), found["hyper"])
            for found in state["members"] or [self._member(state)]
        ]
        return EnsemblePosterior(members, self.recipe)

    def _model(self, found: State) -> torch.nn.Module:
        return params.load_(light_copy(self.problem.model), found["params"], found["buffers"])
