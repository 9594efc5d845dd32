"""From a converted network that was trained in a loop of one's own to the posterior that a fit would give."""

from __future__ import annotations

import copy
from typing import Any

from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.trainer import GroupTrainer
from dubito.methods.variational.module import VariationalModule
from dubito.methods.variational.recipe import Variational
from dubito.methods.variational.trainer import Trainer
from dubito.networks.selection import Selection
from dubito.select import mask


@setting
class Finished(Recipe):
    """The end of `Variational` alone: it takes no step, and measures on the data what a converted module has learned.

    Args:
        module: The converted module.
        temperature: What the divergence was weighted with in training, and will be in updates.
    """

    setting_name = "variational.Finished"
    module: Any
    temperature: float = 1.0

    def build(self, problem: Problem) -> Inference:
        """Return no steps, and the posterior."""
        module: VariationalModule = copy.deepcopy(self.module)
        trainer = GroupTrainer if isinstance(module, GroupModule) else Trainer
        return trainer(self._recipe(), problem, module).inference()

    def _recipe(self) -> Variational:
        """The recipe with the settings that the module was converted with."""
        settings = dict(self.module.settings)
        if isinstance(settings["weights"], Selection):
            settings["weights"] = mask(settings["weights"].masks())
        if isinstance(settings["initial_scale"], dict):
            del settings["initial_scale"]
        return Variational(**settings, temperature=self.temperature)
