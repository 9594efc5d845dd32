"""Answer only where the network is certain enough for a stated risk, and reject the other inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, OpenProbability, Positive, check
from dubito.core.errors import InputError, UnsupportedError
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.posterior import Posterior
from dubito.uses import metrics
from dubito.uses.decisions.scores import Score, score_prediction
from dubito.uses.decisions.units import TargetScale, read_scale, scale_targets
from dubito.uses.fixed_draws import FixedDraws
from dubito.uses.metrics import RiskCoverage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[Prediction, Tensor], Tensor]

# The number of coverages that are tested for a guarantee: 5 %, 10 %, ..., 100 %.
NUM_TESTS = 20


class Decision(NamedTuple):
    """Predictions, and which of them to act on.

    Attributes:
        prediction: The prediction for every input.
        accepted: Whether to use the prediction ``[B]``; the other inputs are rejected.
    """

    prediction: Prediction
    accepted: Tensor


class Rejector(DecisionRule):
    r"""Answer the inputs whose score lies at or below a threshold that was fitted to a stated risk.

    Without `confidence` the threshold is the largest at which the mean loss of the answered calibration data is at most
    `risk`. That is an estimate: the true risk is above it about as often as below.

    With `confidence` $1 - \delta$ the true error rate of answered inputs is at most `risk` with that probability over
    the calibration data. Twenty thresholds at fixed ranks are tested; the errors k among the m calibration data below
    one are binomial, and it passes if $P(\mathrm{Bin}(m, \text{risk}) \le k) \le \delta / 20$ (Geifman & El-Yaniv 2017,
    https://arxiv.org/abs/1705.08500, with fixed ranks in place of their search).

    Args:
        posterior: Any posterior.
        calibration: Labelled data that was not trained on.
        risk: The largest error rate (classification) or mean absolute error (regression) of answered inputs.
        score: The uncertainty: one of `dubito.decisions.scores` but the energy; by default ``"max-probability"``
            for classes and ``"entropy"`` for numbers.
        confidence: None, or the probability with which the risk must hold.
        loss: ``"error"`` (of classes: 1 for a wrong one), ``"absolute"`` or ``"squared"`` (of numbers, averaged over
            outputs), or a function from a prediction and its targets to one loss per datum ``[B]``; with `confidence`
            it must be 0 or 1. By default ``"error"`` for classes and ``"absolute"`` for numbers.
        target_scale: Location and scale of standardised targets, such as ``dataset.target_scale``: the risk and the
            predictions are then in original units.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.

    Attributes:
        threshold: Up to this score an input is answered.
        coverage: The share of the calibration data that is answered.
        curve: Risk against coverage on the calibration data.
    """

    saved: ClassVar[Mapping[str, Any]] = {
        "risk": Positive, "confidence": OpenProbability | None, "score": Score, "threshold": float, "coverage": float
    }  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        calibration: Data,
        *,
        risk: Positive = 0.02,
        score: Score | None = None,
        confidence: OpenProbability | None = None,
        loss: Loss | Literal["error", "absolute", "squared"] | None = None,
        target_scale: Any = None,
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.risk, self.confidence = posterior, risk, confidence
        self.target_scale: TargetScale | None = read_scale(target_scale)
        self.draws = FixedDraws(posterior, num_samples, generator)
        found, targets = self.draws.labelled(calibration)
        prediction, targets = self._in_units(found), scale_targets(targets, self.target_scale)
        usual: Score = "max-probability" if isinstance(prediction, ClassPrediction) else "entropy"
        self.score = usual if score is None else score
        scores = score_prediction(prediction, self.score)
        measure = loss if callable(loss) else _named_loss(loss, prediction)
        losses = _checked_losses(measure(prediction, targets), len(scores)).to(scores.device)
        self.curve = metrics.risk_coverage(scores, losses)
        if confidence is None:
            self.threshold = estimated_threshold(self.curve, risk)
        else:
            self.threshold = _guaranteed_threshold(scores, losses, risk, confidence)
        self.coverage = float((scores <= self.threshold).double().mean())

    def predict(self, x: Any) -> Decision:
        """Return the prediction for each input and whether to act on it; `x` is what `posterior.predict` takes."""
        prediction = self._in_units(self.draws.predict(x))
        return Decision(prediction, self.threshold - score_prediction(prediction, self.score) >= 0)

    def margin(self, prediction: Prediction) -> Tensor:
        """Return how far the score of each datum lies below the threshold ``[B]``; from 0 on it is answered.

        `prediction` is that of the posterior, in its own units.
        """
        return self.threshold - score_prediction(self._in_units(prediction), self.score)

    def _in_units(self, prediction: Prediction) -> Prediction:
        if self.target_scale is None:
            return prediction
        if not isinstance(prediction, RegressionPrediction):
            raise InputError("`target_scale` is for regression, but this posterior predicts classes: leave it out.")
        return prediction.to(torch.float64).rescale(*self.target_scale)

    def state(self) -> dict[str, Any]:
        """Return the settings, the threshold, the curve and the state of the generator."""
        scale = None if self.target_scale is None else list(self.target_scale)
        return {**self.saved_values(), "curve": list(self.curve), "scale": scale, "draws": self.draws.to_tree()}

    @classmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Undo `state`."""
        found = cls.with_saved(posterior, state)
        found.draws = FixedDraws.from_tree(posterior, state["draws"])
        found.curve, found.target_scale = RiskCoverage(*state["curve"]), read_scale(state["scale"])
        return found

    def plot(self) -> Figure:
        """Draw risk against coverage on the calibration data, and the chosen point."""
        from dubito.uses.reporting import plots

        drawn = plots.risk_coverage({"calibration data": [_drawable(self.curve)]}, legend=False, loss="Mean loss")
        axes = drawn.axes[0]
        axes.axhline(self.risk, color=plots.MUTED, linewidth=1, linestyle=(0, (3, 2)))
        axes.axvline(self.coverage, color=plots.MUTED, linewidth=1, linestyle=(0, (3, 2)))
        return drawn

    def __repr__(self) -> str:
        held = "estimated" if self.confidence is None else f"with confidence {self.confidence:g}"
        return f"<Rejector: answers {self.coverage:.1%} at a risk of {self.risk:g} ({held})>"


def _named_loss(name: str | None, prediction: Prediction) -> Loss:
    """Return the loss of this name, or the default one for a kind of prediction."""
    classes = isinstance(prediction, ClassPrediction)
    fitting = ("error",) if classes else ("absolute", "squared")
    if name is not None and name not in fitting:
        kind = "a prediction of classes" if classes else "a regression"
        raise UnsupportedError(f"The loss '{name}' is not defined for {kind}: use {' or '.join(fitting)}.")
    return {"error": _error, "absolute": _absolute, "squared": _squared}[name or fitting[0]]


def _error(prediction: Any, targets: Tensor) -> Tensor:
    if prediction.log_probs.ndim != 2:
        raise UnsupportedError("A Rejector accepts whole inputs: give a `loss` if inputs have several labels.")
    prediction.log_prob(targets)  # says where a label is out of range
    wrong: Tensor = prediction.mode != prediction.checked_targets(targets)
    return wrong


def _absolute(prediction: Any, targets: Tensor) -> Tensor:
    distance: Tensor = (prediction.mean - prediction.checked_targets(targets)).abs()
    return distance.mean(dim=-1)


def _squared(prediction: Any, targets: Tensor) -> Tensor:
    distance: Tensor = prediction.mean - prediction.checked_targets(targets)
    return distance.square().mean(dim=-1)


def _checked_losses(losses: Tensor, num_data: int) -> Tensor:
    if losses.shape != (num_data,):
        raise InputError(f"`loss` must return one number per datum, [{num_data}], got shape {tuple(losses.shape)}.")
    return losses.double()


def largest_threshold(curve: RiskCoverage, risk: float) -> float | None:
    """Return the largest threshold at which the mean loss of the answered data is at most `risk`, if there is one."""
    good = (_last_of_ties(curve) & (curve.risk <= risk)).nonzero()
    return float(curve.thresholds[good[-1, 0]]) if len(good) else None


def estimated_threshold(curve: RiskCoverage, risk: float) -> float:
    """Return the `largest_threshold`, or raise an error if there is none."""
    found = largest_threshold(curve, risk)
    if found is None:
        best = float(curve.risk[_last_of_ties(curve)].min())
        raise InputError(
            f"No threshold reaches a risk of {risk:g} on these {len(curve.risk)} calibration data (the best has "
            f"{best:.4g}): allow a higher risk, choose another score, or improve the posterior."
        )
    return found


def _last_of_ties(curve: RiskCoverage) -> Tensor:
    """Return which data come last among those of equal score: a threshold accepts all of them or none."""
    last = torch.ones_like(curve.risk, dtype=torch.bool)
    last[:-1] = curve.thresholds[1:] != curve.thresholds[:-1]
    return last


def _guaranteed_threshold(scores: Tensor, losses: Tensor, risk: float, confidence: float) -> float:
    check("risk", Annotated[OpenProbability, "a number above 0 and below 1, as a confidence is given"], risk)
    if not bool(((losses == 0) | (losses == 1)).all()):
        raise UnsupportedError("A risk with confidence needs losses of 0 and 1: give such a `loss`, or no confidence.")
    from scipy.stats import binom

    num_data, allowed = len(scores), (1 - confidence) / NUM_TESTS
    needed = math.ceil(math.log(allowed) / math.log1p(-risk))
    if num_data < needed:
        raise InputError(
            f"A risk of {risk:g} with confidence {confidence:g} needs at least {needed} calibration data even without "
            f"an error, but there are {num_data}: give more data, or a higher risk."
        )
    ordered = scores.sort().values
    for test in range(NUM_TESTS, 0, -1):
        # The data strictly below an order statistic are a fresh sample from there, the one at it is not.
        cut = math.inf if test == NUM_TESTS else float(ordered[max(1, num_data * test // NUM_TESTS) - 1])
        below = scores < cut
        if binom.cdf(int(losses[below].sum()), int(below.sum()), risk) <= allowed:
            return math.nextafter(cut, -math.inf)
    raise InputError(
        f"No threshold reaches a risk of {risk:g} with confidence {confidence:g} on these {num_data} calibration data: "
        "allow a higher risk, give more data, or improve the posterior."
    )


def _drawable(curve: RiskCoverage) -> Any:
    from dubito.uses.reporting import evaluation

    return evaluation.RiskCoverageCurve(tuple(curve.coverage.tolist()), tuple(curve.risk.tolist()))
