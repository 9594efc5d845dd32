r"""The target density: its potential $U(w) = -\sum_n \log p(y_n \mid x_n, w) - \log p(w)$ of the flat weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import params
from dubito.core.batches import Batch
from dubito.core.params import Params
from dubito.core.precision import widened
from dubito.fitting.inference import Problem
from dubito.methods.mcmc.cached_head import RandomHead
from dubito.methods.mcmc.prior_energy import PriorDensity
from dubito.networks.selection import Selection

# Maps a position to its potential and the gradient there.
Potential = Callable[[Tensor], tuple[Tensor, Tensor]]


class Target:
    """The potential of a network's selected weights and its gradient, each as one flat vector.

    The vector holds the selected weights and then a learned number of the likelihood, such as the logarithm of the
    noise. Fully selected parameters become views of it, so nothing is copied; gradients are computed for the selected
    parameters only. Layers run in evaluation mode: dropout is off, and BatchNorm uses its running statistics.

    Args:
        model: A private copy of the network.
        likelihood: The distribution of targets given outputs.
        selection: Which weights are random.
        density: The prior of the vector.
        head: The last part of the network, which is run instead of all of it; inputs are then features.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        selection: Selection,
        density: PriorDensity,
        head: RandomHead | None = None,
    ) -> None:
        self.model, self.likelihood, self.selection, self.density = model.eval(), likelihood, selection, density
        self.head = head
        self.module: nn.Module = model if head is None else head
        self.hyper_names = list(likelihood.hyper())
        parameters = dict(model.named_parameters())
        for value in parameters.values():
            value.requires_grad_(False)
        self.chosen = [parameters[name] for name in selection.names]
        for value in self.chosen:
            value.requires_grad_(True)
        self.positions = [
            None if selection.is_whole(name) else selection.positions(name).to(parameters[name].device)
            for name in selection.names
        ]
        self.spans = list(selection.slices.values())

    def load(self, flat: Tensor) -> None:
        """Load the weights of a position into the network."""
        for value, where, span in zip(self.chosen, self.positions, self.spans, strict=True):
            own = flat[span].to(value.dtype)
            if where is None:
                value.data = own.view(value.shape)
            else:
                value.data.view(-1).index_copy_(0, where, own)

    def hyper(self, flat: Tensor) -> Params:
        """Return the likelihood's learned number at a position, as leaves of autograd."""
        first = self.selection.num_weights
        return {name: flat[first + i].detach().requires_grad_() for i, name in enumerate(self.hyper_names)}

    def likelihood_gradient(self, flat: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """Return ``−scale · Σ log p`` over the batch and its gradient ``[D]``, a new tensor."""
        self.load(flat)
        hyper = self.hyper(flat)
        with torch.enable_grad():
            outputs = params.call(self.module, batch.inputs)
            loss = self.likelihood.log_prob(outputs, batch.targets, hyper).sum() * -scale
            found = torch.autograd.grad(loss, [*self.chosen, *hyper.values()], allow_unused=True)
        parts = []
        for value, gradient, where in zip([*self.chosen, *hyper.values()], found, self._places, strict=True):
            whole = torch.zeros_like(value) if gradient is None else gradient
            parts.append(whole.reshape(-1) if where is None else whole.reshape(-1)[where])
        return loss.detach(), torch.cat(parts).to(flat.dtype)

    def gradient(self, flat: Tensor, batch: Batch, scale: float) -> tuple[Tensor, Tensor]:
        """Return ``−scale · Σ log p`` over the batch, and the gradient of that plus the prior's energy."""
        loss, gradient = self.likelihood_gradient(flat, batch, scale)
        self.density.add_gradient_(gradient, flat)
        return loss, gradient

    def potential(self, batch: Batch, temperature: float = 1.0) -> Potential:
        """Return the function that maps a position to ``U / T`` in float64 and its gradient, for all the data."""

        def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
            loss, gradient = self.gradient(flat, batch, 1.0)
            energy = (loss.double() + self.density.energy(flat).double()) / temperature
            return energy, gradient if temperature == 1.0 else gradient.div_(temperature)

        return evaluate

    @torch.no_grad()
    def outputs(self, flat: Tensor, inputs: Any) -> Tensor:
        """Return the outputs at a position."""
        self.load(flat)
        return params.call(self.module, inputs)

    @property
    def _places(self) -> list[Tensor | None]:
        return [*self.positions, *([None] * len(self.hyper_names))]


def start_of(problem: Problem, selection: Selection, hyper: Params) -> Tensor:
    """Return the position of the network: the selected weights and the likelihood's best learned number for them.

    Its steps are too small for half precision, so it is float32 or better.
    """
    flat = widened(selection.ravel(params.of(problem.model)))
    return torch.cat([flat, *(number.to(flat).reshape(1) for number in hyper.values())])
