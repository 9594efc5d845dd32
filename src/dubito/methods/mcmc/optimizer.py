"""The kernels of `SGMCMC` as an optimizer of torch, for training loops of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count, CountOrZero, NonNegative, Positive
from dubito.core.errors import InputError
from dubito.core.randomness import beside, default_generator
from dubito.methods.mcmc.kernels import KernelStep, make_kernel


class SamplingOptimizer(torch.optim.Optimizer):
    r"""Draw weights from a posterior by steps on the mean loss of mini-batches.

    After ``loss.backward()`` of the mean negative log-likelihood, a step moves all weights by one transition of the
    kernel (`dubito.methods.mcmc.kernels`) for the potential $U(w) = N\,\text{loss}(w) + \frac\lambda2 \|w\|^2$. The
    weights after a burn-in are dependent samples; keep some of them, far apart, for `Ensemble.of`.

    Args:
        parameters: The weights; all of them are one vector for the kernel.
        lr: The step size ℓ, the learning rate of gradient descent on the mean loss; `SGMCMC` calls it `step_size`. A
            scheduler may change it.
        num_data: N, the number of training examples.
        kernel: ``"sgld"``, ``"psgld"``, ``"sghmc"`` or ``"sgnht"``.
        prior_precision: λ of the prior N(0, 1/λ).
        temperature: T; 0 draws no noise.
        friction: The fraction of the momentum that a step removes.
        burn_in: The number of steps in which ``"psgld"`` adapts.
        generator: The source of randomness; by default one with a fixed seed.
    """

    @checked_arguments
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: Positive,
        *,
        num_data: Count,
        kernel: Literal["sgld", "psgld", "sghmc", "sgnht"] = "sghmc",
        prior_precision: NonNegative = 1.0,
        temperature: NonNegative = 1.0,
        friction: Positive = 0.1,
        burn_in: CountOrZero = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__([value for value in parameters if value.requires_grad], {"lr": lr})
        if len(self.param_groups) > 1:
            raise InputError("A sampling optimizer takes one group of parameters: give model.parameters().")
        self.kernel, self.num_data, self.burn_in = make_kernel(kernel, friction), num_data, burn_in
        self.prior_precision, self.temperature = prior_precision, temperature
        self.generator = beside(default_generator(generator), self._weights[0].device)

    @property
    def _weights(self) -> list[nn.Parameter]:
        return list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move all weights by one transition; return the value of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weights = self._weights
        position = torch.cat([value.flatten() for value in weights])
        gradients = [torch.zeros_like(v) if v.grad is None else v.grad for v in weights]
        gradient = torch.cat([each.flatten() for each in gradients]).mul_(self.num_data)
        gradient.add_(position, alpha=self.prior_precision)
        own = self.state[weights[0]]  # one vector for all weights, kept under the first of them
        if not own:
            own |= {"number": 0, **self.kernel.init(position)}
        size = float(self.param_groups[0]["lr"]) / self.num_data
        noise = torch.empty_like(position)
        if self.temperature:
            noise.normal_(generator=self.generator)
        move = KernelStep(size, self.temperature, own["number"] < self.burn_in, own["number"])
        self.kernel.move(position, own, gradient, noise, move)
        own["number"] += 1
        for value, part in zip(weights, position.split([v.numel() for v in weights]), strict=True):
            value.copy_(part.view_as(value))
        return loss
