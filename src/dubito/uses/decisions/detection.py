"""Detect out-of-distribution inputs by a threshold on a score, at a stated false-positive rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, OpenProbability
from dubito.core.errors import InputError, UnsupportedError
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.posterior import Posterior
from dubito.uses.decisions.features import FeatureDensity, FeatureScore
from dubito.uses.decisions.lanczos import LanczosScore, SketchedLanczos
from dubito.uses.decisions.scores import Score, energy, energy_of, real_positions, score_prediction
from dubito.uses.fixed_draws import FixedDraws, input_groups, rank_for


class Detector(DecisionRule):
    r"""Flag inputs whose predictions are less certain than those of almost all calibration data.

    With n calibration scores the threshold is the $\lceil (n + 1)(1 - \alpha) \rceil$-th smallest, so that a new input
    of the same distribution is flagged with probability at most $\alpha$, whatever the posterior and the score.

    Args:
        posterior: Any posterior.
        calibration: Inputs of the known distribution that were not trained on, as a tensor or as data whose targets are
            ignored.
        score: The measure of uncertainty, see `dubito.uses.decisions.scores`; or of the distance of the network's
            features from those of the training data, see `dubito.uses.decisions.features`, or of its gradients
            (``"lanczos"``), see `dubito.uses.decisions.lanczos`.
        false_positive_rate: $\alpha$, the largest share of known inputs that may be flagged.
        training: The training data, for the scores of features and gradients.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.

    Attributes:
        threshold: Above this score an input is flagged.
    """

    saved: ClassVar[Mapping[str, Any]] = {
        "score": Score | FeatureScore | LanczosScore, "false_positive_rate": OpenProbability, "threshold": float,
    }  # fmt: skip
    density: FeatureDensity | SketchedLanczos | None = None

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        calibration: Data | Tensor,
        *,
        score: Score | FeatureScore | LanczosScore = "mutual-information",
        false_positive_rate: OpenProbability = 0.05,
        training: Data | None = None,
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.score, self.false_positive_rate = posterior, score, false_positive_rate
        self.draws = FixedDraws(posterior, num_samples, generator)
        if score in (*get_args(FeatureScore), *get_args(LanczosScore)):
            if training is None:
                raise InputError(f"The score '{score}' needs the training data: pass `training=`.")
            if score == "lanczos":
                self.density = SketchedLanczos(posterior, training)
            else:
                self.density = FeatureDensity(posterior, training, score)  # type: ignore[arg-type]
        parts = input_groups(posterior, calibration, "calibration data")
        known = torch.cat([self.scores(part) for part in parts])
        rank = rank_for(1 - false_positive_rate, len(known), f"A false-positive rate of {false_positive_rate:g}")
        ordered = known.sort().values
        if ordered[0] == ordered[-1]:
            raise InputError(
                f"The {score} is {float(ordered[0]):.4g} for all {len(known)} calibration data, so it cannot "
                "separate inputs: choose another score, or a posterior that is not a single point."
            )
        self.threshold = float(ordered[rank - 1])

    def scores(self, x: Any) -> Tensor:
        """Return the score of each input ``[B]``; `x` is what `posterior.predict` takes."""
        if self.density is not None:
            return self.density.scores(self.posterior, x)
        if self.score == "energy":
            return energy(self.posterior, x)
        return score_prediction(self.draws.predict(x), self.score, real_positions(x))  # type: ignore[arg-type]

    def detect(self, x: Any) -> Tensor:
        """Return which inputs are out of distribution ``[B]``; `x` is what `posterior.predict` takes."""
        return self.scores(x) > self.threshold

    def margin(self, prediction: Prediction, logits: Tensor | None = None) -> Tensor:
        """Return how far the score of each datum lies above the threshold ``[B]``; above 0 it is flagged.

        Args:
            prediction: The prediction.
            logits: For the score ``"energy"`` the logits of the network at the posterior's centre, class axis last.
        """
        if logits is not None and self.score == "energy":
            return energy_of(logits) - self.threshold
        if self.density is not None:
            raise UnsupportedError(f"The score '{self.score}' is of inputs, not of predictions: use `scores(x)`.")
        return score_prediction(prediction, self.score) - self.threshold  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        """Return the settings, the threshold and the state of the generator."""
        own = {} if self.density is None else {"density": self.density.to_tree()}
        return {**self.saved_values(), "draws": self.draws.to_tree(), **own}

    @classmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Undo `state`."""
        found = cls.with_saved(posterior, state)
        found.draws = FixedDraws.from_tree(posterior, state["draws"])
        if "density" in state:
            tree, score = state["density"], found.score
            is_lanczos = score == "lanczos"
            found.density = SketchedLanczos.from_tree(tree) if is_lanczos else FeatureDensity.from_tree(score, tree)  # type: ignore[arg-type]
        return found

    def __repr__(self) -> str:
        rate = f"false_positive_rate={self.false_positive_rate:g}"
        return f"<Detector: {self.score} above {self.threshold:.4g}, {rate}>"
