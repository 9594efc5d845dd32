"""The `Auto` recipe: fit several methods, and return the one that predicts held-out examples best."""

from __future__ import annotations

from typing import Literal

from dubito.core import distributed
from dubito.core.constraints import Natural, Start
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import FitCall, Recipe
from dubito.fitting.training import Training
from dubito.methods.map import MAP

Goal = Literal["calibration", "ood", "intervals", "small"]


@setting
class Auto(Recipe):
    """Choose the method by its predictions of held-out examples.

    The network is trained as by `MAP`. Then the temperature-scaled network is compared with `Laplace` posteriors over
    the last layer, a subnetwork, and all weights (diagonal and Kronecker-factored), and, within a budget of epochs,
    with an `Ensemble`, `Rank1` and `Variational`. Each is fitted without some examples and predicts those. The simplest
    candidate within one standard error of the best is fitted to all data and returned (Breiman et al. 1984). So the
    result is never worse than the temperature-scaled network beyond noise: that one is returned if nothing is better.

    The held-out examples are validation data of at least 500 rows; else five folds of the training data, or a fifth
    of it if that is as many. `posterior.explanation` says in words what was chosen, and has the table behind it.

    With ``Training(checkpoint="run")`` every fit has a checkpoint of its own, ``run.plain`` and so on, and the number
    of epochs is kept in ``run.search``; an interrupted call continues where it was. Several processes fit each
    candidate together, and all of them return the same choice; they must hold the same data.

    Args:
        goal: What the posterior is for. ``"calibration"`` compares log scores. ``"intervals"`` compares the continuous
            ranked probability score of a regression. ``"ood"`` compares how well epistemic uncertainty tells held-out
            inputs from scrambled ones (each feature permuted over the examples), among candidates whose log score is as
            good as the temperature-scaled network's. ``"small"`` compares the log scores of the networks that are left
            when the 80 % of weights with the smallest |mean| / standard deviation are set to zero.
        budget: The most epochs, in training one candidate, that may be used beyond those of the plain network.
            ``"auto"`` allows an `Ensemble` of 5 for small networks and data, and nothing else.
        train: False keeps the model's weights as they are; then validation data are needed.
        start: Where training starts, as for `MAP`.
    """

    setting_name = "Auto"
    goal: Goal = "calibration"
    budget: Natural | Literal["auto"] = "auto"
    train: bool = True
    start: Start = "model"

    def __post_init__(self) -> None:
        self.base()  # raises an error if the settings contradict each other

    def base(self) -> MAP:
        """Return the recipe that trains the plain network."""
        return MAP(train=self.train, start=self.start)

    @property
    def needs_trained_model(self) -> bool:
        """Whether the model must be trained already."""
        return not self.train

    def build(self, problem: Problem) -> Inference:
        """Raise an error: each candidate is fitted on its own."""
        raise UnsupportedError("Auto has no single inference: call fit instead of build.")

    def _fit(self, call: FitCall) -> Posterior:
        from dubito.methods.auto.search import Search

        if call.training is not None and not isinstance(call.training, Training):
            raise InputError(f"training must be a Training(...), not {call.training!r}.")
        with distributed.together():
            return Search(self, call).run()
