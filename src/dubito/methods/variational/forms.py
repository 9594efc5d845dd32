"""The predictive by moments that are propagated through the layers, for exported files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction
from dubito.core.errors import UnsupportedError
from dubito.core.tracing import rows_to_record
from dubito.curvature import links
from dubito.fitting.traceable import Traceable
from dubito.networks.moments import propagated

if TYPE_CHECKING:
    from dubito.methods.variational.posterior import VariationalPosterior

# Points at which Gaussian logits are averaged, and weight samples of the prediction that the result is compared with.
POINTS, REFERENCE = 64, 512
APPROXIMATIONS = (
    "Activations are treated as independent Gaussians, so correlations between units are lost.",
    f"Class probabilities are averaged over {POINTS} fixed points of the Gaussian logits.",
)


def moment_forms(posterior: VariationalPosterior, example: Any) -> Iterator[Traceable]:
    """Yield the form, or nothing if a layer has no rule for moments."""
    few = rows_to_record(example)
    _, variances = posterior.marginals()
    random = {name: variances[name] for name in posterior.selection.names}
    try:
        moments = propagated(posterior.model, random, few)
        moments(few)
    except UnsupportedError:
        return
    noise, link = FixedPoints(), replace(links.PROBIT, log_probs=None)

    def predict(inputs: Any) -> Prediction:
        outputs, variance = moments(inputs)
        return links.predict(posterior.likelihood, outputs, posterior.likelihood.canonical(variance), noise, link)

    notes = APPROXIMATIONS if links.is_classification(posterior.likelihood) else APPROXIMATIONS[:1]
    yield Traceable(predict, "moments propagated through the layers", notes, REFERENCE)


class FixedPoints(links.Noise):
    """Evenly spread standard normal points (a Sobol sequence), which average better than random ones."""

    def __init__(self) -> None:
        super().__init__(POINTS, torch.Generator())

    def like(self, outputs: Tensor) -> Tensor:
        """Return the points ``[S, 1, ...]`` for outputs ``[B, ...]``."""
        shape = outputs.shape[1:]
        if shape not in self._drawn:
            engine = torch.quasirandom.SobolEngine(outputs[0].numel(), scramble=True, seed=0)
            points = engine.draw(POINTS, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
            self._drawn[shape] = torch.special.ndtri(points).reshape(POINTS, 1, *shape)
        return self._drawn[shape].to(outputs)
