"""Train under masks: fine-tuning of the kept weights, and gradual magnitude pruning as a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.batches import Batch, Data, Source
from dubito.core.constraints import Count, OpenProbability, Probability, Start
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.core.settings import setting
from dubito.fitting.gradient_training import GradientDescent, validation_score
from dubito.fitting.inference import Inference, Info, Problem, State
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP
from dubito.networks.twin import copied
from dubito.uses.compression.rules import Masks, lowest_removed
from dubito.uses.compression.weight_statistics import prunable

# Fewer steps than this do not mend a network that has lost most of its weights.
ENOUGH_STEPS, BATCH_SIZE = 1000, 64


def default_training(data: Data) -> Training:
    """Return how to fine-tune: three epochs at a low rate; on small data 1,000 steps at a higher one.

    >>> default_training((torch.zeros(640, 2), torch.zeros(640)))
    Training(epochs=100, lr=0.001, batch_size=64, schedule='linear')
    """
    batches = Source(data, batch_size=BATCH_SIZE, must_count=False).num_batches
    if batches is None or 3 * batches >= ENOUGH_STEPS:
        return Training(epochs=3, lr=1e-4, schedule="linear", batch_size=BATCH_SIZE)
    return Training(epochs=math.ceil(ENOUGH_STEPS / batches), lr=1e-3, schedule="linear", batch_size=BATCH_SIZE)


@setting
class GradualMagnitude(Recipe):
    r"""Train while removing more and more of the smallest weights (Zhu & Gupta 2017, https://arxiv.org/abs/1710.01878).

    The fraction that is gone at the fraction t of all steps is cubic,

    $$s(t) = s_\text{end} + (s_0 - s_\text{end}) \Big(1 - \frac{t - t_0}{t_1 - t_0}\Big)^3 ,$$

    over all weight matrices together; a weight that is gone keeps its last value, with which it may come back before
    $t_1$ if others fall below it. Well tuned it is as good as sparse variational dropout at a third of the cost (Gale
    et al. 2019, https://arxiv.org/abs/1902.09574), so every table of ours has it. The posterior is a point:
    `compress(posterior, rules.Magnitude(target))` makes it small.

    Args:
        target: The fraction that is gone in the end.
        begin: The fraction $t_0$ of training before anything goes.
        end: The fraction $t_1$ after which the same weights stay gone.
        every: Steps between two choices.
        start: ``"model"`` trains on from the model's weights, ``"fresh"`` from newly drawn ones,
            ``"head"`` with a new output layer.
        initial: The fraction $s_0$ that is gone from the start, such as the zeros of a network that is sparse already.
    """

    setting_name = "compression.GradualMagnitude"
    target: OpenProbability
    begin: Probability = 0.15
    end: Probability = 0.65
    every: Count = 50
    start: Start = "model"
    initial: Probability = 0.0

    def __post_init__(self) -> None:
        if not self.begin < self.end:
            raise InputError(f"`begin` must be below `end`, got {self.begin} and {self.end}.")
        if self.initial > self.target:
            raise InputError(f"`initial` must be at most the target of {self.target}, got {self.initial!r}.")

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        names = prunable(problem.model)

        def choose(state: State) -> Masks | None:
            t = problem.progress_at(state["step"])
            if state["step"] % self.every and t < self.end:
                return None
            share = min(max((t - self.begin) / (self.end - self.begin), 0.0), 1.0)
            if t > self.end and state["settled"]:
                return None
            state["settled"] = t >= self.end
            weights = dict(problem.model.named_parameters())
            size = {name: weights[name].detach().abs() for name in names}
            return lowest_removed(size, self.target + (self.initial - self.target) * (1 - share) ** 3)

        own = dict(problem.model.named_parameters())
        masks = {name: torch.ones_like(own[name], dtype=torch.bool) for name in names}
        return _masked_training(problem, masks, choose)


@setting
class _Masked(Recipe):
    """Training of the weights under fixed masks, by name."""

    masks: dict[str, Tensor]

    def build(self, problem: Problem) -> Inference:
        """Return the steps of training."""
        return _masked_training(problem, self.masks, lambda state: None)


def finetune(
    model: nn.Module,
    masks: Masks,
    data: Data,
    likelihood: Likelihood,
    training: Training,
    *,
    num_data: int | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a copy that is trained further, in which masked weights stay zero."""
    options: dict[str, Any] = {"num_data": num_data, "generator": generator, "progress": False}
    return _Masked(masks).fit(model, data, likelihood=likelihood, training=training, **options).model


def _masked_training(problem: Problem, masks: Masks, choose: Callable[[State], Masks | None]) -> Inference:
    """Train the network with masked weights: these get no gradient and are zero at the end."""
    place = next(problem.model.parameters()).device
    masks = {name: mask.to(place, copy=True) for name, mask in masks.items()}

    def loss(module: nn.Module, batch: Batch, hyper: Params, generator: torch.Generator) -> Tensor:
        weights = dict(module.named_parameters())
        masked = {name: weights[name] * mask for name, mask in masks.items()}
        outputs = params.functional_call(module, masked, batch.inputs)
        return -problem.likelihood.log_prob(outputs, batch.targets, hyper).sum() / batch.size

    descent = GradientDescent(problem, problem.model, loss, hyper=problem.likelihood.hyper())

    def init(initial: Params, buffers: Any, generator: torch.Generator) -> State:
        return {**descent.init(initial, buffers, generator), "masks": masks, "settled": False}

    def update(state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        chosen = choose(state)
        for name, mask in (chosen or {}).items():
            masks[name].copy_(mask)
        return descent.update(state, batch, generator)

    def masked(state: State) -> nn.Module:
        module = copied(descent.load(state))
        with torch.no_grad():
            for name, weight in module.named_parameters():
                weight.mul_(state["masks"].get(name, 1.0))
        return module

    def posterior(state: State) -> PointPosterior:
        hyper = {name: value.detach() for name, value in state["hyper"].items()}
        return PointPosterior(masked(state), problem.likelihood.resolved(hyper), MAP(), problem.num_data)

    score = validation_score(problem, masked)
    return Inference(init, update, posterior, epochs=problem.training.epochs, score=score)
