"""Train all members at once: their linear layers as one batched product, one fused optimizer over all of them.

The rows of all members form one batch of ``K * B`` rows (`networks.stacked`). The loss is the sum of the members'
losses, so that their gradients are independent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.batches import Batch, Source
from dubito.core.params import Params
from dubito.core.randomness import derive_seed
from dubito.core.settings import setting
from dubito.core.subsets import drawn_rows
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.ensembles.points import point
from dubito.methods.ensembles.posterior import EnsemblePosterior
from dubito.methods.ensembles.recipe import Ensemble
from dubito.methods.map.recipe import MAP
from dubito.networks.stacked import stacked, stacking_obstacle
from dubito.networks.twin import light_copy


def obstacle(ensemble: Ensemble, training: Training, model: nn.Module, source: Source) -> str | None:
    """Return why the members cannot be trained together, as a clause for an error; None if they can."""
    recipe = ensemble.recipe
    known = {"prior_precision": 0.0, "temperature": 1.0, "start": "model"}
    if type(recipe) is not MAP or recipe.replace(**known) != MAP():
        return "only MAP() with a flat or normal prior can be"
    if training.needs_validation or training.clip is not None or training.evidence_every is not None:
        return "early stopping, clipping and evidence_every need one network at a time"
    if training.accumulate > 1 or training.compile is not False:
        return "accumulate and compile need one network at a time"
    return stacking_obstacle(model, source.first().inputs)


@setting
class BatchedMembers(Recipe):
    """Fit all members of an ensemble at once.

    Args:
        ensemble: The recipe of the ensemble.
        seeds: One per member, for its initial weights, its order of the data and its bootstrap.
    """

    setting_name = "ensembles.Together"
    ensemble: Any
    seeds: tuple[int, ...]

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        joint = _Joint(self, problem)
        return Inference(joint.descent.init, joint.update, joint.posterior, epochs=problem.training.epochs)


class _Joint:
    def __init__(self, together: BatchedMembers, problem: Problem) -> None:
        from dubito.methods.ensembles.members import start_of_member

        self.together, self.problem, self.count = together, problem, len(together.seeds)
        self.recipe: MAP = together.ensemble.steps()[0]
        self.recipe.build(problem)  # raises errors that concern every member, before any work is done
        first = self.recipe.replace(start="model")  # the weights are drawn here
        self.models = [
            start_of_member(together.ensemble, first, problem.model, seed, k, problem.source)
            for k, seed in enumerate(together.seeds)
        ]
        self.pair = problem.source.pair
        self.size = batches.num_rows(self.pair)
        self.drawn = [
            drawn_rows(self.size, derive_seed(seed, "bootstrap")) if together.ensemble.bootstrap else None
            for seed in together.seeds
        ]
        self.orders: tuple[int, list[Tensor]] = (-1, [])
        joint = stacked(self.models)
        decay = problem.training.weight_decay + self.recipe.prior_precision / problem.num_data
        self.descent = GradientDescent(
            problem, joint, self._loss,
            hyper={name: torch.stack([value] * self.count) for name, value in problem.likelihood.hyper().items()},
            weight_decay={name: decay for name, _ in joint.named_parameters()},
        )  # fmt: skip

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Take one optimizer step for all members; each takes as many rows as the batch, in its own order."""
        state, info = self.descent.update(state, self._rows(state["step"], batch.size), generator)
        return state, {**info, "loss": info["loss"] / self.count}

    def _rows(self, step: int, size: int) -> Batch:
        training, per_epoch = self.problem.training, self.problem.source.num_batches
        assert per_epoch is not None
        epoch, index = divmod(step, per_epoch)
        if self.orders[0] != epoch:
            self.orders = (epoch, [self._order(k, epoch) for k in range(self.count)])
        start = index * training.batch_size
        chosen = torch.cat([order[start : start + size] for order in self.orders[1]])
        inputs, targets = batches.map_leaves(lambda rows: rows.index_select(0, chosen.to(rows.device)), self.pair)
        return Batch(self.problem.source.place(inputs), self.problem.source.place(targets), size)

    def _order(self, k: int, epoch: int) -> Tensor:
        """Return the order in which the fit loop would pass the data to this member alone."""
        order = torch.arange(self.size)
        if self.problem.training.shuffle:
            generator = torch.Generator().manual_seed(derive_seed(self.together.seeds[k], "loader", epoch))
            order = torch.randperm(self.size, generator=generator)
        drawn = self.drawn[k]
        return order if drawn is None else drawn[order]

    def _loss(self, module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        outputs, likelihood = params.call(module, batch.inputs), self.problem.likelihood
        if not hyper:
            return -likelihood.log_prob(outputs, batch.targets).sum() / batch.size
        parts = zip(outputs.chunk(self.count), batch.targets.chunk(self.count), strict=True)
        total = sum(
            likelihood.log_prob(f, y, {name: value[k] for name, value in hyper.items()}).sum()
            for k, (f, y) in enumerate(parts)
        )
        return -total / batch.size  # type: ignore[return-value]

    def posterior(self, state: State) -> EnsemblePosterior:
        """Return the members, each with the noise and temperature that `MAP` would choose."""
        joint = self.descent.load(state)
        return EnsemblePosterior([self._member(joint, state, k) for k in range(self.count)], self.together.ensemble)

    def _member(self, joint: nn.Module, state: State, k: int) -> Posterior:
        problem, drawn = self.problem, self.drawn[k]
        model = params.load_(light_copy(self.models[k]), {n: v.detach()[k] for n, v in joint.named_parameters()})
        source = problem.source
        if drawn is not None:
            pair = batches.take(self.pair, drawn)
            source = Source(pair, batch_size=problem.training.batch_size, device=source.device, dtype=source.dtype)
        hyper = {name: value.detach()[k] for name, value in state["hyper"].items()}
        return point(self.recipe, dataclasses.replace(problem, source=source), model, hyper)
