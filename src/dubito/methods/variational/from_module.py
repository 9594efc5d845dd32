"""Make a posterior of a converted network that was trained in a custom loop."""

from __future__ import annotations

from typing import Any

from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.trainer import GroupTrainer
from dubito.methods.variational.module import VariationalModule
from dubito.methods.variational.recipe import Variational
from dubito.methods.variational.trainer import VariationalTrainer
from dubito.networks.selection import Selection
from dubito.networks.twin import light_copy
from dubito.select import mask


@setting
class Finished(Recipe):
    """A `Variational` fit without training: it only measures on the data how well a converted module fits.

    Args:
        module: The converted module.
        temperature: The weight of the KL divergence in training and in updates.
    """

    setting_name = "variational.Finished"
    module: Any
    temperature: float = 1.0

    def build(self, problem: Problem) -> Inference:
        """Return an inference without steps."""
        module: VariationalModule = light_copy(self.module)
        trainer = GroupTrainer if isinstance(module, GroupModule) else VariationalTrainer
        return trainer(self._recipe(), problem, module).inference()

    def _recipe(self) -> Variational:
        """Return the recipe with the settings of the module's conversion."""
        settings = dict(self.module.settings)
        if isinstance(settings["weights"], Selection):
            settings["weights"] = mask(settings["weights"].masks())
        if isinstance(settings["initial_scale"], dict):
            del settings["initial_scale"]
        return Variational(**settings, temperature=self.temperature)
