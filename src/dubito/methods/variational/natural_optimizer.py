"""Natural gradients as a `torch.optim.Optimizer`, for your own training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dubito.core.constraints import Count, Positive, check
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator
from dubito.methods.variational.module import VariationalModule
from dubito.methods.variational.natural import (
    FASTEST,
    MOMENTUM,
    RATE,
    SLOWEST,
    TURNOVERS,
    NaturalStep,
    Weights,
    check_prior,
)


class NaturalOptimizer(torch.optim.Optimizer):
    """Natural gradient steps on the random weights of a converted network; see `dubito.methods.variational.natural`.

    They are the steps of ``Variational(optimizer="natural")``. `step` takes a closure that computes the loss, calls
    ``backward()`` and returns the loss: the mean negative log-likelihood of a batch *without* the KL divergence. While
    it runs, the network has one weight sample; after the step it has the means. Parameters that are not random are in
    `points`, for an optimizer of their own.

    Args:
        module: The result of ``variational.convert(model, estimator="weight")``.
        num_data: The number of training examples.
        total_steps: The number of steps of the whole training, over which precisions turn over about 20 times.
        lr: The learning rate, as for `Variational`. Schedulers of torch may change it.
        temperature: The weight of the KL divergence.
        generator: The source of randomness; by default a fixed seed.
    """

    def __init__(
        self,
        module: VariationalModule,
        *,
        num_data: int,
        total_steps: int,
        lr: float = 1e-3,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        counts, numbers = {"num_data": num_data, "total_steps": total_steps}, {"lr": lr, "temperature": temperature}
        for name, count in counts.items():
            check(name, Count, count)
        for name, number in numbers.items():
            check(name, Positive, number)
        if type(module) is not VariationalModule or module.estimator != "weight":
            raise InputError("NaturalOptimizer needs variational.convert(model, estimator='weight').")
        parameters = dict(module.network.named_parameters())
        self.module, self.parts = module, [(part, parameters[name]) for name, part in module.parts()]
        for part, _ in self.parts:
            check_prior(part.prior)
        random = {id(value) for _, value in self.parts}
        self.points = [value for value in parameters.values() if id(value) not in random and value.requires_grad]
        super().__init__([value for _, value in self.parts], {"lr": lr})
        self.first_lr, self.num_data = lr, num_data / temperature
        self.turnover = min(max(TURNOVERS / total_steps, SLOWEST), FASTEST)
        self.generator = default_generator(generator)
        self.first_precision = [float(part.log_scale.detach().mul(-2).exp().mean()) for part, _ in self.parts]
        for part, value in self.parts:
            precision = part.log_scale.detach().mul(-2).exp()
            zeros = {"momentum": torch.zeros_like(precision), "noise": torch.zeros_like(precision)}
            self.state[value] = {"mean": value.detach().clone(), "precision": precision, **zeros, "step": 0}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Draw weights, call the closure, take one step, and return the closure's result."""
        if closure is None:
            raise InputError("NaturalOptimizer.step needs a closure that computes the loss and calls backward().")
        weights = [
            Weights(part, value, self.state[value], first)
            for (part, value), first in zip(self.parts, self.first_precision, strict=True)
        ]
        number = self.state[self.parts[0][1]]["step"]
        for each, (_, value) in zip(weights, self.parts, strict=True):
            each.state["mean"].copy_(value)  # which the user may have changed
            each.draw(number, self.generator)
        self.module.at_sample = True
        try:
            with torch.enable_grad():
                loss = closure()
            self._move(weights, number)
        finally:
            self.module.at_sample = False
            for each in weights:
                each.parameter.copy_(each.state["mean"])
                each.part.log_scale.copy_(each.state["precision"].log().mul_(-0.5))
        return loss

    def _move(self, weights: list[Weights], number: int) -> None:
        """Move means and precisions by the gradients of the closure."""
        lr = self.param_groups[0]["lr"]
        turnover = self.turnover * lr / self.first_lr
        step = NaturalStep(RATE * lr, turnover, self.num_data, 1 - MOMENTUM ** (number + 1))
        for each, (part, value) in zip(weights, self.parts, strict=True):
            gradient: Tensor | None = value.grad
            each.move(part.chosen(torch.zeros_like(value) if gradient is None else gradient), step)
            self.state[value]["step"] = number + 1
