r"""Split-conformal prediction: sets and intervals that contain the truth with a stated probability, for any posterior.

With n calibration data and the rank $k = \lceil (n + 1)\,\ell \rceil$ of the wanted coverage $\ell$, the chance that a
new datum of the same distribution is covered is exactly $k / (n + 1)$ where scores do not tie, and at least that where
they do; given the calibration data it is $\mathrm{Beta}(k, n + 1 - k)$ distributed. No assumption is made on the
posterior: a bad one gives large sets (Vovk et al. 2005; Angelopoulos & Bates 2021, https://arxiv.org/abs/2107.07511).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction, RegressionPrediction
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, OpenProbability
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator, draw_seed
from dubito.fitting.posterior import Posterior
from dubito.uses.fixed_draws import FixedDraws, check_scores, of_classes, rank_for


class ConformalSets:
    r"""Sets of classes that contain the true one with probability `coverage`.

    The nonconformity of class y is $1 - \bar p_y$ for ``"thr"`` (the smallest sets on average; Sadinle et al. 2019,
    https://arxiv.org/abs/1609.00451) and $\sum_{c: \bar p_c > \bar p_y} \bar p_c + u\,\bar p_y$ for ``"aps"`` (sets
    that grow with the uncertainty; Romano et al. 2020, https://arxiv.org/abs/2006.02544), with a uniform u if
    `randomized` and else u = 1 (larger sets, and more coverage than `coverage`). A set holds every class whose
    nonconformity is at most the k-th smallest of the calibration data; it may be empty, where no class conforms.

    Where inputs have several labels (tokens, pixels), each labelled position is one datum. Positions of one input
    depend on each other, so the coverage then holds on average and varies more than the Beta distribution says.

    Args:
        posterior: Any posterior over classes.
        calibration: Labelled data that was not trained on.
        coverage: The probability with which the true class is to be in the set.
        method: ``"thr"`` or ``"aps"``.
        randomized: Whether ``"aps"`` draws u; then the same input may get another set at the next call.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.

    Attributes:
        threshold: The largest nonconformity of a class in the set.
    """

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        calibration: Data,
        *,
        coverage: OpenProbability = 0.9,
        method: Literal["thr", "aps"] = "thr",
        randomized: bool = False,
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.coverage, self.method, self.randomized = posterior, coverage, method, randomized
        self._draws = FixedDraws(posterior, num_samples, generator)
        self._generator = torch.Generator().manual_seed(draw_seed(default_generator(generator)))
        found, targets = self._draws.labelled(calibration, by_position=True)
        prediction = of_classes(found, "A conformal set")
        prediction.log_prob(targets)  # says where a label is out of range
        labels = prediction.checked_targets(targets).unsqueeze(-1)
        scores = self._nonconformity(prediction).gather(-1, labels).flatten()
        rank = rank_for(coverage, len(scores), f"A coverage of {coverage:g}")
        self.threshold = float(scores.sort().values[rank - 1])

    def predict(self, x: Any) -> Tensor:
        """Return which classes are in the set of each input or position, ``[B, *positions, C]``.

        `x` is what `posterior.predict` takes.
        """
        return self._nonconformity(self._draws.predict(x)) <= self.threshold

    def _nonconformity(self, prediction: Prediction) -> Tensor:
        probs = check_scores(of_classes(prediction, "A conformal set").probs, "probability")
        if self.method == "thr":
            return 1 - probs
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        if self.randomized:
            u = torch.rand(*probs.shape[:-1], 1, generator=self._generator, dtype=torch.float64).to(probs.device)
            above = ordered.cumsum(-1) - (1 - u) * ordered
        else:
            above = ordered.cumsum(-1)
        return torch.empty_like(probs).scatter_(-1, order, above)

    def __repr__(self) -> str:
        return f"<ConformalSets: coverage {self.coverage:g} by {self.method}, threshold {self.threshold:.4g}>"


class ConformalIntervals:
    r"""Intervals that contain the true number with probability `coverage`, for each output by itself.

    The nonconformity of a target y is $|y - m| / s$ for ``"stddev"``, with the predicted mean and standard deviation
    (the interval is $m \pm q s$), and $\max(l - y,\ y - h)$ for ``"quantile"``, with the ends of the posterior's own
    interval (which becomes $[l - q,\ h + q]$; Romano et al. 2019, https://arxiv.org/abs/1905.03222).

    Args:
        posterior: Any posterior over numbers.
        calibration: Labelled data that was not trained on.
        coverage: The probability with which the truth is to be in the interval.
        method: ``"stddev"`` or ``"quantile"``.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.

    Attributes:
        threshold: The largest nonconformity inside of the interval, one per output ``[O]``.
    """

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        calibration: Data,
        *,
        coverage: OpenProbability = 0.9,
        method: Literal["stddev", "quantile"] = "stddev",
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.coverage, self.method = posterior, coverage, method
        self._draws = FixedDraws(posterior, num_samples, generator)
        found, targets = self._draws.labelled(calibration)
        prediction = _numbers(found)
        truth = prediction.checked_targets(targets)
        if method == "stddev":
            scores = (truth - prediction.mean).abs() / prediction.stddev
        else:
            low, high = prediction.interval(coverage)
            scores = torch.maximum(low - truth, truth - high)
        rank = rank_for(coverage, len(scores), f"A coverage of {coverage:g}")
        self.threshold = check_scores(scores, "nonconformity").sort(dim=0).values[rank - 1]

    def predict(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends ``[B, O]``; `x` is what `posterior.predict` takes."""
        prediction = _numbers(self._draws.predict(x))
        if self.method == "stddev":
            reach = self.threshold * prediction.stddev
            return prediction.mean - reach, prediction.mean + reach
        low, high = prediction.interval(self.coverage)
        return low - self.threshold, high + self.threshold

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.4g}" for value in self.threshold.tolist())
        return f"<ConformalIntervals: coverage {self.coverage:g} by {self.method}, threshold {shown}>"


def _numbers(prediction: Prediction) -> RegressionPrediction:
    if not isinstance(prediction, RegressionPrediction):
        raise InputError("A conformal interval is for regression: use ConformalSets for classes.")
    return prediction.to(torch.float64)
