r"""Split-conformal prediction: sets and intervals that contain the truth with a stated probability, for any posterior.

With n calibration data and the rank $k = \lceil (n + 1)\,\ell \rceil$ of the wanted coverage $\ell$, the chance that a
new datum of the same distribution is covered is exactly $k / (n + 1)$ where scores do not tie, and at least that where
they do; given the calibration data it is $\mathrm{Beta}(k, n + 1 - k)$ distributed. No assumption is made on the
posterior: a bad one gives large sets (Vovk et al. 2005; Angelopoulos & Bates 2021, https://arxiv.org/abs/2107.07511).

Groups and weights are those of `calibration_scores`; `online` follows a distribution that drifts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dubito.beliefs.prediction import Prediction
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, CountOrZero, NonNegative, OpenProbability
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.randomness import default_generator, draw_seed
from dubito.fitting.decision_rule import DecisionRule
from dubito.fitting.posterior import Posterior
from dubito.uses.decisions.calibration_scores import (
    CalibrationScores,
    IntervalMethod,
    SetMethod,
    numbers_of,
    of_every_class,
    of_numbers,
)
from dubito.uses.decisions.units import TargetScale, read_scale, scale_targets
from dubito.uses.fixed_draws import FixedDraws, of_classes, restored_generator

_NEEDS_MORE = "Conformal prediction with groups or weights needs them for new data as well: call predict with them."


class _Conformal(DecisionRule):
    """What sets and intervals share: the calibration scores and the thresholds from them."""

    coverage: float
    calibration: CalibrationScores
    draws: FixedDraws

    @property
    def _is_plain(self) -> bool:
        return self.calibration.groups is None and self.calibration.weights is None

    def _saved_state(self) -> dict[str, Any]:
        return {**self.saved_values(), "calibration": self.calibration.to_tree(), "draws": self.draws.to_tree()}

    @classmethod
    def _with_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        found = cls.with_saved(posterior, state)
        found.draws = FixedDraws.from_tree(posterior, state["draws"])
        found.calibration = CalibrationScores.from_tree(state["calibration"], posterior.device)
        return found


class ConformalSets(_Conformal):
    r"""Sets of classes that contain the true one with probability `coverage`.

    The nonconformity of class y is $1 - \bar p_y$ for ``"thr"`` (the smallest sets on average; Sadinle et al. 2019,
    https://arxiv.org/abs/1609.00451) and $\sum_{c: \bar p_c > \bar p_y} \bar p_c + u\,\bar p_y$ for ``"aps"`` (sets
    that grow with the uncertainty; Romano et al. 2020, https://arxiv.org/abs/2006.02544), with a uniform u if
    `randomized` and else u = 1 (larger sets, and more coverage than `coverage`). ``"raps"`` adds
    $\lambda\,(r_y - k)_+$ with the rank $r_y$ of the class, so that sets of many unlikely classes become smaller
    (Angelopoulos et al. 2021, https://arxiv.org/abs/2009.14193). A set holds every class whose nonconformity is at most
    the threshold; it may be empty, where no class conforms.

    Where inputs have several labels (tokens, pixels), each labelled position is one datum. Positions of one input
    depend on each other, so the coverage then holds on average and varies more than the Beta distribution says.

    Args:
        posterior: Any posterior over classes.
        calibration: Labelled data that was not trained on.
        coverage: The probability with which the true class is to be in the set.
        method: ``"thr"``, ``"aps"`` or ``"raps"``.
        randomized: Whether ``"aps"`` and ``"raps"`` draw u; then the same input may get another set at the next call.
        penalty: λ of ``"raps"``.
        free_classes: k of ``"raps"``: so many classes are not penalized.
        groups: The group of each calibration datum ``[N]``, whole numbers, in the order of the data: the coverage then
            holds in every group. ``"class"``: it holds for every true class.
        weights: The density ratio of new and calibration inputs at each calibration datum ``[N]``: the coverage then
            holds for new inputs, although they are distributed otherwise; see `density_ratio`.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.

    Attributes:
        threshold: The largest nonconformity of a class in the set; None with groups or weights.
        calibration: The nonconformity of the calibration data.
    """

    saved: ClassVar[Mapping[str, Any]] = {
        "coverage": OpenProbability, "method": SetMethod, "randomized": bool, "penalty": NonNegative,
        "free_classes": CountOrZero, "by_class": bool,
    }  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        calibration: Data,
        *,
        coverage: OpenProbability = 0.9,
        method: SetMethod = "thr",
        randomized: bool = False,
        penalty: NonNegative = 0.01,
        free_classes: CountOrZero = 5,
        groups: Any = None,
        weights: Tensor | None = None,
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.coverage, self.method, self.randomized = posterior, coverage, method, randomized
        self.penalty, self.free_classes, self.by_class = penalty, free_classes, isinstance(groups, str)
        if self.by_class and groups != "class":
            raise InputError(f'`groups` must be "class" or one whole number per calibration datum, got {groups!r}.')
        self.draws = FixedDraws(posterior, num_samples, generator)
        self._generator = torch.Generator().manual_seed(draw_seed(default_generator(generator)))
        found, targets = self.draws.labelled(calibration, by_position=True)
        prediction = of_classes(found, "A conformal set")
        prediction.log_prob(targets)  # says where a label is out of range
        labels = prediction.checked_targets(targets)
        scores = self.nonconformity(prediction).gather(-1, labels.unsqueeze(-1)).flatten()[:, None]
        of_data = None if groups is None or self.by_class else torch.as_tensor(groups).to(labels.device)
        own = labels.flatten() if self.by_class else of_data
        self.calibration = CalibrationScores(scores, own, None if weights is None else weights.to(scores))
        self.calibration.check_level(coverage)

    @property
    def threshold(self) -> float | None:
        """The largest nonconformity of a class in the set; None with groups or weights."""
        return float(self.calibration.threshold(self.coverage)) if self._is_plain else None

    @checked_arguments
    def predict(self, x: Any, *, groups: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Return which classes are in the set of each input or position, ``[B, *positions, C]``.

        Args:
            x: What `posterior.predict` takes.
            groups: The group of each input ``[B]``, if the calibration data had groups.
            weights: The density ratio at each input ``[B]``, if the calibration data had weights.
        """
        prediction = self.draws.predict(x)
        scores = self.nonconformity(prediction)
        if self._is_plain and groups is None and weights is None:
            return scores <= self.calibration.threshold(self.coverage)
        if self.by_class:
            return scores <= self._class_thresholds(scores, groups, weights)
        limit = self.calibration.thresholds(self.coverage, len(scores), groups, weights)
        return scores <= limit.reshape(len(scores), *[1] * (scores.ndim - 1))

    def _class_thresholds(self, scores: Tensor, groups: Tensor | None, weights: Tensor | None) -> Tensor:
        """Return the thresholds of all classes, ``[C]`` or with weights ``[B, C]``; infinite for unseen classes."""
        if groups is not None:
            raise InputError("`groups` must not be given for new data, because the groups are the classes.")
        known = set(self.calibration.groups.tolist())  # type: ignore[union-attr]
        found = []
        for label in range(scores.shape[-1]):
            if label not in known:
                found.append(scores.new_full((len(scores),), torch.inf))
                continue
            of_class = torch.full((len(scores),), label, device=scores.device)
            found.append(self.calibration.thresholds(self.coverage, len(scores), of_class, weights)[:, 0])
        limit = torch.stack(found, dim=-1)
        return limit.reshape(len(scores), *[1] * (scores.ndim - 2), -1)

    def margin(self, prediction: Prediction) -> Tensor:
        """Return how far each nonconformity is below the threshold; from 0 on the class is in the set."""
        if not self._is_plain:
            raise UnsupportedError(_NEEDS_MORE)
        return self.calibration.threshold(self.coverage) - self.nonconformity(prediction)

    def nonconformity(self, prediction: Prediction) -> Tensor:
        """Return the nonconformity of every class ``[B, *positions, C]``."""
        u = None
        if self.randomized:
            shape = of_classes(prediction, "A conformal set").log_probs.shape[:-1]
            u = torch.rand(*shape, 1, generator=self._generator, dtype=torch.float64).to(prediction.log_probs.device)  # type: ignore[attr-defined]
        return of_every_class(prediction, self.method, u, self.penalty, self.free_classes)

    def labelled_scores(self, x: Any, targets: Tensor) -> Tensor:
        """Return the nonconformity of the true class of each input ``[B]``."""
        prediction = of_classes(self.draws.predict(x), "A conformal set")
        return self.nonconformity(prediction).gather(-1, prediction.checked_targets(targets).unsqueeze(-1)).flatten()

    def state(self) -> dict[str, Any]:
        """Return the settings, the calibration scores and the states of the generators."""
        return {**self._saved_state(), "u": {"device": "cpu", "state": self._generator.get_state()}}

    @classmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Undo `state`."""
        found = cls._with_state(posterior, state)
        if found.calibration.scores.shape[1] != 1:
            raise InputError(f"Sets have one score per datum, but there are {found.calibration.scores.shape[1]}.")
        found._generator = restored_generator(state["u"])
        return found

    def __repr__(self) -> str:
        shown = f"threshold {self.threshold:.4g}" if self.threshold is not None else "several thresholds"
        return f"<ConformalSets: coverage {self.coverage:g} by {self.method}, {shown}>"


class ConformalIntervals(_Conformal):
    r"""Intervals that contain the true number with probability `coverage`, for each output or for all at once.

    The nonconformity of a target y is $|y - m| / s$ for ``"stddev"``, with the predicted mean and standard deviation
    (the interval is $m \pm q s$), and $\max(l - y,\ y - h)$ for ``"quantile"``, with the ends of the posterior's own
    interval (which becomes $[l - q,\ h + q]$; Romano et al. 2019, https://arxiv.org/abs/1905.03222). With `joint` it is
    the largest over the outputs, and the box of intervals contains all targets of a datum with probability `coverage`.

    Args:
        posterior: Any posterior over numbers.
        calibration: Labelled data that was not trained on.
        coverage: The probability with which the truth is to be in the interval.
        method: ``"stddev"`` or ``"quantile"``.
        joint: Whether the coverage is that of all outputs together.
        groups: The group of each calibration datum ``[N]``, whole numbers: the coverage then holds in every group.
        weights: The density ratio of new and calibration inputs at each calibration datum ``[N]``; see `ConformalSets`.
        target_scale: Location and scale of standardised targets, such as ``dataset.target_scale``: the intervals are
            then in original units.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.

    Attributes:
        threshold: The largest nonconformity inside of the interval, one per output ``[O]``, or one for all ``[1]``;
            None with groups or weights.
        calibration: The nonconformity of the calibration data.
    """

    saved: ClassVar[Mapping[str, Any]] = {"coverage": OpenProbability, "method": IntervalMethod, "joint": bool}

    @checked_arguments
    def __init__(
        self,
        posterior: Posterior,
        calibration: Data,
        *,
        coverage: OpenProbability = 0.9,
        method: IntervalMethod = "stddev",
        joint: bool = False,
        groups: Tensor | None = None,
        weights: Tensor | None = None,
        target_scale: Any = None,
        num_samples: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.posterior, self.coverage, self.method, self.joint = posterior, coverage, method, joint
        self.target_scale: TargetScale | None = read_scale(target_scale)
        self.draws = FixedDraws(posterior, num_samples, generator)
        found, targets = self.draws.labelled(calibration)
        scores = self._scores(found, targets)
        own = None if groups is None else groups.to(scores.device)
        self.calibration = CalibrationScores(scores, own, None if weights is None else weights.to(scores))
        self.calibration.check_level(coverage)

    @property
    def threshold(self) -> Tensor | None:
        """The largest nonconformity inside of the interval; None with groups or weights."""
        return self.calibration.threshold(self.coverage) if self._is_plain else None

    @checked_arguments
    def predict(self, x: Any, *, groups: Tensor | None = None, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends ``[B, O]``; infinite where no interval is known to be wide enough.

        Args:
            x: What `posterior.predict` takes.
            groups: The group of each input ``[B]``, if the calibration data had groups.
            weights: The density ratio at each input ``[B]``, if the calibration data had weights.
        """
        prediction = self.draws.predict(x)
        if self._is_plain and groups is None and weights is None:
            return self.ends(prediction)
        return self._ends(prediction, self.calibration.thresholds(self.coverage, len(prediction), groups, weights))

    def ends(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends ``[B, O]`` for a prediction, in float64."""
        if not self._is_plain:
            raise UnsupportedError(_NEEDS_MORE)
        return self._ends(prediction, self.calibration.threshold(self.coverage))

    def _ends(self, prediction: Prediction, threshold: Tensor) -> tuple[Tensor, Tensor]:
        numbers = numbers_of(prediction, self.target_scale)
        if self.method == "stddev":
            reach = threshold * numbers.stddev
            return numbers.mean - reach, numbers.mean + reach
        low, high = numbers.interval(self.coverage)
        return low - threshold, high + threshold

    def _scores(self, prediction: Prediction, targets: Tensor) -> Tensor:
        numbers = numbers_of(prediction, self.target_scale)
        truth = numbers.checked_targets(scale_targets(targets, self.target_scale))
        scores = of_numbers(numbers, truth, self.method, self.coverage)
        return scores.amax(dim=1, keepdim=True) if self.joint else scores

    def labelled_scores(self, x: Any, targets: Tensor) -> Tensor:
        """Return the nonconformity of the targets of each input ``[B]``; for one output or `joint`."""
        scores = self._scores(self.draws.predict(x), targets)
        if scores.shape[1] > 1:
            raise UnsupportedError("Several outputs have one nonconformity only with joint=True.")
        return scores[:, 0]

    def state(self) -> dict[str, Any]:
        """Return the settings, the calibration scores and the state of the generator."""
        return {**self._saved_state(), "scale": None if self.target_scale is None else list(self.target_scale)}

    @classmethod
    def from_state(cls, posterior: Posterior, state: Mapping[str, Any]) -> Self:
        """Undo `state`."""
        found = cls._with_state(posterior, state)
        found.target_scale = read_scale(state["scale"])
        return found

    def __repr__(self) -> str:
        values = None if self.threshold is None else ", ".join(f"{value:.4g}" for value in self.threshold.tolist())
        shown = "several thresholds" if values is None else f"threshold {values}"
        return f"<ConformalIntervals: coverage {self.coverage:g} by {self.method}, {shown}>"


Conformal = ConformalSets | ConformalIntervals
