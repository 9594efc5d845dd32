r"""Learning on with a sampler: the particles' moments are the prior of the new data, and chains go on where they ended.

$$p(w \mid D_1, D_2) \propto p(D_2 \mid w)\, p(w \mid D_1)
  \approx p(D_2 \mid w)\, \mathcal N(w; \bar w, \Sigma)$$

with the mean and covariance of the particles; the covariance is only its diagonal where there are fewer than ten
particles for each random weight. At a temperature T the particles are those of $p^{1/T}$, and so is what is sampled
from now on: the normal density counts once, and $p(D_2 \mid w)$ to the power of $1/T$.
"""

from __future__ import annotations

from typing import Any

from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training


@setting
class Continue(Recipe):
    """Sample on with new data, the particles so far being the prior.

    Args:
        posterior: The posterior so far.
    """

    setting_name = "mcmc.Continue"
    posterior: Any

    def default_training(self) -> Training:
        """As the recipe that found the particles."""
        return self.posterior.recipe.default_training()

    def build(self, problem: Problem) -> Inference:
        """Return the steps of the recipe that found the particles."""
        return self.posterior.recipe.build_after(problem, self.posterior)
