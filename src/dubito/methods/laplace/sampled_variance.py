r"""Variances of linearized outputs, estimated from posterior samples of the weights.

Exactly, each output of an example takes a backward pass of its own. With many outputs (a class per pixel, a vocabulary
per token) it is cheaper to average $(J \delta_s)^2$ over samples $\delta_s \sim N(0, \Sigma)$, where each product
$J \delta_s$ has all outputs. The estimate is unbiased, with a relative error of $\sqrt{2 / S}$.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.core import batches, limits, params
from dubito.core.limits import slices
from dubito.core.params import differentiable_twice
from dubito.fitting.functions import jacobian_product

if TYPE_CHECKING:
    from dubito.methods.laplace.posterior import LaplacePosterior

# Samples of the weights.
DRAWS = 32


class SampledVariance:
    """Estimates the variances of the outputs; the samples are the same for all batches."""

    def __init__(self, posterior: LaplacePosterior, generator: torch.Generator) -> None:
        self.posterior, size = posterior, posterior.selection.num_weights
        self.seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        self.at_once = max(1, min(DRAWS, limits.current().drawn_weights // (8 * size)))
        keeps = 4 * size * DRAWS <= limits.current().kept_weights
        self.kept: list[Tensor] | None = list(self._draw()) if keeps else None

    def _draw(self) -> Iterator[Tensor]:
        """Yield all samples ``[s, D]``, some at a time."""
        selection, covariance = self.posterior.selection, self.posterior.covariance
        like = selection.ravel(self.posterior.mean())
        generator = torch.Generator().manual_seed(self.seed)
        for some in slices(DRAWS, self.at_once):
            yield covariance.sample(some.stop - some.start, selection.num_weights, generator, like)

    def __call__(self, inputs: Any, centred: bool) -> tuple[Tensor, Tensor]:
        """Return outputs in the model's layout, and the variance of every canonical output."""
        engine = self.posterior.engine
        outputs, variances = [], []
        for rows in slices(batches.num_rows(inputs), engine.columns_at_once(64)):
            found, variance = self._part(batches.take(inputs, rows), centred)
            outputs.append(found)
            variances.append(variance)
        return torch.cat(outputs), torch.cat(variances)

    @torch.inference_mode(False)
    def _part(self, inputs: Any, centred: bool) -> tuple[Tensor, Tensor]:
        engine, selection, likelihood = self.posterior.engine, self.posterior.selection, self.posterior.likelihood
        given = batches.map_leaves(torch.clone, inputs)
        with torch.enable_grad():
            with differentiable_twice():
                outputs = params.call(engine.model, given)
            product = jacobian_product(outputs, [engine.parameters[name] for name in selection.names])
            total = torch.zeros_like(likelihood.canonical(outputs.detach()))
            for some in self.kept or self._draw():
                for step in map(selection.fill, some):
                    change = likelihood.canonical(product([step[name] for name in selection.names]).detach())
                    change = change - change.mean(-1, keepdim=True) if centred else change
                    total += change.square_()
        return outputs.detach(), total / DRAWS


def variance_function(
    posterior: LaplacePosterior, generator: torch.Generator, centred: bool, exact: bool | None
) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Return the function that gives outputs and their variances: exact ones, or estimates where `exact` is False.

    With None, they are exact unless that takes too long.
    """
    sampled: list[SampledVariance] = []

    def moments(inputs: Any) -> tuple[Tensor, Tensor]:
        linearized, first = posterior.linearized, None if exact is False else posterior.linearized.start(inputs)
        if first is not None and (exact or not linearized.is_slow(first)):
            covariances = [posterior.covariance]
            outputs, (variance,) = linearized.variances(inputs, covariances, centred=centred, first=first)
            return outputs, variance
        if not sampled:
            sampled.append(SampledVariance(posterior, generator))
        return sampled[0](inputs, centred)

    return moments
