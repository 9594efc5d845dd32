"""What the tests of the fit loop share: a small problem, a network with everything that has state, and a toy method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito import MAP, Posterior
from dubito.core.batches import Batch
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.recipe import Recipe
from dubito.methods.map.posterior import PointPosterior


def classification(size: int = 50, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
    return nn.Sequential(*layers)


@setting
class Average(Recipe):
    """A toy method that asks for all the data at once: the running mean of a noisy statistic."""

    setting_name = "testing.Average"
    steps: int = 5

    def build(self, problem: Problem) -> Inference:
        def init(weights: Any, buffers: Any, generator: torch.Generator) -> State:
            return {"total": torch.zeros(4), "sizes": []}

        def update(state: State, batch: Batch, generator: torch.Generator) -> Any:
            noise = torch.randn(4, generator=generator) + torch.randn(4)
            total = state["total"] + batch.inputs.mean(0) + noise  # a new state: nothing is changed in place
            return {"total": total, "sizes": [*state["sizes"], batch.size]}, {}

        def posterior(state: State) -> Posterior:
            assert state["sizes"] == [50] * self.steps
            problem.model[4].bias.data = state["total"][:3]  # type: ignore[index]
            return PointPosterior(problem.model, problem.likelihood, MAP(), problem.num_data)

        return Inference(init, update, posterior, epochs=self.steps, batches="full")
