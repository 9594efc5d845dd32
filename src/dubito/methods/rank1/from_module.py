"""Make a posterior of a rank-1 network that was trained in a custom loop."""

from __future__ import annotations

from typing import Any

from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.rank1.trainer import Rank1Trainer


@setting
class FinishedRank1(Recipe):
    """A `Rank1` or `BatchEnsemble` fit without training.

    Args:
        module: The converted module.
    """

    setting_name = "rank1.Finished"
    module: Any

    def build(self, problem: Problem) -> Inference:
        """Return an inference without steps."""
        return Rank1Trainer(self.module.settings, problem, self.module).inference()
