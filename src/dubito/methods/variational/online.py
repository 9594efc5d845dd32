r"""Variational continual learning: the posterior so far is the prior of an update.

$$q_t = \arg\max_q\; \mathbb E_q[\log p(D_t \mid w)] - T\,\mathrm{KL}(q \,\|\, q_{t-1})$$

(Nguyen et al. 2018, https://arxiv.org/abs/1710.10628). A weight that is not random keeps
its value; with ``biases="random"`` biases are updated, too. `Finished` is for networks trained in a custom loop.
"""

from __future__ import annotations

from typing import Any

from dubito.beliefs.priors import ByName, Normal
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.variational.conversion import convert
from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.posterior import GroupTrainer
from dubito.methods.variational.joint import JointModule
from dubito.methods.variational.module import VariationalModule
from dubito.methods.variational.posterior import VariationalPosterior
from dubito.methods.variational.recipe import Variational
from dubito.methods.variational.trainer import VariationalTrainer
from dubito.networks.selection import Selection
from dubito.networks.twin import light_copy
from dubito.select import mask


@setting
class UpdateVariational(Recipe):
    """Train a variational posterior on new data, with the posterior so far as the prior.

    Args:
        posterior: The posterior so far.
    """

    setting_name = "variational.Continue"
    posterior: Any

    def build(self, problem: Problem) -> Inference:
        """Return the training steps."""
        old: VariationalPosterior = self.posterior
        selection, recipe = old.selection, old.recipe
        own = old.scale if old.correlations is None else old.scale / old.correlations.spread()
        centers, spreads = (old.by_name(flat) for flat in (selection.ravel(old.mean()), old.scale))
        prior = {name: Normal(center, spreads[name]) for name, center in centers.items()}
        module = convert(
            problem.model, prior=ByName(prior), estimator=recipe.sampling, initial_scale=old.by_name(own),
            biases="random", weights=selection, rest="hold", family=recipe.family, rank=recipe.rank,
        )  # fmt: skip
        if isinstance(module, JointModule) and old.factor is not None:
            module.continue_from(old.factor)
        return VariationalTrainer(recipe, problem, module, before=old).inference()


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
