r"""Update a sampled posterior: the moments of its particles are the prior, and chains continue where they ended.

$$p(w \mid D_1, D_2) \propto p(D_2 \mid w)\, p(w \mid D_1)
  \approx p(D_2 \mid w)\, \mathcal N(w; \bar w, \Sigma)$$

with the mean and covariance of the particles; with fewer than ten particles per random weight only the diagonal of
the covariance is used. At temperature T the old particles are samples of $p^{1/T}$, and so are the new ones: the
normal density is not tempered again, and $p(D_2 \mid w)$ is raised to the power $1/T$.
"""

from __future__ import annotations

from typing import Any

from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training


@setting
class UpdateParticles(Recipe):
    """Sample with new data, under the prior that the particles so far define.

    Args:
        posterior: The posterior so far.
    """

    setting_name = "mcmc.Continue"
    posterior: Any

    def default_training(self) -> Training:
        """Return those of the recipe that found the particles."""
        return self.posterior.recipe.default_training()

    def build(self, problem: Problem) -> Inference:
        """Return the steps of the recipe that found the particles."""
        return self.posterior.recipe.build_after(problem, self.posterior)
