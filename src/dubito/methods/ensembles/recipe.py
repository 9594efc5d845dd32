"""The `Ensemble` recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from dubito.core import distributed
from dubito.core.batches import Source
from dubito.core.constraints import Count, NonNegative, Start
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.randomness import default_generator
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.problems import finish, resolved_training
from dubito.fitting.recipe import FitCall, Recipe
from dubito.fitting.training import Training
from dubito.methods.map.recipe import MAP

if TYPE_CHECKING:
    from torch import nn

    from dubito.beliefs.likelihoods import Likelihood
    from dubito.core.batches import Data
    from dubito.fitting.posterior import Posterior
    from dubito.methods.ensembles.posterior import EnsemblePosterior


@setting
class Ensemble(Recipe):
    r"""Fit several networks, each from its own initial weights and data order, and average their predictions.

    $$p(y \mid x) = \frac1K \sum_k p_k(y \mid x)$$

    (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474). Members can use any recipe:
    ``Ensemble(recipe=SWAG())`` is multi-SWAG (Wilson & Izmailov 2020, https://arxiv.org/abs/2002.08791). For a recipe
    that needs a trained network, such as ``Laplace()``, each member's network is trained first. If `torch.distributed`
    is initialized, the members are divided among the processes. With ``Training(checkpoint="run")`` members that are
    trained one after another have the checkpoints ``run.member-0`` and so on; an interrupted run continues within the
    member that it had reached.

    Args:
        members: The number of members.
        recipe: The recipe of each member.
        start: ``"fresh"``: every member draws new weights. ``"head"``: every member draws a new output layer and keeps
            the model's other weights. ``"model"``: the first starts at the model's weights, the others near them.
        perturbation: With ``start="model"`` the noise on the start of all members but the first, in units of the root
            mean square of each parameter.
        bootstrap: Whether each member is trained on a bootstrap sample of the data, drawn with replacement.
        together: ``"auto"`` trains all members at once, by batched matrix products and one fused optimizer, if the
            network has linear layers only, the recipe is `MAP` and the data is in memory. True raises an error if this
            is not possible; False trains one member after another.
            The result is the same up to rounding.
    """

    setting_name = "Ensemble"
    members: Count = 5
    recipe: Recipe = MAP()
    start: Start = "fresh"
    perturbation: NonNegative = 0.1
    bootstrap: bool = False
    together: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.start == "model" and self.recipe.redraws:
            own = self.recipe.start
            raise InputError(
                f"{self.recipe!r} starts {own}, but the ensemble starts from the model: use Ensemble(start='{own}')."
            )
        self.steps()  # raises an error if the recipe cannot start like this

    @classmethod
    def of(
        cls,
        members: Sequence[nn.Module | Posterior],
        *,
        likelihood: str | Likelihood = "categorical",
        data: Data | None = None,
    ) -> EnsemblePosterior:
        """Return the ensemble of networks that are trained already, or of posteriors; nothing is trained.

        Args:
            members: Trained networks of one architecture, or posteriors of such networks.
            likelihood: As for `Recipe.fit`; posteriors have their own.
            data: Training data, from which the noise of a Gaussian likelihood is found if it is not given.

        >>> from torch import nn
        >>> Ensemble.of([nn.Linear(3, 2), nn.Linear(3, 2)])
        <Ensemble of 2 posteriors over 8 weights by Ensemble(members=2, recipe=MAP(train=False), start='model')>
        """
        from dubito.methods.ensembles.posterior import ensemble_of

        return ensemble_of(cls, members, likelihood, data)

    def steps(self) -> tuple[Recipe, ...]:
        """Return the recipes that are fitted in turn for one member: `MAP` first if a trained network is needed.

        >>> from dubito import Laplace
        >>> Ensemble(recipe=Laplace()).steps()
        (MAP(start='fresh'), Laplace())
        """
        if self.recipe.needs_trained_model and not isinstance(self.recipe, MAP):
            return MAP(start=self.start), self.recipe
        return (self.recipe.starting(self.start),)

    def default_training(self) -> Training:
        """Return the training settings of a member."""
        return self.steps()[0].default_training()

    def build(self, problem: Problem) -> Inference:
        """Raise an error: each member is fitted on its own."""
        raise UnsupportedError("An ensemble has no single inference: call fit instead of build.")

    def _fit(self, call: FitCall) -> Posterior:
        from dubito.methods.ensembles.members import Members

        training = self.default_training() if call.training is None else call.training
        call = replace(call, training=training, generator=default_generator(call.generator))
        with distributed.together():
            resolved = resolved_training(self.steps()[0], call)  # once for all members
            found = Members(self, replace(call, training=resolved.training, likelihood=resolved.likelihood)).fit()
            place: dict[str, Any] = {"device": found.device, "dtype": found.dtype}
            held_out = None if call.validation is None else Source(call.validation, must_count=False, **place)
            resolved = resolved if len(self.steps()) == 1 else resolved._replace(found=None)
            source = Source(call.data, num_data=call.num_data, **place)
            return finish(found, source, held_out, resolved, self.steps()[0].trains)
